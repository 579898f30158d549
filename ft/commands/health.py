"""Define the command ``ft health``, which shows what this node says of itself, the findings first."""

import argparse
import json
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ft.base import quantities
from ft.base.errors import UserError
from ft.faults.health import RULES, Finding, rules
from ft.platform.health import EVENT, Observation, Reading
from ft.platform.health.reader import Reader, of_this_node
from ft.show.text import count, seconds, shortened, table

HEALTHY, FOUND, UNREADABLE = 0, 1, 2
"""Exit codes."""

_BETWEEN_S = 1.0
"""Seconds between two readings of the counters; their difference shows how fast each counter grows."""
_WIDTH = 100
_MANY = 4
_SAYS_MUCH = (".up", ".live")
"""Endings of the names of observations whose zero is worth a line."""


def add_parser(subparsers) -> None:
    """Add the subcommand. It sets the parser default ``main``: a function of the arguments that returns the exit
    code.
    """
    parser = subparsers.add_parser(
        "health",
        help="show what this node says of itself: GPUs, network ports, memory, disks, clock and kernel log",
        description="Read this node twice within a second, and judge it by the rules of docs/health.md. Exit code: 0 "
        "without findings, 1 with findings, 2 if nothing can be read.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--all", action="store_true", help="show zero counters and every device, too")
    parser.add_argument(
        "--watch",
        type=quantities.argument(_bare_seconds),
        metavar="SECONDS",
        help="read the node again every so many seconds until interrupted, and print what is new",
    )
    parser.add_argument(
        "--since",
        type=quantities.argument(quantities.seconds),
        default=86400.0,
        metavar="TIME",
        help="leave out lines of the kernel log that are older than this, such as 30m or 7d (default: 1d)",
    )
    parser.add_argument("--rules", action="store_true", help="print the rules instead, and read nothing")
    parser.add_argument(
        "--root",
        metavar="FOLDER",
        help="read the /sys, /proc and /dev in this folder, and no GPU, instead of this node",
    )
    parser.set_defaults(main=run_health)


def run_health(arguments: argparse.Namespace) -> int:
    """Print what the node says of itself.

    Returns:
        0 without findings, 1 with findings, 2 if nothing can be read.

    Raises:
        UserError: the folder to read does not exist.
    """
    if arguments.rules:
        print(_rules_as_text())
        return HEALTHY
    root = None if arguments.root is None else Path(arguments.root)
    if root is not None and not root.is_dir():
        raise UserError(f"--root {root} is no folder", "give a folder with sys, proc and dev in it")
    watched = [] if root is not None else list(dict.fromkeys([Path("/"), Path.cwd()]))
    reader = of_this_node(socket.gethostname(), root, watched)
    try:
        reading, found = examine(reader, arguments.since)
        code = FOUND if found else HEALTHY
        is_all = arguments.all
        print(_json(reading, found) if arguments.json else as_text(reading, found, is_all), flush=True)
        if is_blind(reading):
            return UNREADABLE
        while arguments.watch is not None:
            time.sleep(arguments.watch)
            before, reading = reading, reader.read()
            found = rules(before, reading)
            code = FOUND if found else code
            print(_json(reading, found) if arguments.json else _news(reading, found), flush=True)
        return code
    except KeyboardInterrupt:
        return code if arguments.watch is not None else 128 + signal.SIGINT
    finally:
        reader.close()


def examine(reader: Reader, since_s: float, between_s: float = _BETWEEN_S) -> tuple[Reading, list[Finding]]:
    """Read a node twice.

    Args:
        since_s: age in seconds up to which events count.
        between_s: seconds between the readings.

    Returns:
        The second reading with the events of both, and the findings, the most severe first.
    """
    first = reader.read()
    time.sleep(between_s)
    second = reader.read()
    recent = [o for o in first.observations if o.kind != EVENT or o.when > first.when - since_s]
    first = replace(first, observations=tuple(recent))
    events = [o for o in recent if o.kind == EVENT]
    whole = replace(second, observations=(*second.observations, *events))
    values_only = replace(first, observations=tuple(o for o in recent if o.kind != EVENT))
    return whole, rules(values_only, whole)


