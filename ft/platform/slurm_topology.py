"""Parses Slurm's ``topology.conf`` into failure domains (sets of hosts that can fail together).

The file describes a tree of switches (topology/tree) or blocks of nodes (topology/block):

    SwitchName=s0 Nodes=n[0-3]
    SwitchName=s1 Nodes=n[4-7]
    SwitchName=core Switches=s[0-1]

The kinds of failure domains are ``switch`` (the leaf switch that a host is connected to), ``switch2`` (the switch above
the leaf switch), and so on, and ``block``. A level of switches that has a single switch above all hosts is left out:
no placement of copies survives the loss of that switch.
"""

from dataclasses import dataclass, field

from ft.base.errors import UserError
from ft.platform import slurm

_IGNORED = ("linkspeed", "blocksizes")


@dataclass
class _Switch:
    """A switch, from one line of the file.

    Attributes:
        line: number of the line.
        hosts: hosts connected to the switch.
        below: names of the switches connected below it.
        height: 1 for a leaf switch, one more than the highest switch below otherwise.
    """

    line: int
    hosts: list[str] = field(default_factory=list)
    below: list[str] = field(default_factory=list)
    height: int = 0


def is_slurm(line: str) -> bool:
    """Return whether a file whose first line is ``line`` is in Slurm's format."""
    return line.lower().startswith(("switchname=", "blockname=", "blocksizes="))


def parse(lines: list[tuple[int, str]], path: str) -> dict[str, dict[str, str]]:
    """Return host name -> kind of failure domain -> name.

    Args:
        lines: (line number, content) of the lines, without comments.
        path: path of the file, for error messages.

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
        return slurm.hosts(text)
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
    waiting = dict(switches)
    while waiting:
        ready = [name for name, switch in waiting.items() if not any(child in waiting for child in switch.below)]
        if not ready:
            raise UserError(f"{path}: switches {', '.join(sorted(waiting))} are below each other", "make them a tree")
        for name in ready:
            switch = waiting.pop(name)
            switch.height = 1 + max((switches[child].height for child in switch.below), default=0)
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
