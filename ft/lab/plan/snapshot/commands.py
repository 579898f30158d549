"""Implement ``ft plan snapshot``: compare cost and risk of keeping k copies of each rank's training state on peers."""

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from ft.lab.plan.snapshot.answer import MONTH, Answer, answer
from ft.lab.plan.snapshot.flags import Plan, add_flags, plan_of
from ft.platform.slurm import NODE
from ft.show.text import left_out

_DESCRIPTION = """\
Compute the cost and the remaining risk of snapshots with k peer copies of each state, for k = 1, 2, 3: host memory,
bytes sent in each step and whether the step hides them, and the probability that a failure loses state. Give the
trainer's flags after the name of its script, or the size of the model with --params.

  ft plan snapshot --nodes 64 --nodes-per-rack 4 --step-time 10s --params 70B pretrain_gpt.py \\
      --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --use-distributed-optimizer"""


LEFT_OUT = left_out(
    "nodes without a replacement",
    "faults that take all copies alike (software)",
    "the training's own traffic",
)

_GIB = 1 << 30
_NODE_MEMORY, _TO_HOST = "host memory of a node", "each step, GPU to host"
_SENT, _RECEIVED = "  sent by a node", "  received by a node"
_PER_FAILURE, _PER_MONTH = "loss of state, per failure", "loss of state, per month"


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "snapshot",
        help="compute what peer copies cost in memory and bandwidth, and the remaining risk",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table or, with ``--json``, the values.

    Raises:
        UserError: the flags are invalid or contradict each other.
    """
    plan = plan_of(arguments)
    answers = [answer(plan.question, k) for k in plan.copies]
    print(json.dumps(as_values(plan, answers)) if arguments.json else as_text(plan, answers))
    return 0


def as_values(plan: Plan, answers: list[Answer]) -> dict[str, Any]:
    """Return bytes, seconds and probabilities for ``--json``."""
    question = plan.question
    return {
        "nodes": plan.nodes,
        "ranks": plan.grid.world_size,
        "layout": asdict(plan.grid),
        "parameters": plan.parameters,
        "window_s": question.window_s,
        "exposure_s": question.failures.window,
        "mtbf_s": dict(question.failures.mtbf),
        "copies_carry_state": question.copies_carry,
        "without": {"loss_per_failure": 1.0, "loss_per_month": _without_per_month(answers)},
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
    """Return a table with a column for a run without snapshots and one per number of copies, followed by problems."""
    rows = [("", [f"k = {found.k}" for found in answers]), *_memory(plan, answers), *_traffic(plan, answers)]
    rows += _losses(plan, answers)
    without = _without(plan, answers)
    rows = [(name, [without.get(name, "-"), *cells]) for name, cells in rows]
    first = max(len(name) for name, _ in rows)
    widths = [max(len(row[i]) for _, row in rows) for i in range(1 + len(answers))]
    lines = [LEFT_OUT, "", *_head(plan, answers), ""]
    for name, cells in rows:
        lines.append(f"  {name:<{first}}" + "".join(f"  {cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    if plan.question.copies_carry:
        lines.append(
            "\nnone: no snapshots; every failure ends in a restart from the newest checkpoint, whose cost is in"
        )
        lines.append("ft plan buy")
    for found in answers:
        lines += [f"\nk = {found.k}: {problem}" for problem in found.problems]
    return "\n".join(line.rstrip() for line in lines)


def _without(plan: Plan, answers: list[Answer]) -> dict[str, str]:
    """Return the table cells, by row name, of a run that restarts from checkpoints alone."""
    cells = {"": "none", _PER_FAILURE: _chance(1.0), _PER_MONTH: _chance(_without_per_month(answers))}
    return cells | dict.fromkeys((_NODE_MEMORY, _TO_HOST, _SENT, _RECEIVED), "0")


def _without_per_month(answers: list[Answer]) -> float:
    """Return the probability of at least one failure; without snapshots, each failure loses the state of its ranks."""
    return replace(answers[0].risk, per_failure=1.0).within(MONTH)


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
        f"failures: {rates}; {often:.3g} a month; {_duration(question.failures.window)} until all copies are "
        "complete again",
    ]
    if not plan.has_flags and plan.grid.world_size > 1:
        lines.append(
            f"without the trainer's flags all {plan.grid.world_size} ranks are one data-parallel group, and each holds "
            "the whole model: give the flags of the run after the name of its script"
        )
    if not question.copies_complete:
        much = "little of it" if question.copies_carry else "nothing"
        lines.append(
            "without --use-distributed-optimizer data-parallel peers already hold the same state, and "
            f"copies contain {much}"
        )
    return lines


def _memory(plan: Plan, answers: list[Answer]) -> list[tuple[str, list[str]]]:
    rows = [
        (_NODE_MEMORY, [_size(found.memory) for found in answers]),
        ("  own snapshots, two each", [_size(found.own) for found in answers]),
        ("  peer copies, two each", [_size(found.copies) for found in answers]),
    ]
    if plan.host_memory is not None:
        cells = ["yes" if _fits_memory(plan, found) else "NO" for found in answers]
        rows.append((f"  fits into {_size(plan.host_memory)}", cells))
    return rows


def _traffic(plan: Plan, answers: list[Answer]) -> list[tuple[str, list[str]]]:
    rows = [
        (_TO_HOST, [_size(found.d2h) for found in answers]),
        (_SENT, [_size(found.sent) for found in answers]),
        (_RECEIVED, [_size(found.received) for found in answers]),
        ("  time, overlapped", [_duration(found.transfer_s) for found in answers]),
        ("    GPU to host", [_duration(found.d2h_s) for found in answers]),
        ("    network", [_duration(found.network_s) for found in answers]),
    ]
    window = plan.question.window_s
    if window is None:
        return [*rows, ("  hidden by steps of", [_duration(found.transfer_s) for found in answers])]
    cells = [
        f"yes, {found.transfer_s / window:.0%}" if found.fits else f"NO, {found.transfer_s / window:.0%}"
        for found in answers
    ]
    return [*rows, (f"  fit into the window of {_duration(window)}", cells)]


def _losses(plan: Plan, answers: list[Answer]) -> list[tuple[str, list[str]]]:
    if not plan.question.copies_carry:
        peers = max(len(group) for group in plan.question.groups)
        return [("loss of state", [f"if all {peers} fail"] * len(answers))]
    rows = [(_PER_FAILURE, [_chance(found.risk.per_failure) for found in answers])]
    kinds = answers[0].risk.by_kind
    if len(kinds) > 1:
        rows += [(f"  of a {kind}", [_chance(found.risk.by_kind[kind]) for found in answers]) for kind in kinds]
    rows.append((_PER_MONTH, [_chance(found.risk.within(MONTH)) for found in answers]))
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
