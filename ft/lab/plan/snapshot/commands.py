"""Implement ``ft plan snapshot``: compare cost and risk of keeping k copies of each rank's training state on peers."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from ft.lab.plan.snapshot.answer import MONTH, CopiesResult, Question, answer
from ft.lab.plan.snapshot.flags import add_flags, question_of
from ft.platform.slurm import NODE
from ft.show.text import left_out, seconds

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
    question = question_of(arguments)
    answers = [answer(question, k) for k in arguments.copies]
    print(json.dumps(as_values(question, answers)) if arguments.json else as_text(question, answers))
    return 0


def as_values(question: Question, answers: list[CopiesResult]) -> dict[str, Any]:
    """Return bytes, seconds and probabilities for ``--json``."""
    return {
        "nodes": question.nodes,
        "ranks": question.grid.world_size,
        "layout": asdict(question.grid),
        "parameters": question.parameters,
        "window_s": question.window_s,
        "exposure_s": question.failures.window,
        "mtbf_s": dict(question.failures.mtbf),
        "copies_carry_state": question.copies_carry,
        "without": {"loss_per_failure": 1.0, "loss_per_month": _without_per_month(answers)},
        "copies": [
            {
                **{key: value for key, value in asdict(found).items() if key != "risk"},
                "memory": found.memory,
                "fits_memory": _fits_memory(question, found),
                "loss_per_failure": found.risk.per_failure,
                "loss_per_failure_of": dict(found.risk.by_kind),
                "loss_per_month": found.risk.within(MONTH),
                "failures_per_month": found.risk.rate * MONTH,
            }
            for found in answers
        ],
    }


def as_text(question: Question, answers: list[CopiesResult]) -> str:
    """Return a table with a column for a run without snapshots and one per number of copies, followed by problems."""
    rows = [(name, none, *map(cell, answers)) for name, none, cell in _rows(question, answers)]
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [LEFT_OUT, "", *_head(question, answers), ""]
    for name, *cells in rows:
        lines.append(f"  {name:<{first}}" + "".join(f"  {cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    if question.copies_carry:
        lines.append(
            "\nnone: no snapshots; every failure ends in a restart from the newest checkpoint, whose cost is in\n"
            "ft plan buy"
        )
    for found in answers:
        lines += [f"\nk = {found.k}: {problem}" for problem in found.problems]
    return "\n".join(line.rstrip() for line in lines)


def _without_per_month(answers: list[CopiesResult]) -> float:
    """Return the probability of at least one failure; without snapshots, each failure loses the state of its ranks."""
    return replace(answers[0].risk, per_failure=1.0).within(MONTH)


def _head(question: Question, answers: list[CopiesResult]) -> list[str]:
    kinds = dict.fromkeys(kind for place in question.where.values() for kind in place)
    counts = {kind: len({place.get(kind) for place in question.where.values()}) for kind in kinds}
    rates = "; ".join(f"each of {counts[kind]} {kind}s every {seconds(question.failures.mtbf[kind])}" for kind in kinds)
    often, ranks = answers[0].risk.rate * MONTH, question.grid.world_size
    shard = max(shard.owned + shard.replicated for shard in question.shards.values())
    lines = [
        f"{question.nodes} nodes, {question.grid}",
        f"{question.parameters / 1e9:.4g} B parameters, a rank's snapshot of up to {_size(shard)}",
        f"failures: {rates}; {often:.3g} a month; {seconds(question.failures.window)} until all copies are "
        "complete again",
    ]
    if not question.has_flags and ranks > 1:
        lines.append(
            f"without the trainer's flags all {ranks} ranks are one data-parallel group, and each holds "
            "the whole model: give the flags of the run after the name of its script"
        )
    if not question.copies_complete:
        much = "little of it" if question.copies_carry else "nothing"
        lines.append(
            "without --use-distributed-optimizer data-parallel peers already hold the same state, and "
            f"copies contain {much}"
        )
    return lines


_Row = tuple[str, str, Callable[[CopiesResult], str]]
"""Name of a row, its cell for a run that restarts from checkpoints alone, and that of a number of copies."""


def _rows(question: Question, answers: list[CopiesResult]) -> list[_Row]:
    rows: list[_Row] = [
        ("", "none", lambda found: f"k = {found.k}"),
        ("host memory of a node", "0", lambda found: _size(found.memory)),
        ("  own snapshots, two each", "-", lambda found: _size(found.own)),
        ("  peer copies, two each", "-", lambda found: _size(found.copies)),
    ]
    if question.host_memory is not None:
        name = f"  fits into {_size(question.host_memory)}"
        rows.append((name, "-", lambda found: "yes" if _fits_memory(question, found) else "NO"))
    rows += [
        ("each step, GPU to host", "0", lambda found: _size(found.d2h)),
        ("  sent by a node", "0", lambda found: _size(found.sent)),
        ("  received by a node", "0", lambda found: _size(found.received)),
        ("  time, overlapped", "-", lambda found: seconds(found.transfer_s)),
        ("    GPU to host", "-", lambda found: seconds(found.d2h_s)),
        ("    network", "-", lambda found: seconds(found.network_s)),
    ]
    window = question.window_s
    if window is None:
        rows.append(("  hidden by steps of", "-", lambda found: seconds(found.transfer_s)))
    else:
        name = f"  fit into the window of {seconds(window)}"
        rows.append((name, "-", lambda f: f"{'yes' if f.fits else 'NO'}, {f.transfer_s / window:.0%}"))
    return rows + _losses(question, answers)


def _losses(question: Question, answers: list[CopiesResult]) -> list[_Row]:
    if not question.copies_carry:
        peers = max(len(group) for group in question.groups)
        return [("loss of state", "-", lambda found: f"if all {peers} fail")]
    rows: list[_Row] = [("loss of state, per failure", _chance(1.0), lambda found: _chance(found.risk.per_failure))]
    kinds = answers[0].risk.by_kind
    for kind in kinds if len(kinds) > 1 else ():
        rows.append((f"  of a {kind}", "-", lambda found, kind=kind: _chance(found.risk.by_kind[kind])))  # type: ignore
    never = _chance(_without_per_month(answers))
    rows.append(("loss of state, per month", never, lambda found: _chance(found.risk.within(MONTH))))
    per = "step" if question.step_s is not None else "window"
    rows.append((f"formula (1), per {per}", "-", lambda found: _chance(found.formula)))
    if domains := [kind for kind in question.failures.mtbf if kind != NODE]:
        worst = min(domains, key=lambda kind: question.failures.mtbf[kind])
        rows.append((f"  correlated, by {worst}", "-", lambda found: _chance(found.correlated or 0.0)))
    return rows


def _fits_memory(question: Question, found: CopiesResult) -> bool | None:
    return None if question.host_memory is None else found.memory <= question.host_memory


def _size(nbytes: float) -> str:
    for unit, size in (("TiB", _GIB << 10), ("GiB", _GIB), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1024:.1f} KiB"


def _chance(probability: float) -> str:
    return "0" if probability == 0 else f"{probability:.2g}" if probability < 0.01 else f"{probability:.3g}"
