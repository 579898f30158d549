"""Slurm: the job of this process and its end, and the failure domains of hosts (sets of hosts that fail together).

The file of ``ft run --topology`` says the failure domains. In the own format of this project, a line names a host or a
set of hosts (in the bracket notation of Slurm) and the failure domains that they belong to, of kinds that can be chosen
freely. A host may be given in several lines. Hosts with the same name for the same kind are in one failure domain::

    # hosts      kind=name ...
    node[01-04]  rack=r1  power=a
    node[05-08]  rack=r2  power=b

A file that begins with ``SwitchName=``, ``BlockName=`` or ``BlockSizes=`` is a ``topology.conf`` of Slurm, a tree of
switches (topology/tree) or blocks of nodes (topology/block)::

    SwitchName=s0 Nodes=n[0-3]
    SwitchName=s1 Nodes=n[4-7]
    SwitchName=core Switches=s[0-1]

Its kinds of failure domains are ``switch`` (the leaf switch that a host is connected to), ``switch2`` (the switch above
the leaf switch), and so on, and ``block``. A level of switches that has a single switch above all hosts is left out: no
placement of copies survives the loss of that switch.

With ``--no-kill``, the job step and the run continue after the batch script of the job has died with its node. When the
run is over, no process is left that would end the job, and Slurm would keep the other nodes allocated until the time
limit of the job (seen with Slurm 22.05). So ``ft run`` ends it.
"""

import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from ft.base import files
from ft.base.errors import UserError
from ft.platform.supervisor import END_SIGNALS

_FIRST_PORT, _PORTS = 29400, 1000
_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")
_MOST_HOSTS = 100_000


@dataclass(frozen=True)
class JobPlace:
    """The place of this process's node in a job of Slurm or of mpirun (:mod:`ft.job.agent.mpirun`).

    Attributes:
        job: id of the job, with its restart count if it was requeued; under mpirun the name of the run, "" if not
            known.
        node_rank: position of the node among the nodes, from 0.
        endpoint: rendezvous address of the nodes, "host:port", "" if not known; under Slurm it is the first host, at a
            port derived from the job id.
        in_step: whether every node runs a process like this one; False in a batch script or in the shell of salloc.
    """

    job: str
    nnodes: int
    node_rank: int
    endpoint: str
    in_step: bool = True


def read(environment: Mapping[str, str]) -> JobPlace | None:
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
    port = _FIRST_PORT + int(re.sub(r"\D", "", name) or "0") % _PORTS
    endpoint = f"{hosts(nodelist)[0]}:{port}"
    return JobPlace(name, int(nnodes), int(node_rank), endpoint, "SLURM_STEP_ID" in environment)


def _first(environment: Mapping[str, str], *names: str) -> str | None:
    return next((environment[name] for name in names if name in environment), None)


def hosts(nodelist: str) -> list[str]:
    """Return the host names of a Slurm node list such as ``a,b[1-3,07],r[0-1]n[4-5]``, in Slurm's order.

    Raises:
        UserError: brackets do not match or contain something other than numbers.
    """
    parts = (part.strip() for part in re.split(r",(?![^\[\]]*\])", nodelist))  # not at the commas inside brackets
    found = [name for part in parts if part for name in _expand(part, nodelist)]
    if not found:
        raise UserError(f"the Slurm node list {nodelist!r} names no host", "give --rdzv-endpoint HOST:PORT yourself")
    return found


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


_IGNORED = ("linkspeed", "blocksizes")


@dataclass
class _Switch:
    """A switch, from one line of the file.

    Attributes:
        height: 1 for a leaf switch, one more than the highest switch below otherwise.
    """

    line: int
    hosts: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    height: int = 0


def is_topology(line: str) -> bool:
    """Return whether a file whose first line is ``line`` is in Slurm's format."""
    return line.lower().startswith(("switchname=", "blockname=", "blocksizes="))


def parse_topology(lines: list[tuple[int, str]], path: str) -> dict[str, dict[str, str]]:
    """Return host name -> kind of failure domain -> name.

    Args:
        lines: (line number, content) of the lines, without comments.

    Raises:
        UserError: a line is not in Slurm's format, or the switches do not form a tree.
    """
    switches: dict[str, _Switch] = {}
    found: dict[str, dict[str, str]] = {}
    for number, line in lines:
        where = f"{path}, line {number}"
        values = _values(line, where)
        if "blockname" in values:
            for host in _names(values.get("nodes", ""), where):
                found.setdefault(host, {})["block"] = values["blockname"]
        elif "switchname" in values:
            for name in _names(values["switchname"], where):
                if name in switches:
                    raise UserError(f"{where}: switch {name} was given in line {switches[name].line}", "keep one")
                below, nodes = _names(values.get("switches", ""), where), _names(values.get("nodes", ""), where)
                switches[name] = _Switch(number, nodes, below)
    parents = _measure(switches, path)
    for name, switch in switches.items():
        for host in switch.hosts:
            _climb(host, name, switches, parents, found.setdefault(host, {}), path)
    return _without_roots(found)


