"""Format the result of ``ft plan schedule`` as text or JSON values.

A unit is the forward or backward of one microbatch on one pipeline stage. In the schedules of CheckFree+, half of the
microbatches pass the first two stages, and the last two, in swapped order.
"""

from collections.abc import Sequence
from typing import Any

from ft.show.text import left_out, percent, shortened, table
from ft.systems.schedule.check import named
from ft.systems.schedule.choose import Planned
from ft.systems.schedule.program import Unit, straight

LEFT_OUT = left_out(
    "unlike stages",
    "gradient reduction and optimizer",
    "NCCL that starts the messages of a batch in turn",
)
_WIDTH = 120
_MOST_FAULTS = 4


def as_text(found: Planned, beside: Sequence[Planned]) -> str:
    """Return what is left out, and the schedule's cost, check and order, beside those of other schedules.

    Args:
        found: the schedule.
        beside: schedules to list in the comparison.
    """
    shape = found.shape
    times = f"forward {shape.f:g}, backward {shape.b:g}, message {shape.comm:g}"
    head = f"{found.kind}: {shape.stages} stages, {shape.microbatches} microbatches; {times}"
    parts = [LEFT_OUT, head, _costs(found), _checks(found), _order(found)]
    if any(other.kind != found.kind for other in beside):
        parts.append(_compared(found, beside if found in beside else [*beside, found]))
    return "\n\n".join(parts)


def _costs(found: Planned) -> str:
    ran = found.ran
    if ran.stuck:
        return "the schedule deadlocks"
    held = ", ".join(f"{each:g}" for each in found.in_flight)
    return f"time {ran.end:g}, bubbles {percent(found.bubble)}\nmicrobatches in flight, by stage: {held}"


def _checks(found: Planned) -> str:
    lines = []
    for rule, faults in found.findings:
        lines.append(f"{'NO' if faults else 'ok':3} {rule}")
        lines += [f"      {shortened(fault, _WIDTH - 6)}" for fault in faults[:_MOST_FAULTS]]
        if len(faults) > _MOST_FAULTS:
            lines.append(f"      and {len(faults) - _MOST_FAULTS} more")
    return "\n".join(lines)


def _order(found: Planned) -> str:
    lines = [
        "order of each stage (F forward, B backward; ': a microbatch that passes the end stages in swapped order):"
    ]
    for stage in range(found.shape.stages):
        units = " ".join(_short(found, unit) for unit in found.program.order(stage))
        lines.append(shortened(f"  {stage}: {units}", _WIDTH))
    return "\n".join(lines)


def _short(found: Planned, unit: Unit) -> str:
    if found.chunks > 1:
        return f"{named(unit._replace(chunk=0))}.{unit.chunk}"
    return named(unit) + ("'" if found.program.routes.ways[unit.microbatch] != straight(found.shape.stages) else "")


def _compared(found: Planned, planned: Sequence[Planned]) -> str:
    rows = [
        (
            each.kind + (" *" if each is found else ""),
            "-" if each.ran.stuck else f"{each.ran.end:g}",
            percent(each.bubble),
            f"{max(each.in_flight):g}",
            "yes" if each.valid else f"no: {next(rule for rule, faults in each.findings if faults)}",
        )
        for each in planned
    ]
    return table(("kind", "time", "bubbles", "in flight", "valid"), rows, right=(1, 2, 3))


def as_values(found: Planned, beside: Sequence[Planned]) -> dict[str, Any]:
    """Return the schedule's cost, check and order as JSON values; times are in the unit in which they were given.

    Args:
        found: the schedule.
        beside: schedules whose costs are listed for comparison.
    """
    program = found.program
    return {
        **_summary(found),
        "stages": found.shape.stages,
        "microbatches": found.shape.microbatches,
        "faults": {rule: list(faults) for rule, faults in found.findings},
        "order": [[_short(found, unit) for unit in program.order(stage)] for stage in range(found.shape.stages)],
        "beside": [_summary(each) for each in beside],
    }


def predicted(found: Planned) -> dict[str, Any]:
    """Return the given times and the cost that is predicted for them.

    A schedule file stores this in addition to the program, which is the order of each stage's units and messages.
    """
    given = {"forward": found.shape.f, "backward": found.shape.b, "comm": found.shape.comm}
    return given | {name: value for name, value in _summary(found).items() if name not in ("kind", "valid")}


def _summary(found: Planned) -> dict[str, Any]:
    return {
        "kind": found.kind,
        "time": None if found.ran.stuck else found.ran.end,
        "bubbles": found.bubble,
        "in_flight": found.in_flight,
        "valid": found.valid,
    }
