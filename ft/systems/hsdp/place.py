"""Which replica this process belongs to, as ``ft run --ft-hsdp-replicas`` told it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ft.base import token
from ft.base.errors import UserError
from ft.job.quorum import QuorumClient
from ft.systems.hsdp.lr import MODES

REPLICA = "FT_HSDP_REPLICA"


@dataclass(frozen=True)
class Place:
    """``replica`` of ``replicas``; ``run_dir``: folder of the whole run. ``host``: address of this node.

    ``lr_scaling``: how the learning rate follows the healthy replicas. ``wait_s``: for so long a replica that is
    fetching state is waited for before an update makes its fetch void (:func:`ft.job.replicas.deadlines.fetch_wait`).
    ``comes_back``: it was there before, or comes late, so its state is to be had from the others. ``life``: number of
    this world of workers of it. ``digests``: of the state, into the record of every step. ``redundancy``: of the shard
    types that replicas stack as groups (SPARe), None: each trains a part of its own. ``streams``: connections between
    two ranks that exchange gradients.
    """

    replica: int
    replicas: int
    run_dir: Path
    host: str
    lr_scaling: str = "sqrt"
    wait_s: float = 1.0
    comes_back: bool = False
    life: int = 0
    redundancy: int | None = None
    streams: int = 1
    digests: bool = False

    @property
    def token(self) -> str:
        """Of the whole run; that of the replica's own processes is another one."""
        return token.find(self.run_dir, 0.0)

    def announce(self) -> QuorumClient:
        """The leader's end of the quorum. Of one that comes back the others hear now that it does."""
        client = QuorumClient(self.run_dir, self.replica, self.life, self.token)
        if self.comes_back:
            client.arriving()
        return client

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Place | None":
        """None: this is no replica of an FT-HSDP run.

        Raises:
            UserError: the variables contradict each other.
        """
        if REPLICA not in environment:
            return None
        try:
            place = cls(
                replica=int(environment[REPLICA]),
                replicas=int(environment["FT_HSDP_REPLICAS"]),
                run_dir=Path(environment["FT_HSDP_RUN_DIR"]),
                host=environment.get("FT_HOST", "127.0.0.1"),
                lr_scaling=environment.get("FT_HSDP_LR_SCALING", "sqrt"),
                wait_s=float(environment.get("FT_HSDP_WAIT", "1.0")),
                digests=bool(environment.get("FT_HSDP_DIGESTS")),
                redundancy=int(environment["FT_SPARE_REDUNDANCY"]) if "FT_SPARE_REDUNDANCY" in environment else None,
                streams=int(environment.get("FT_HSDP_STREAMS", "1")),
                life=int(environment.get("FT_RESTART", "0")),
                comes_back=any(int(environment.get(name, "0")) > 0 for name in ("FT_HSDP_LIFE", "FT_RESTART")),
            )
        except (KeyError, ValueError) as error:
            raise UserError(f"the FT_HSDP_* variables are incomplete: {error}", "start with ft run") from error
        if not 0 <= place.replica < place.replicas or place.lr_scaling not in MODES:
            raise UserError(f"the FT_HSDP_* variables do not fit together: {place}", "start with ft run")
        return place
