"""The answers of ``ft plan snapshot`` as text and as JSON values."""

from dataclasses import asdict
from typing import Any

from ft.placement.topology import NODE
from ft.plan.snapshot.answer import MONTH, Answer
from ft.plan.snapshot.flags import Plan

_GIB = 1 << 30


def as_values(plan: Plan, answers: list[Answer]) -> dict[str, Any]:
    """Bytes, seconds and probabilities, for ``--json``."""
    question = plan.question
    return {
        "nodes": plan.nodes,
        "ranks": plan.grid.world_size,
        "layout": asdict(plan.grid),
        "parameters": plan.parameters,
        "window_s": question.window_s,
        "exposure_s": question.failures.window,
        "mtbf_s": dict(question.failures.mtbf),
        "copies": [
            {
                **{key: value for key, value in asdict(found).items() if key != "risk"},
                "memory": found.memory,
                "fits_memory": _fits_memory(plan, found),
                "loss_per_failure": found.risk.per_failure,
                "loss_per_failure_of": dict(found.risk.by_kind),
                "loss_per_month": found.risk.within(MONTH),
                "failures_per_month": found.risk.rate * MONTH,
            }
            for found in answers
        ],
    }


def as_text(plan: Plan, answers: list[Answer]) -> str:
    """A table with a column for each number of copies, and what cannot be had below it."""
    rows = [("", [f"k = {found.k}" for found in answers]), *_memory(plan, answers), *_traffic(plan, answers)]
    rows += _losses(plan, answers)
    first = max(len(name) for name, _ in rows)
    widths = [max(len(row[i]) for _, row in rows) for i in range(len(answers))]
    lines = [*_head(plan, answers), ""]
    for name, cells in rows:
        lines.append(f"  {name:<{first}}" + "".join(f"  {cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    for found in answers:
        lines += [f"\nk = {found.k}: {problem}" for problem in found.problems]
    return "\n".join(line.rstrip() for line in lines)


def _head(plan: Plan, answers: list[Answer]) -> list[str]:
    question = plan.question
    kinds = dict.fromkeys(kind for place in question.where.values() for kind in place)
    counts = {kind: len({place.get(kind) for place in question.where.values()}) for kind in kinds}
    rates = "; ".join(
        f"each of {counts[kind]} {kind}s every {_duration(question.failures.mtbf[kind])}" for kind in kinds
    )
    often = answers[0].risk.rate * MONTH
    shard = max(shard.owned + shard.replicated for shard in question.shards.values())
    lines = [
        f"{plan.nodes} nodes, {plan.grid}",
        f"{plan.parameters / 1e9:.4g} B parameters, a rank's snapshot of up to {_size(shard)}",
        f"failures: {rates}; {often:.3g} a month; {_duration(question.failures.window)} until copies are whole again",
    ]
    if not question.copies_complete:
        lines.append("without --use-distributed-optimizer peers hold each other's state, and copies carry little of it")
    return lines


def _memory(plan: Plan, answers: list[Answer]) -> list[tuple[str, list[str]]]:
    rows = [
        ("host memory of a node", [_size(found.memory) for found in answers]),
        ("  own snapshots, two each", [_size(found.own) for found in answers]),
        ("  peer copies, two each", [_size(found.copies) for found in answers]),
    ]
    if plan.host_memory is not None:
        told = ["yes" if _fits_memory(plan, found) else "NO" for found in answers]
        rows.append((f"  fits into {_size(plan.host_memory)}", told))
    return rows


def _traffic(plan: Plan, answers: list[Answer]) -> list[tuple[str, list[str]]]:
    rows = [
        ("each step, GPU to host", [_size(found.d2h) for found in answers]),
        ("  sent by a node", [_size(found.sent) for found in answers]),
        ("  received by a node", [_size(found.received) for found in answers]),
        ("  time, overlapped", [_duration(found.transfer_s) for found in answers]),
        ("    GPU to host", [_duration(found.d2h_s) for found in answers]),
        ("    network", [_duration(found.network_s) for found in answers]),
    ]
    window = plan.question.window_s
    if window is None:
        return [*rows, ("  hidden by steps of", [_duration(found.transfer_s) for found in answers])]
    told = [
        f"yes, {found.transfer_s / window:.0%}" if found.fits else f"NO, {found.transfer_s / window:.0%}"
        for found in answers
    ]
    return [*rows, (f"  fits into the window of {_duration(window)}", told)]


def _losses(plan: Plan, answers: list[Answer]) -> list[tuple[str, list[str]]]:
    rows = [("loss of state, per failure", [_chance(found.risk.per_failure) for found in answers])]
    kinds = answers[0].risk.by_kind
    if len(kinds) > 1:
        rows += [(f"  of a {kind}", [_chance(found.risk.by_kind[kind]) for found in answers]) for kind in kinds]
    rows.append(("loss of state, per month", [_chance(found.risk.within(MONTH)) for found in answers]))
    per = "step" if plan.question.step_s is not None else "window"
    rows.append((f"formula (1), per {per}", [_chance(found.formula) for found in answers]))
    if plan.expects_rack_failures:
        worst = max((kind for kind in kinds if kind != NODE), key=lambda kind: 1 / plan.question.failures.mtbf[kind])
        rows.append((f"  correlated, by {worst}", [_chance(found.correlated or 0.0) for found in answers]))
    return rows


def _fits_memory(plan: Plan, found: Answer) -> bool | None:
    return None if plan.host_memory is None else found.memory <= plan.host_memory


def _size(nbytes: float) -> str:
    for unit, size in (("TiB", _GIB << 10), ("GiB", _GIB), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1024:.1f} KiB"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _chance(probability: float) -> str:
    return "0" if probability == 0 else f"{probability:.2g}" if probability < 0.01 else f"{probability:.3g}"