def _values(line: str, where: str) -> dict[str, str]:
    values = {}
    for word in line.split():
        key, equals, value = word.partition("=")
        if not (equals and value):
            raise UserError(f"{where}: {word!r} is not of the form KEY=VALUE", "see man topology.conf")
        values[key.lower()] = value
    unknown = values.keys() - {"switchname", "blockname", "nodes", "switches", *_IGNORED}
    if unknown:
        raise UserError(f"{where}: {sorted(unknown)[0]!r} is not known in topology.conf", "see man topology.conf")
    return values


def _names(text: str, where: str) -> list[str]:
    if not text:
        return []
    try:
        return hosts(text)
    except UserError as error:
        raise UserError(f"{where}: {error.problem}", "write names as a,b[1-3]") from error


def _measure(switches: dict[str, _Switch], path: str) -> dict[str, str]:
    """Set every switch's height. Return switch -> the switch above it."""
    above: dict[str, str] = {}
    for name, switch in switches.items():
        for child in switch.below:
            if child not in switches:
                raise UserError(f"{path}, line {switch.line}: there is no switch {child}", "give it a line")
            if child in above:
                raise UserError(
                    f"{path}: switch {child} is below {above[child]} and {name}", "make the switches a tree"
                )
            above[child] = name
    try:
        for name in TopologicalSorter({name: switch.below for name, switch in switches.items()}).static_order():
            switches[name].height = 1 + max((switches[child].height for child in switches[name].below), default=0)
    except CycleError as error:
        names = ", ".join(sorted(set(error.args[1])))
        raise UserError(f"{path}: switches {names} are below each other", "make them a tree") from error
    return above


def _climb(
    host: str, leaf: str, switches: dict[str, _Switch], parents: dict[str, str], domains: dict[str, str], path: str
) -> None:
    at: str | None = leaf
    while at is not None:
        height = switches[at].height
        kind = "switch" if height == 1 else f"switch{height}"
        if kind in domains:
            raise UserError(f"{path}: {host} is connected to {domains[kind]} and {at}", "connect it to one leaf")
        domains[kind] = at
        at = parents.get(at)


