"""Reads the failure domains of hosts (sets of hosts that fail together) from the file of ``ft run --topology``.

The file has this project's own format or that of Slurm's ``topology.conf``. In the own format, a line names a host or a
set of hosts (in Slurm's bracket notation) and the failure domains that they belong to. The kinds of failure domains can
be chosen freely::

    # hosts      kind=name ...
    node[01-04]  rack=r1  power=a
    node[05-08]  rack=r2  power=b

A host may be given in several lines. Hosts with the same name for the same kind are in one failure domain. Slurm's
format is recognised by its first word, ``SwitchName=``, ``BlockName=`` or ``BlockSizes=``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ft.base import files
from ft.base.errors import UserError
from ft.platform import slurm

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
    if slurm.is_topology(lines[0][1]):
        return Topology(str(path), slurm.parse_topology(lines, str(path)), has_agents=False)
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
        for host in _expand(names, path, number):
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


def _expand(names: str, path: str, number: int) -> list[str]:
    try:
        return slurm.hosts(names)
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
