"""Reads the Slurm job of this process from environment variables: nodes, node rank and a rendezvous address."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ft.base.errors import UserError

_FIRST_PORT, _PORTS = 29400, 1000
_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")
_MOST_HOSTS = 100_000


@dataclass(frozen=True)
class SlurmJob:
    """The Slurm job step that this process belongs to.

    Attributes:
        job: id of the job, with its restart count if it was requeued.
        nnodes: number of nodes.
        node_rank: position of this process's node among the nodes, from 0.
        hosts: host names in Slurm's order.
        in_step: whether srun has started this process, so that every node runs a process like it; False in a batch
            script or in the shell of salloc.
    """

    job: str
    nnodes: int
    node_rank: int
    hosts: list[str]
    in_step: bool = True

    @property
    def endpoint(self) -> str:
        """Return the nodes' rendezvous address: the first host, at a port derived from the job id."""
        digits = re.sub(r"\D", "", self.job) or "0"
        return f"{self.hosts[0]}:{_FIRST_PORT + int(digits) % _PORTS}"


def read(environment: Mapping[str, str]) -> SlurmJob | None:
    """Return the Slurm job that this process belongs to, None outside Slurm.

    Raises:
        UserError: several tasks per node were started, or the node list cannot be read.
    """
    nnodes = _first(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    nodelist = _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    if nnodes is None or nodelist is None:
        return None
    if int(environment.get("SLURM_LOCALID", "0")) > 0:
        raise UserError(
            f"Slurm task {environment.get('SLURM_PROCID', '?')} is not alone on its node; ft run is one per node",
            "start it with: srun --ntasks-per-node=1 ft run ...",
        )
    node_rank = environment.get("SLURM_NODEID", environment.get("SLURM_PROCID", "0"))
    job = environment.get("SLURM_JOB_ID", "0")
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    name = job if restarts == "0" else f"{job}-{restarts}"
    return SlurmJob(name, int(nnodes), int(node_rank), hosts(nodelist), "SLURM_STEP_ID" in environment)


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((environment[name] for name in names if name in environment), None)


def hosts(nodelist: str) -> list[str]:
    """Return the host names of a Slurm node list such as ``a,b[1-3,07],r[0-1]n[4-5]``, in Slurm's order.

    Raises:
        UserError: brackets do not match or contain something other than numbers.
    """
    found = [name for part in _split(nodelist) for name in _expand(part, nodelist)]
    if not found:
        raise UserError(f"the Slurm node list {nodelist!r} names no host", "give --rdzv-endpoint HOST:PORT yourself")
    return found


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, current = [], 0, ""
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += letter
    return [part.strip() for part in (*parts, current) if part.strip()]


def _expand(part: str, nodelist: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    inside, closing, tail = rest.partition("]")
    if not bracket and "]" not in part:
        return [part]
    if not (bracket and closing):
        raise UserError(f"brackets do not match in the Slurm node list {nodelist!r}", "give --rdzv-endpoint HOST:PORT")
    numbers = []
    for item in inside.split(","):
        match = _RANGE.match(item)
        if not match:
            raise UserError(f"{item!r} is no number or range in {nodelist!r}", "give --rdzv-endpoint HOST:PORT")
        first, last = match[1], match[2] or match[1]
        if len(last) > 9 or int(last) - int(first) >= _MOST_HOSTS:
            raise UserError(f"{item!r} names more than {_MOST_HOSTS:,} hosts", "give the hosts that there are")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    ends = _expand(tail, nodelist) if tail else [""]
    if len(numbers) * len(ends) > _MOST_HOSTS:
        raise UserError(f"{part[:99]!r} names more than {_MOST_HOSTS:,} hosts", "give the hosts that there are")
    return [head + number + end for number in numbers for end in ends]