def _without_roots(found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the hosts' failure domains without each level of the switch tree that has a single switch for all hosts.

    Such a switch, the root of the tree, separates no hosts, so copies cannot be placed on two sides of it. Leaf
    switches and blocks are kept even if there is only one, so that every host of the file belongs to one.
    """
    roots = set()
    for kind in {kind for domains in found.values() for kind in domains}:
        names = {domains.get(kind) for domains in found.values()}
        if len(names) == 1 and kind not in ("switch", "block"):
            roots.add(kind)
    return {host: {k: v for k, v in domains.items() if k not in roots} for host, domains in found.items()}


_POLL_S, _COMMAND_S, _ANSWER_S = 2.0, 30.0, 5.0


def end_orphaned_job(
    environment: Mapping[str, str], is_first_lost: bool, say: Callable[[str], None], patience_s: float = 1200.0
) -> None:
    """After the end of the run, end the Slurm job if its batch script is gone; otherwise return at once.

    Slurm has to confirm that the script's node is down, which it does only after its SlurmdTimeout (usually 300 s).

    Args:
        is_first_lost: whether the run has lost the first node of the allocation, which runs the batch script.
        patience_s: maximum wait for Slurm's confirmation, in seconds.
    """
    job, launcher = job_name(environment), environment.get("SLURM_SRUN_COMM_HOST")
    if job is None or launcher is None or not is_first_lost:
        return
    if _answers(launcher, environment.get("SLURM_SRUN_COMM_PORT", "")):
        return
    say(f"the node of Slurm job {job}'s script is gone: the job is ended as soon as Slurm has noticed it")
    for signum in END_SIGNALS:  # there is nothing to save any more
        signal.signal(signum, signal.SIG_DFL)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        found = _show(job)
        if not is_under_way(found):
            return
        if is_orphan(found):
            _call("scancel", job)
            return
        time.sleep(_POLL_S)


def job_name(environment: Mapping[str, str]) -> str | None:
    """Return the id of this Slurm job, None outside Slurm.

    For array jobs it is ARRAYID_TASKID: SLURM_JOB_ID of one task is also the id of the whole array.
    """
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment.get('SLURM_ARRAY_TASK_ID', '0')}"
    return environment.get("SLURM_JOB_ID")


def lost_first_node(status: Mapping) -> bool:
    """Return whether the run has lost node 0, the first of the allocation, where Slurm runs the batch script.

    ``status`` is the content of the run's status file, which maps each node to its state.
    """
    nodes = status.get("nodes")
    state = nodes.get("n0", "up") if isinstance(nodes, dict) else "up"
    return state != "up" and not str(state).startswith("suspect")


def is_under_way(job: Mapping[str, str]) -> bool:
    """Return whether ``job`` (the fields of ``scontrol show job``) is a running job with a batch script."""
    return job.get("JobState") == "RUNNING" and job.get("BatchFlag") == "1"


def is_orphan(job: Mapping[str, str]) -> bool:
    """Return whether Slurm has taken the batch script's node out of the job."""
    return "BatchHost" in job and job["BatchHost"] not in hosts(job.get("NodeList", ""))


def _show(job: str) -> dict[str, str]:
    words = _call("scontrol", "--oneliner", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def _call(*command: str) -> str:
    """Return the output of a Slurm command, "" if Slurm is not installed or the command fails (no such job)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _answers(host: str, port: str) -> bool:
    """Return whether srun still listens at ``host:port``.

    Call it only once: srun logs each such connection in the job's output.
    """
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError):
        return False
    return True


NODE = "node"
"""The kind of failure domain that every run has: the node itself."""


@dataclass(frozen=True)
class Topology:
    """Failure domains of hosts.

    Attributes:
        hosts: host name -> kind -> name of the domain. In the own format all hosts have the same kinds; in Slurm's
            format a kind is missing where the branches of the tree differ in depth.
        has_agents: whether the file may also name a host by its node number (n0, n1, ...).
    """

    path: str
    hosts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    has_agents: bool = True

    def find(self, names: Iterable[str], agent: str) -> tuple[str, dict[str, str]]:
        """Return the failure domains of one host.

        Args:
            names: names that the host may have in the file, the preferred one first.
            agent: the host's node number as a name, such as "n0".

        Returns:
            (the name that was found, kind -> name of the domain).

        Raises:
            UserError: the file has none of these names.
        """
        names = [name for name in names if name]
        for name in [*names, *([agent] if self.has_agents else [])]:
            if name in self.hosts:
                return name, dict(self.hosts[name])
        known = sorted(self.hosts)
        shown = ", ".join(known[:8]) + (f", ... ({len(known)} hosts)" if len(known) > 8 else "")
        called = " or ".join([*dict.fromkeys(names), *([f"{agent} (its agent)"] if self.has_agents else [])])
        raise UserError(f"the topology {self.path} does not have this host, {called}: it has {shown}", "add a line")


def read_topology(path: str | Path) -> Topology:
    """Read a topology file of either format.

    Raises:
        UserError: the file cannot be read or is malformed; the message has the line number.
    """
    try:
        text = files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"the topology {path} cannot be read: {reason}", "check the path of --topology") from error
    lines = numbered_lines(text)
    if not lines:
        raise UserError(f"the topology {path} is empty", "give each host a line: HOST rack=NAME")
    if is_topology(lines[0][1]):
        return Topology(str(path), parse_topology(lines, str(path)), has_agents=False)
    return Topology(str(path), _parse(lines, str(path)))


def numbered_lines(text: str) -> list[tuple[int, str]]:
    """Return (line number, content) of the lines that are not empty, without comments.

    A backslash at the end of a line joins the next line to it.
    """
    lines, start, pending = [], 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#", 1)[0].rstrip()
        start = start or number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        whole = (pending + line).strip()
        if whole:
            lines.append((start, whole))
        start, pending = 0, ""
    return [*lines, (start, pending.strip())] if pending.strip() else lines


def _parse(lines: list[tuple[int, str]], path: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for number, line in lines:
        names, *pairs = line.split()
        if "=" in names or not pairs:
            raise UserError(
                f"{path}, line {number}: {line!r} is not of the form HOSTS KIND=NAME ...",
                "write for example: node[01-04] rack=r1 power=a",
            )
        for host in _hosts_of(names, path, number):
            for pair in pairs:
                _note(found.setdefault(host, {}), host, pair, f"{path}, line {number}")
    kinds = list(dict.fromkeys(kind for domains in found.values() for kind in domains))
    for host, domains in found.items():
        missing = [kind for kind in kinds if kind not in domains]
        if missing:
            raise UserError(
                f"{path}: {host} has no {missing[0]}, but other hosts have one", f"add: {host} {missing[0]}=NAME"
            )
    return {host: {kind: domains[kind] for kind in kinds} for host, domains in found.items()}


def _hosts_of(names: str, path: str, number: int) -> list[str]:
    try:
        return hosts(names)
    except UserError as error:
        raise UserError(f"{path}, line {number}: {error.problem}", "write hosts as a,b[1-3]") from error


def _note(domains: dict[str, str], host: str, pair: str, where: str) -> None:
    kind, equals, name = pair.partition("=")
    if not (kind and equals and name):
        raise UserError(f"{where}: {pair!r} is not of the form KIND=NAME", "for example rack=r1")
    if kind == NODE:
        raise UserError(
            f"{where}: the kind {NODE!r} is reserved: every host is a failure domain of it", "use another word"
        )
    if domains.get(kind, name) != name:
        raise UserError(
            f"{where}: {host} is in {kind} {name}, but an earlier line puts it in {kind} {domains[kind]}", "keep one"
        )
    domains[kind] = name