def is_blind(reading: Reading) -> bool:
    """Return whether no source of the reading could be read; the difference of two clocks can always be."""
    return all(observation.name == "clock.ahead" for observation in reading.observations)


def as_text(reading: Reading, found: Iterable[Finding], is_all: bool = False) -> str:
    """Return the findings, a table of the observations, and what cannot be read."""
    lines = [*_findings(list(found), reading.when), ""]
    shown = [o for o in reading.observations if is_all or _says_something(o)]
    rows = _rows(shown, is_all)
    if rows:
        lines += [table(("device", "observation", "value", ""), rows, right=(2,)), ""]
    left = len(reading.observations) - len(shown)
    if left:
        lines.append(f"{count(left, 'value')} left out: zero, as they should be (--all shows them)")
    lines += [f"cannot be read: {source}: {why}" for source, why in reading.unreadable.items()]
    return "\n".join(lines).rstrip()


def _findings(found: list[Finding], now: float) -> list[str]:
    if not found:
        return ["no findings"]
    lines = [count(len(found), "finding")]
    for each in found:
        age = now - each.when
        when = f", {seconds(age)} ago" if age >= 1 else ""
        lines.append(f"  {each.device or each.node}: {each.action} ({each.category}{when})")
        lines.append(f"    {shortened(each.reason, 2 * _WIDTH)}")
        lines.append(f"    {each.advice} [{each.observation}; {each.source}]")
    return lines


def _news(reading: Reading, found: list[Finding]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(reading.when))
    return "\n".join([f"{at}  {_findings(found, reading.when)[0]}", *_findings(found, reading.when)[1:]])


def _says_something(observation: Observation) -> bool:
    return bool(observation.value or observation.unit or observation.name.endswith(_SAYS_MUCH))


def _rows(shown: Iterable[Observation], is_all: bool) -> list[tuple[str, str, str, str]]:
    """Return (device, name, value, text); equal lines of many devices become one."""
    devices: dict[tuple[str, str, str], list[str]] = {}
    for each in shown:
        if each.name != "clock.ahead":
            devices.setdefault((each.name, _value(each), shortened(each.text, _WIDTH)), []).append(each.device)
    rows = []
    for (name, value, text), names in devices.items():
        together = not is_all and len(names) > _MANY
        rows += [(each or "-", name, value, text) for each in ([f"{len(names)} devices"] if together else names)]
    return sorted(rows, key=lambda row: row[0] != "-")


def _value(observation: Observation) -> str:
    value = observation.value
    if observation.unit == "bytes":
        return f"{value / (1 << 30):,.1f} GiB"
    if observation.name.endswith("share"):
        return f"{100 * value:.1f} %"
    return f"{value:,.6g}{' ' if observation.unit else ''}{observation.unit}"


def _json(reading: Reading, found: list[Finding]) -> str:
    values: dict[str, Any] = {
        "node": reading.node,
        "when": reading.when,
        "findings": [asdict(each) for each in found],
        "observations": [asdict(each) for each in reading.observations],
        "unreadable": dict(reading.unreadable),
    }
    return json.dumps(values)


def _rules_as_text() -> str:
    head = ("observation", "condition", "action", "class of fault", "cause", "meaning")
    rows = [
        (rule.observation, f"{rule.condition} {rule.limit:g}", rule.action, rule.category, rule.cause, rule.meaning)
        for rule in RULES
    ]
    return table(head, rows)


def _bare_seconds(text: str) -> float:
    return quantities.between(1e-3, 1e9)(quantities.seconds(text, bare=1.0), "not a time from 1 ms to 1e9 s")
