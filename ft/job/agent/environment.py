"""What a node agent of ``ft run`` sets for its workers: torchrun's and FT_* variables, and the rendezvous address."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft.base.flags import groups
from ft.job.agent.options import RunOptions
from ft.job.agent.uplink import Uplink
from ft.job.control.timeouts import VARIABLE
from ft.job.messages import MasterChosen
from ft.platform import network


@dataclass(frozen=True)
class NodeContext:
    """This node in the run: its options, and what the agent has found out.

    Attributes:
        host: address at which other nodes reach this node.
        socket: address of the agent's socket (FT_AGENT).
        faults: file with the planned faults, "" if there are none.
    """

    options: RunOptions
    node: str
    host: str
    socket: str
    faults: str = ""


def worker_environment(
    place: NodeContext, worker: str, restart: int, rank: int | None, local_rank: int, master: tuple[str, int]
) -> dict[str, str]:
    """Return the variables that are set for one worker in addition to the user's environment.

    Args:
        rank: logical rank, None for a standby. A standby gets its rank when it replaces a worker; until then its RANK
            is the last rank, so that the script's range checks hold and the standby does not act as rank 0.
        master: (host, port) for a process group that the script creates itself.
    """
    options = place.options
    shown_rank = options.world_size - 1 if rank is None else rank
    return {
        "FT_AGENT": place.socket,
        "FT_WORKER": worker,
        "FT_NODE": place.node,
        "FT_HOST": place.host,
        "FT_DATA_HOST": options.data_addr or place.host,
        "FT_RUN_DIR": str(options.run_dir),
        "FT_RESTART": str(restart),
        "FT_STANDBY": "1" if rank is None else "",
        "FT_HEALTH": options.health,
        "FT_FAULTS": place.faults,
        VARIABLE: json.dumps(options.timeouts.changed()),
        "RANK": str(shown_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(options.world_size),
        "LOCAL_WORLD_SIZE": str(options.nproc),
        "GROUP_RANK": str(options.cluster.node_rank),
        "GROUP_WORLD_SIZE": str(options.cluster.training_nodes),
        "ROLE_RANK": str(shown_rank),
        "ROLE_WORLD_SIZE": str(options.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RUN_ID": options.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
    }


CUDA_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_SPLITS = ("--tensor-model-parallel-size", "--context-parallel-size")
_OTHER_QUEUES = ("--use-megatron-fsdp", "--use-torch-fsdp2", "--overlap-moe-expert-parallel-comm")


def defaults(environment: Mapping[str, str], flags: Sequence[str] = ()) -> dict[str, str]:
    """Return the defaults for variables that the user has not set: one OpenMP thread per worker, as with torchrun.

    OPENBLAS_NUM_THREADS is set to 1 as well, even if the user has set OMP_NUM_THREADS: numpy's OpenBLAS starts its
    threads when numpy is imported, and the warm pool (the process that workers are forked from) must have no threads.

    CUDA_DEVICE_MAX_CONNECTIONS is set to 1 if the script's flags split layers or sequences among GPUs: before
    Blackwell, Megatron-LM relies on one queue, in which communication starts before the computation that hides it. It
    is not set with flags that need several queues.
    """
    wanted = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    given = {group[0].partition("=")[0]: (group[0].partition("=")[2] or " ".join(group[1:])) for group in groups(flags)}
    if any(given.get(flag, "1") != "1" for flag in _SPLITS) and not given.keys() & set(_OTHER_QUEUES):
        wanted[CUDA_QUEUES] = "1"
    return {name: value for name, value in wanted.items() if name not in environment}


class Masters:
    """The rendezvous addresses, one for each warm restart of the run.

    A warm restart needs a new port, because old processes may still hold the old one. The agent of the node with
    logical rank 0 chooses the address. The control plane passes it on to the other agents.
    """

    def __init__(self, place: NodeContext, uplink: Uplink):
        self._place, self._uplink = place, uplink
        self._known: dict[int, tuple[str, int]] = {}

    def find(self, number: int, ranks: list[int]) -> tuple[str, int] | None:
        """Return (host, port) for restart ``number``, None while it is not known.

        Args:
            number: number of the warm restart, 0 for the first start.
            ranks: logical ranks of this agent's workers. If rank 0 is among them, this call chooses the address.
        """
        if number not in self._known and 0 in ranks:
            self._known[number] = (self._place.host, network.free_port())
            if len(ranks) < self._place.options.world_size:
                self._uplink.post(MasterChosen(number, *self._known[number]))
        return self._known.get(number)

    def known(self, number: int) -> tuple[str, int]:
        """Return (host, port) for standbys, which do not use the address: port 0 if it is not known."""
        return self._known.get(number, (self._place.host, 0))

    def learn(self, answer: MasterChosen) -> None:
        self._known[answer.number] = (answer.host, answer.port)
