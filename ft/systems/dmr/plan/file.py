"""Read and write the plan files of DMR: a trace, how each of its operators is verified, and the predicted costs.

DMR (dual modular redundancy, SpareTrain) verifies an operator by executing it a second time. A trace lists the
operators of one iteration. A plan file is a trace file (JSON, ``ft.systems.dmr.plan.trace_file``) with these additions:

- ``assign``: operator id -> ``set``, the way of verification (``ft.systems.dmr.plan.assign.SETS``). Operators in the
  sets D_inter and D_intra, whose second execution is deferred to an idle time (a window), also have ``window`` and, if
  they are executed again as part of a sequence of operators (an AGC segment), ``agc_segment``.
- ``agc_segments``: the fields of ``AgcSegment``, for each segment.
- ``predicted`` and ``phases``: the fields of ``Predicted``, for the whole plan and after each phase of planning.
"""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.systems.dmr.plan.assign import SETS, AgcSegment, Assignment, Plan, Predicted
from ft.systems.dmr.plan.check import problems
from ft.systems.dmr.plan.fields import Fields, read_object, write_object
from ft.systems.dmr.plan.trace import FINGERPRINT
from ft.systems.dmr.plan.trace_file import VERSION, from_values, refuse_twice, to_values

FIX = "plan again: ft dmr plan PROFILE --memory-budget SIZE --out FILE"
_PREDICTED = ("t_none", "t_naive", "t_plan", "exposed_us", "peak_bytes")


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan to a file.

    Raises:
        UserError: the file cannot be written.
    """
    values = {
        "version": VERSION,
        **to_values(plan.trace),
        "assign": {name: _assignment_values(how) for name, how in plan.assign.items()},
        "agc_segments": [vars(segment) for segment in plan.segments.values()],
        "predicted": vars(plan.predicted),
        "phases": [vars(each) for each in plan.phases],
    }
    write_object(path, values)


def _assignment_values(how: Assignment) -> dict[str, str]:
    values = {"set": how.set, "window": how.window, "agc_segment": how.agc_segment}
    return {name: value for name, value in values.items() if value is not None}


def read_plan(path: Path) -> Plan:
    """Return the plan in a file.

    Raises:
        UserError: the file cannot be read, is truncated, has another version, is not a plan, or contains a plan that
            cannot be followed: operators are unassigned or unknown, windows or memory are overrun, or
            ``ft.systems.dmr.plan.check`` finds another problem.
    """
    found = read_object(path, VERSION, FIX)
    if "assign" not in found.values:
        raise UserError(f"{path} is a profile, not a plan: it assigns no operators", f"plan it: ft dmr plan {path} ...")
    trace = from_values(found)
    assign = found.object("assign")
    segments = [_segment(each) for each in found.objects("agc_segments", [])]
    refuse_twice("AGC segment", [segment.id for segment in segments], found)
    plan = Plan(
        trace=trace,
        assign={name: _assignment(assign.object(name)) for name in assign.values},
        segments={segment.id: segment for segment in segments},
        predicted=_predicted(found.object("predicted")),
        phases=tuple(map(_predicted, found.objects("phases", []))),
    )
    wrong = list(islice(problems(plan), 4))
    if wrong:
        more = "; and more" if len(wrong) > 3 else ""
        raise found.error("cannot be followed: " + "; ".join(wrong[:3]) + more)
    return plan


def _assignment(found: Fields) -> Assignment:
    name = found.text("set")
    if name not in SETS:
        raise found.error(f"has set = {name!r}, which is none of {', '.join(SETS)}")
    return Assignment(name, found.text("window", None), found.text("agc_segment", None))


def _segment(found: Fields) -> AgcSegment:
    return AgcSegment(
        id=found.text("id"),
        ops=found.texts("ops"),
        window=found.text("window"),
        keeps=found.texts("keeps"),
        load_us=found.amount("load_us"),
        regenerated_us=found.amount("regenerated_us", 0.0),
    )


def _predicted(found: Fields) -> Predicted:
    return Predicted(*(found.amount(name) for name in _PREDICTED))


def differences(planned: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """Return the differences between two fingerprints: a text with name, planned value and the run's value for each.

    A fingerprint is a mapping of the properties of a run that a plan depends on.

    Args:
        planned: fingerprint of the run for which the plan was made.
        run: fingerprint of the run that is to follow the plan.
    """
    names = [*FINGERPRINT, *sorted((planned.keys() | run.keys()) - set(FINGERPRINT))]
    return [
        f"{name}: planned for {planned.get(name)!r}, the run has {run.get(name)!r}"
        for name in names
        if planned.get(name) != run.get(name)
    ]


def refuse_plan_of_other_run(plan: Plan, run: Mapping[str, Any]) -> None:
    """Check that the fingerprint of the plan is that of the run which is to follow the plan.

    Raises:
        UserError: the plan was made for another run; the message says what differs.
    """
    found = differences(plan.trace.fingerprint, run)
    if found:
        fix = "profile this run and plan again: ft dmr profile, then ft dmr plan"
        raise UserError("the DMR plan was made for another run: " + "; ".join(found), fix)
