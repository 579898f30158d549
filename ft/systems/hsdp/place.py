"""Identity of this process within an FT-HSDP run: which replica (copy of the model) it belongs to, and the run's
options.

``ft run --ft-hsdp-replicas`` passes both to its workers in environment variables.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ft.base import token
from ft.base.errors import UserError
from ft.job.quorum import EPOCHS, QuorumClient

REPLICA = "FT_HSDP_REPLICA"
NONE, LINEAR, SQRT = MODES = ("none", "linear", "sqrt")
"""Modes of scaling the learning rate (:func:`ft.systems.hsdp.work.factor`)."""
DEFAULT = SQRT
"""FT-HSDP, section 6.2, recommends sqrt, which keeps the rate proportional to the standard deviation of the gradient
noise; its baseline is none.
"""


@dataclass(frozen=True)
class ReplicaContext:
    """The replica that this process belongs to, and the options of the run.

    Attributes:
        wait_s: seconds that an update waits for a replica that is fetching state, before it cuts the fetch off
            (:func:`ft.job.replicas.deadlines.fetch_wait`).
        comes_back: whether the replica was restarted or joins late, so that it fetches its state from the others.
        life: number of the replica's present incarnation; it grows with every restart of its workers.
        in_place: whether standbys replace lost workers of the replica. Each epoch is then a life of its own, because
            the addresses of the replaced ranks change.
        redundancy: with SPARe, the number of parts of a global batch (shard types) that each replica can compute; None
            without SPARe: each replica trains its own part.
        streams: number of TCP connections that carry gradients between two ranks.
        chunk_bytes: size S of the chunks in which gradients are sent; None: the default of the platform.
        chunks: number C of chunks per rank and partition; S x C bytes are in flight between two ranks at most.
        digests: whether a checksum of the state is recorded for every step.
    """

    replica: int
    replicas: int
    run_dir: Path
    host: str
    lr_scaling: str = DEFAULT
    wait_s: float = 1.0
    comes_back: bool = False
    life: int = 0
    in_place: bool = False
    redundancy: int | None = None
    streams: int = 1
    chunk_bytes: int | None = None
    chunks: int = 2
    digests: bool = False

    @property
    def token(self) -> str:
        """Return the secret by which processes of different replicas authenticate each other.

        Within one replica, the processes use another secret.
        """
        return token.find(self.run_dir, 0.0)

    def life_in(self, epoch: int) -> int:
        """Return the number of the replica's life in the epoch ``epoch`` of its workers."""
        return self.life * EPOCHS + epoch if self.in_place else self.life

    def announce(self) -> QuorumClient:
        """Create the leader's quorum client. If this replica comes back, announce its arrival to the other replicas."""
        client = QuorumClient(self.run_dir, self.replica, self.life, self.token)
        if self.comes_back:
            client.arriving()
        return client

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "ReplicaContext | None":
        """Read the place from the environment; return None if this process is not part of an FT-HSDP run.

        Raises:
            UserError: the variables are incomplete or contradict each other.
        """
        if REPLICA not in environment:
            return None
        try:
            place = cls(
                replica=int(environment[REPLICA]),
                replicas=int(environment["FT_HSDP_REPLICAS"]),
                run_dir=Path(environment["FT_HSDP_RUN_DIR"]),
                host=environment.get("FT_DATA_HOST") or environment.get("FT_HOST", "127.0.0.1"),
                lr_scaling=environment.get("FT_HSDP_LR_SCALING", DEFAULT),
                wait_s=float(environment.get("FT_HSDP_WAIT", "1.0")),
                digests=bool(environment.get("FT_HSDP_DIGESTS")),
                redundancy=int(environment["FT_SPARE_REDUNDANCY"]) if "FT_SPARE_REDUNDANCY" in environment else None,
                streams=int(environment.get("FT_HSDP_STREAMS", "1")),
                chunk_bytes=int(environment["FT_HSDP_CHUNK"]) if "FT_HSDP_CHUNK" in environment else None,
                chunks=int(environment.get("FT_HSDP_CHUNKS", "2")),
                life=int(environment.get("FT_RESTART", "0")),
                in_place=bool(environment.get("FT_HSDP_IN_PLACE")),
                comes_back=any(int(environment.get(name, "0")) > 0 for name in ("FT_HSDP_LIFE", "FT_RESTART")),
            )
        except (KeyError, ValueError) as error:
            raise UserError(f"the FT_HSDP_* variables are incomplete: {error}", "start with ft run") from error
        if not 0 <= place.replica < place.replicas or place.lr_scaling not in MODES:
            raise UserError(f"the FT_HSDP_* variables do not fit together: {place}", "start with ft run")
        return place
