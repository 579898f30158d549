"""The first cause of a crash as text, for ``ft diagnose crash`` and for the end of a failed ``ft run``."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ft.base.events import named
from ft.faults import first_cause as causes
from ft.faults.first_cause import CrashError, FirstCause, Group
from ft.show.text import count, shortened, spans

_WIDTH = 200
_ADVICE = {
    causes.MEMORY: "use a smaller micro-batch, recompute activations, or raise a parallel size; see ft check",
    causes.HARDWARE: "take the node out of use and have the device examined",
    causes.STORAGE: "make room, or repair the mount that the message names",
    causes.HANG: "look at the stack of that rank with py-spy, or raise the limit with --limits if it was only slow",
    causes.NODE: "see why the node or its network went down",
    causes.WAIT: "look for a group operation that not all ranks of its group take part in",
}
_SIGKILL = 9
_SIGKILL_ADVICE = "if nobody sent it: the kernel's out-of-memory killer does; see dmesg on that node"


def as_text(found: FirstCause, told: Collection[str] = ()) -> str:
    """Return the first cause with its stack once, and the other errors counted.

    Args:
        found: the first cause.
        told: names of workers whose stack was printed before, so that it is not printed again.
    """
    first = found.cause.first
    lines = [
        f"first cause: {_head(first)}",
        f"  {found.cause.kind} on {_where(found.cause, found.hosts)}{_when(first)}",
    ]
    if first.planned:
        lines.append(f"  it is the planned fault {first.planned} (--inject, --scenario)")
    if found.cause.kind in causes.CONSEQUENCES:
        lines.append("  no error is a cause by itself: this one came first of those that follow from others")
    if found.earlier:
        lines.append(f"  the same error had ended {count(found.earlier, 'earlier attempt')}")
    if found.quiet:
        lines.append(f"  {ranks(found.quiet)} had no error: the others may have waited for them")
    if advice := _advice(first, found.cause.kind):
        lines.append(f"  fix: {advice}")
    if first.trace and any(error.worker in told for error in found.cause.errors):
        lines.append("  its stack is above")
    elif first.trace:
        lines += [f"    {line}".rstrip() for line in first.trace.splitlines()]
    return "\n".join([*lines, *_further(found)])


def _advice(first: CrashError, kind: str) -> str:
    if kind == causes.KILLED and first.signal == _SIGKILL and not first.planned:
        return _SIGKILL_ADVICE
    return _ADVICE.get(kind, "")


def _head(error: CrashError) -> str:
    lines = error.head.splitlines()
    return "\n".join([shortened(lines[0], _WIDTH), *(f"  {line.rstrip()}" for line in lines[1:8])]) if lines else ""


def _where(group: Group, hosts: Mapping[str, str]) -> str:
    """Return on which ranks a group of errors was, with the worker if there was only one."""
    first, number = group.first, len(group.errors)
    if group.ranks and number == 1:
        return f"logical rank {first.rank} ({first.worker}" + (
            f" on {named(first.node, hosts)})" if first.node else ")"
        )
    if group.ranks:
        return f"{ranks(group.ranks)}; below it is that of {first.worker}" if first.trace else ranks(group.ranks)
    return first.worker or f"node {named(first.node, hosts)}"


def _when(error: CrashError) -> str:
    parts = [f"in epoch {error.epoch}"] if error.epoch is not None and error.epoch >= 0 else []
    parts += [f"after committed step {error.step}"] if error.step is not None else []
    return "".join(f", {part}" for part in parts)


def _further(found: FirstCause) -> list[str]:
    lines = []
    if found.others:
        lines.append(f"{count(len(found.others), 'other error')} may have a cause of its own:")
        lines += [f"  {group.kind} on {_ranks_or_names(group)}: {_short(group.first)}" for group in found.others]
    number = sum(len(group.errors) for group in found.consequences)
    if number:
        counted = "; ".join(
            f"{len(group.errors)} x {group.kind} ({_ranks_or_names(group)})" for group in found.consequences
        )
        verb = "error is a consequence" if number == 1 else "errors are consequences"
        lines.append(f"{number} further {verb}: {counted}")
    return lines


def _short(error: CrashError) -> str:
    return shortened(error.head, _WIDTH // 2)


def _ranks_or_names(group: Group) -> str:
    return ranks(group.ranks) if group.ranks else ", ".join(error.worker or error.node for error in group.errors[:4])


def ranks(numbers: Sequence[int]) -> str:
    """Return "logical rank 3" or "logical ranks 0-3, 7"."""
    return f"logical rank{'s' if len(numbers) != 1 else ''} {spans(numbers)}"


def as_values(found: FirstCause) -> dict[str, Any]:
    """Return the first cause as JSON values."""
    return {
        "first_cause": {**_group_values(found.cause, found.hosts), "trace": found.cause.first.trace},
        "advice": _advice(found.cause.first, found.cause.kind),
        "earlier_attempts": found.earlier,
        "quiet_ranks": list(found.quiet),
        "other_causes": [_group_values(group, found.hosts) for group in found.others],
        "consequences": [_group_values(group, found.hosts) for group in found.consequences],
    }


def _group_values(group: Group, hosts: Mapping[str, str]) -> dict[str, Any]:
    first = group.first
    return {
        "class": group.kind,
        "error": first.head,
        "count": len(group.errors),
        "ranks": group.ranks,
        "workers": [error.worker for error in group.errors],
        "node": first.node,
        "host": hosts.get(first.node, ""),
        "epoch": first.epoch,
        "step": first.step,
        "when": first.when,
        "planned": first.planned,
    }
