"""Table and figure of the results of :mod:`checkfree_convergence`."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy
from checkfree_convergence import (
    CROSS,
    ENDS,
    EQUAL,
    FIRST,
    MIDDLE,
    NO_FAILURES,
    REST,
    STAGES,
    STRAIGHT,
    STRATEGIES,
    SWAPPED,
)
from checkfree_convergence_job import PATIENCE

RESULTS = "tools/experiments/results/checkfree_convergence.txt"
PICTURE = "examples/checkfree/convergence.png"
LAST, LEVEL, SMOOTH = 20, 5, 15
"""Numbers of steps to average over: for the final loss; for the loss before a failure; for the curves of the figure."""
GOAL = 5.0
"""Factor by which swapped training should reduce the jump of the loss when the first stage is copied (issue 8)."""
_COLOUR = dict(zip((*STRATEGIES, NO_FAILURES), ("#2f6fb0", "#3f8f55", "#e8a33d", "#c8322b", "#1f2933"), strict=True))
_COLOUR |= {SWAPPED: "#2f6fb0", STRAIGHT: "#c8322b"}
_INK, _QUIET, _FAINT = "#1f2933", "#66717d", "#dfe4ea"


def write(rows: list[dict], root: Path) -> str:
    """Write the results under ``root``; return the text."""
    text = table(rows)
    for path in (root / RESULTS, root / PICTURE):
        path.parent.mkdir(parents=True, exist_ok=True)
    (root / RESULTS).write_text(text + "\n")
    picture(rows, root / PICTURE)
    return text


# --- figures ---------------------------------------------------------------------------------------------------------


def last_loss(row: dict) -> float:
    """Return the mean training loss of the last steps."""
    return statistics.fmean(row["train"][-LAST:])


def jumps(rows: Iterable[dict], stages: Sequence[int] = range(STAGES)) -> list[float]:
    """Return the held-out loss right after each rebuild minus the held-out loss right before it."""
    return [made["after"] - made["before"] for row in rows for made in row["rebuilt"] if made["stage"] in stages]


def training_jump(losses: Sequence[float], step: int) -> float:
    """Return the loss of the step after ``step`` minus the mean of the steps before, as ``ft report`` shows it; this
    includes the noise of different batches."""
    return losses[step] - statistics.fmean(losses[max(0, step - LEVEL) : step])


def made_good(rows: Iterable[dict]) -> tuple[float | None, int, int]:
    """Return (median of the steps until the held-out loss recovered, rebuilds with a recovery, all rebuilds)."""
    every = [made["good_after"] for row in rows for made in row["rebuilt"]]
    seen = [steps for steps in every if steps is not None]
    return (statistics.median(seen) if seen else None), len(seen), len(every)


def ratio(rows: Sequence[dict], stage: int) -> float | None:
    """Return the mean jump of ``stage`` without swapped training over the one with it; None if either is unknown."""
    straight, swapped = (
        jumps((row for row in rows if row["part"] == ENDS and row["way"] == way), [stage])
        for way in (STRAIGHT, SWAPPED)
    )
    if not straight or not swapped or statistics.fmean(swapped) <= 0:
        return None
    return statistics.fmean(straight) / statistics.fmean(swapped)


def _groups(rows: Sequence[dict], part: str) -> dict[tuple[float, str], list[dict]]:
    """Return (rate, way) -> the rows of all seeds."""
    found: dict[tuple[float, str], list[dict]] = {}
    for row in rows:
        if row["part"] == part:
            found.setdefault((row["rate"], row["way"]), []).append(row)
    return found


# --- text ------------------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict]) -> str:
    steps = max(row["steps"] for row in rows)
    lines = [
        "Loss of a small run whose lost pipeline stages are rebuilt from their neighbours (CheckFree, CheckFree+).",
        "",
        f"{STAGES} stages of one block, 64 wide, sequences of 64 bytes of Python source, {steps} steps of 16 of them.",
        f"Rate: failures of a stage in 100 steps, from step {FIRST} to {REST} before the end; all ways of a rate have",
        "the same. Last loss: training, mean of the last 20 steps. Held out: always the same 32 sequences, stages in",
        "their usual order; at the end. Jump: held-out loss right after a rebuild minus right before, mean (largest).",
        "Good after: steps until the held-out loss was back, median (in so many rebuilds; in the others the next",
        f"failure or the end came first, or it took more than {PATIENCE} steps).",
    ]
    titles = {
        MIDDLE: "Stages in the middle (1, 2) lost; stages begin with weights of their own",
        EQUAL: "The same; all stages begin with the same blocks",
        ENDS: "First and last stage lost, copied from their neighbours; embedding and head kept twice in both",
    }
    for part, title in titles.items():
        groups = _groups(rows, part)
        if groups:
            lines += ["", title, *_part(groups)]
    lines += ["", *_verdict(rows)]
    for row in rows:
        if row["part"] == CROSS:
            lines += ["", *_cross(row)]
    seconds = sum(row["took_s"] for row in rows)
    lines += ["", f"{len(rows)} runs, {sum(row['steps'] for row in rows)} steps in {seconds:.0f} s of training."]
    return "\n".join(lines)


def _part(groups: dict[tuple[float, str], list[dict]]) -> list[str]:
    head = ("rate", "way", "lost", "last loss", "held out", "jump", "good after")
    body = []
    for (rate, way), rows in sorted(groups.items(), key=lambda item: item[0][0]):
        found = jumps(rows)
        steps, seen, every = made_good(rows)
        body.append(
            (
                f"{rate:g}",
                way,
                str(len(found)),
                f"{statistics.fmean(map(last_loss, rows)):.3f}",
                f"{statistics.fmean(row['held_out'][-1][1] for row in rows):.3f}",
                f"{statistics.fmean(found):+.3f} ({max(found):+.3f})" if found else "-",
                "-" if not every else f"{'-' if steps is None else format(steps, 'g')} ({seen} of {every})",
            )
        )
    from ft.show.text import table as laid_out

    return laid_out(head, body, right=(0, 2, 3, 4)).splitlines()


def _verdict(rows: Sequence[dict]) -> list[str]:
    lines = []
    for stage, name in ((0, "first"), (STAGES - 1, "last")):
        of = {
            way: jumps((row for row in rows if row["part"] == ENDS and row["way"] == way), [stage])
            for way in (STRAIGHT, SWAPPED)
        }
        if all(of.values()):
            jumped = ", ".join(f"{way} {statistics.fmean(found):+.3f} (of {len(found)})" for way, found in of.items())
            times = ratio(rows, stage)
            less = "no jump with swapped training" if times is None else f"{times:.1f} x less with swapped training"
            goal = f" (goal: {GOAL:g} x)" if stage == 0 else ""
            lines.append(f"A copied {name} stage jumps by: {jumped}: {less}{goal}.")
    return lines


def _cross(row: dict) -> list[str]:
    step = row["rebuilt"][0]["step"]
    apart = max(abs(a - b) for a, b in zip(row["real"], row["train"], strict=True))
    real, replayed = (training_jump(row[which], step) for which in ("real", "train"))
    return [
        f"`ft run --inject` with the workers of {row['way']} killed, rebuilt at step {step}: training loss jumps by "
        f"{real:+.4f};",
        f"between two steps, as above: {replayed:+.4f}. Largest difference in {len(row['train'])} steps: {apart:.2g}.",
    ]


# --- picture ---------------------------------------------------------------------------------------------------------


def picture(rows: Sequence[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.5, 4.2), width_ratios=(1.35, 1), constrained_layout=True)
    _curves(left, rows)
    _ends(right, rows)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _curves(axes, rows: Sequence[dict]) -> None:
    groups = _groups(rows, MIDDLE)
    highest = max((rate for rate, _ in groups), default=0.0)
    _plain(
        axes,
        f"middle stages lost, {highest:g} failures of a stage in 100 steps: training loss (mean of {SMOOTH} steps)",
    )
    for (rate, way), found in groups.items():
        if rate not in (0.0, highest):
            continue
        losses = numpy.mean([row["train"] for row in found], axis=0)
        smooth = numpy.convolve(losses, numpy.ones(SMOOTH) / SMOOTH, mode="valid")
        steps = numpy.arange(SMOOTH, len(losses) + 1)
        shown = steps >= FIRST
        width = 1.0 if way == NO_FAILURES else 1.5
        axes.plot(steps[shown], smooth[shown], color=_COLOUR[way], linewidth=width, label=way)
    for made in next((found[0]["rebuilt"] for (rate, _), found in groups.items() if rate == highest), ()):
        axes.axvline(made["step"], color=_FAINT, linewidth=0.8, zorder=0)
    axes.set_xlabel("step; grey: a stage is lost", fontsize=9, color=_QUIET)
    axes.legend(frameon=False, fontsize=8, labelcolor=_QUIET)


def _ends(axes, rows: Sequence[dict]) -> None:
    _plain(axes, "a lost end is copied from its neighbour: jump of the held-out loss")
    for way in (STRAIGHT, SWAPPED):
        for stage, marker, name in ((0, "o", "first stage"), (STAGES - 1, "^", "last stage")):
            found = [
                (made["step"], made["after"] - made["before"])
                for row in rows
                if row["part"] == ENDS and row["way"] == way
                for made in row["rebuilt"]
                if made["stage"] == stage
            ]
            if found:
                fill = _COLOUR[way] if stage == 0 else "none"
                axes.plot(
                    *zip(*found, strict=True),
                    marker,
                    color=_COLOUR[way],
                    markerfacecolor=fill,
                    markersize=6,
                    linestyle="",
                    label=f"{name}, {'swapped' if way == SWAPPED else 'without swapped'} training",
                )
    axes.axhline(0.0, color=_INK, linewidth=0.8)
    axes.set_ylim(top=1.4 * axes.get_ylim()[1])  # room for the legend
    axes.set_xlabel("step", fontsize=9, color=_QUIET)
    axes.legend(frameon=False, fontsize=8, labelcolor=_QUIET)


def _plain(axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9, color=_INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=6, labelsize=8, labelcolor=_QUIET)
