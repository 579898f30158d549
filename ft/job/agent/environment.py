"""The environment variables of a worker's script: those of torchrun and those of this project."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Place:
    """What all workers of one agent have in common.

    Attributes:
        node: the agent's name.
        node_rank: number of its node.
        host: address at which other nodes reach this node.
        socket: address of the agent's socket (FT_AGENT).
        faults: file with the planned faults, "" if there are none.
        domains: kind -> name of the node's failure domains.
    """

    node: str
    node_rank: int
    host: str
    socket: str
    run_dir: str
    run_id: str
    world_size: int
    nproc: int
    max_restarts: int
    faults: str = ""
    domains: Mapping[str, str] = field(default_factory=dict)


def worker_environment(
    place: Place, worker: str, restart: int, rank: int | None, local_rank: int, master: tuple[str, int]
) -> dict[str, str]:
    """Return the variables that are set on top of the user's environment for one worker.

    Args:
        place: what the workers of this node have in common.
        worker: name of the worker.
        restart: number of warm restarts of the run so far.
        rank: logical rank, None for a standby, which learns its rank when it takes over a position. Until then RANK is
            the last rank: the script's range checks hold, and the standby does not act as rank 0.
        local_rank: number of its device.
        master: host and port for a process group that the script makes itself.
    """
    shown_rank = place.world_size - 1 if rank is None else rank
    return {
        "FT_AGENT": place.socket,
        "FT_WORKER": worker,
        "FT_NODE": place.node,
        "FT_HOST": place.host,
        "FT_RUN_DIR": place.run_dir,
        "FT_RESTART": str(restart),
        "FT_STANDBY": "1" if rank is None else "",
        "FT_FAULTS": place.faults,
        "RANK": str(shown_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.nproc),
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.world_size // place.nproc),
        "ROLE_RANK": str(shown_rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
    }


def defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the defaults for variables that the user has not set: one OpenMP thread per worker, as with torchrun.

    numpy's OpenBLAS gets one thread too, whatever OMP_NUM_THREADS says: it starts its threads when it is imported, and
    a warm pool with threads cannot fork.
    """
    wanted = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {name: value for name, value in wanted.items() if name not in environment}
