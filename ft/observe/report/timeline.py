"""Draw ``timeline.png`` of a run: which worker held which logical rank when, the phases of recoveries, and the loss.

A logical rank is a position in the parallel grid. DMR (dual modular redundancy) executes operators twice; a mismatch
between the two results is marked by a diamond.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ft.base.events import Event
from ft.observe.report.corruption import Corruption, corruption
from ft.observe.report.lanes import RankInterval, end_of_time, origin, rank_intervals
from ft.record.recoveries import PHASES, Recovery
from ft.record.run import Run, number
from ft.show import palette
from ft.show.axes import STYLE, as_png, empty, legend, plain, rows
from ft.show.text import count, seconds, shortened

_MOST_BARS = 10
_MOST_LABELS = 16
_DIAMOND = {"markersize": 7, "color": palette.MISMATCH, "markeredgecolor": "white"}


@dataclass(frozen=True)
class _PictureData:
    """The data of one picture.

    Attributes:
        run: the run's folder as read.
        found: the recoveries of the run.
        lanes: which worker held which rank when.
        zero: wall time at which the time axis starts.
        end: length of the time axis in seconds.
        checked: what DMR found; None where it was off.
    """

    run: Run
    found: Sequence[Recovery]
    lanes: list[RankInterval]
    zero: float
    end: float
    checked: Corruption | None = None

    @property
    def ranks(self) -> int:
        return max((lane.rank for lane in self.lanes), default=-1) + 1


def draw(run: Run, found: Sequence[Recovery]) -> bytes:
    """Return the picture as PNG."""
    productive = sum(number(m, "step_time_s") or 0.0 for m in run.metrics)
    lanes, checked = rank_intervals(run.events, found), corruption(run.events)
    scene = _PictureData(run, found, lanes, origin(run.events), end_of_time(run.events, productive), checked)
    heights = [max(1.3, min(4.5, 0.36 * scene.ranks + 0.55)), _phases_height(found), 2.3]
    figure, (lanes, phases, loss) = rows(_title(scene), heights)
    _draw_lanes(lanes, scene)
    _draw_phases(phases, found)
    _draw_loss(loss, scene)
    return as_png(figure)


def _title(scene: _PictureData) -> str:
    recovered = sum(r.is_over for r in scene.found)
    name = shortened(scene.run.folder.resolve().name, 40)
    return f"{name}   {count(len(scene.found), 'interruption')}, {recovered} recovered   {scene.run.state}"


def _draw_lanes(axes, scene: _PictureData) -> None:
    plain(axes, "Workers on logical ranks", pad=20 if scene.found or _wrong(scene) else 6)
    if not scene.lanes:
        empty(axes, "no epoch has opened yet")
        return
    _draw_bars(axes, scene)
    least = scene.end / 400
    for recovery in scene.found:
        begin = recovery.began.wall - scene.zero
        width = max(recovery.total if recovery.total is not None else scene.end - begin, least)
        axes.axvspan(begin, begin + width, color=palette.OUTCOME[recovery.outcome], alpha=0.2, linewidth=0, zorder=1)
        # The other workers wait as well: their bars are paler for the duration of the recovery.
        axes.axvspan(begin, begin + width, color=palette.PAPER, alpha=0.45, linewidth=0, zorder=3)
        for event in recovery.detected or [recovery.began]:
            if event.rank is not None:
                colour = palette.OUTCOME[recovery.outcome]
                axes.plot(begin, event.rank, "X", markersize=9, color=colour, markeredgecolor="white", zorder=5)
    for event in _wrong(scene):
        axes.plot(event.wall - scene.zero, event.rank, "D", **_DIAMOND, zorder=6)
    _number_recoveries(axes, scene)
    axes.set_xlim(0, scene.end)
    axes.set_ylim(scene.ranks - 0.4, -0.6)
    every = max(1, -(-scene.ranks // _MOST_LABELS))
    axes.set_yticks(range(0, scene.ranks, every), [f"rank {rank}" for rank in range(0, scene.ranks, every)])
    axes.set_xlabel("seconds since the first epoch opened", **STYLE)
    outcomes = list(dict.fromkeys(recovery.outcome for recovery in scene.found))
    handles = [_marker(outcome) for outcome in outcomes]
    handles += [Line2D([], [], linestyle="", marker="D", label="mismatch (DMR)", **_DIAMOND)] if _wrong(scene) else []
    if handles:
        legend(axes, handles, above=1.07)


def _wrong(scene: _PictureData) -> list[Event]:
    """Return the DMR mismatches to draw: the first one of each rank and attempt at a step, for ranks in the picture."""
    found = [one.event for one in scene.checked.mismatches] if scene.checked is not None else []
    shown = {
        (event.rank, event.step, event.epoch, str(event.detail.get("attempt"))): event for event in reversed(found)
    }
    return [event for event in shown.values() if event.rank is not None and event.rank < scene.ranks]


def _marker(outcome: str) -> Line2D:
    return Line2D([], [], linestyle="", marker="X", markersize=8, color=palette.OUTCOME[outcome], label=outcome)


def _draw_bars(axes, scene: _PictureData) -> None:
    later = list(dict.fromkeys(lane.worker for lane in sorted(scene.lanes, key=lambda x: x.begin) if not lane.is_first))
    colours = {worker: palette.LATER_WORKERS[i % len(palette.LATER_WORKERS)] for i, worker in enumerate(later)}
    for lane in scene.lanes:
        colour = palette.FIRST_WORKER if lane.is_first else colours[lane.worker]
        end = max(lane.end, scene.end) if _is_last(lane, scene) else lane.end
        axes.barh(lane.rank, end - lane.begin, left=lane.begin, height=0.7, color=colour, zorder=2)
        # Labels that do not fit are left out; 7 characters need about 6 % of the width.
        fits = (end - lane.begin) / scene.end > 0.009 * len(lane.worker) + 0.01
        if fits and scene.ranks <= _MOST_LABELS:
            text = palette.INK if lane.is_first else "white"
            at = _free_from(lane.begin, scene) + scene.end * 0.006
            axes.text(at, lane.rank, lane.worker, va="center", fontsize=8.5, color=text, zorder=6)


def _free_from(at: float, scene: _PictureData) -> float:
    """Return the time ``at`` or, within a recovery, the recovery's end, as labels on pale bars are hard to read."""
    for recovery in scene.found:
        begin = recovery.began.wall - scene.zero
        if recovery.total is not None and begin <= at < begin + recovery.total:
            return begin + recovery.total
    return at


def _is_last(lane: RankInterval, scene: _PictureData) -> bool:
    return lane.end == max(other.end for other in scene.lanes if other.rank == lane.rank)


def _number_recoveries(axes, scene: _PictureData) -> None:
    """Write the numbers of the recoveries above the lanes, and skip a number that would overlap the previous one."""
    last = float("-inf")
    for recovery in scene.found:
        at = recovery.began.wall - scene.zero
        if at - last > scene.end / 60:
            axes.text(at, -0.62, str(recovery.number), ha="center", va="bottom", fontsize=8, color=palette.QUIET)
            last = at


def _phases_height(found: Sequence[Recovery]) -> float:
    timed = sum(bool(r.phases) for r in found)
    return 2.2 if timed > _MOST_BARS else 0.75 + 0.3 * max(1, timed)


def _draw_phases(axes, found: Sequence[Recovery]) -> None:
    plain(axes, "Phases of recoveries")
    timed = [r for r in found if r.phases]
    if not timed:
        empty(axes, "no recovery")
        return
    names = [name for name in PHASES if any(name in r.phases for r in timed)]
    lies = len(timed) <= _MOST_BARS
    base = [0.0] * len(timed)
    places = range(len(timed))
    for name in names:
        sizes = [r.phases.get(name, 0.0) for r in timed]
        if lies:
            axes.barh(places, sizes, left=base, height=0.62, color=palette.PHASE[name])
        else:
            axes.bar(places, sizes, bottom=base, width=0.8, color=palette.PHASE[name])
        base = [a + b for a, b in zip(base, sizes, strict=True)]
    if lies:
        _label_bars(axes, timed, base)
    else:
        axes.set_ylabel("seconds", **STYLE)
        axes.set_xlabel("recovery", **STYLE)
        every = max(1, len(timed) // 20)
        axes.set_xticks(places[::every], [str(r.number) for r in timed[::every]])
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.grid(axis="y", color=palette.FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlim(-0.8, len(timed) - 0.2)
    legend(axes, [Patch(color=palette.PHASE[name], label=name) for name in names])


def _label_bars(axes, timed: Sequence[Recovery], ends: Sequence[float]) -> None:
    most = max(ends)
    for place, (recovery, end) in enumerate(zip(timed, ends, strict=True)):
        text = f"{seconds(recovery.total)}, {recovery.outcome}" if recovery.total is not None else recovery.outcome
        axes.text(end + most * 0.008, place, text, va="center", **STYLE)
    axes.set_yticks(range(len(timed)), [f"recovery {r.number}" for r in timed])
    axes.set_ylim(len(timed) - 0.5, -0.5)
    axes.set_xlim(0, most * 1.16 or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.set_xlabel("seconds since the fault, or since its detection where the fault is not on record", **STYLE)


def _draw_loss(axes, scene: _PictureData) -> None:
    plain(axes, "Loss")
    points = [(m["step"], loss) for m in scene.run.metrics if (loss := number(m, "loss")) is not None]
    if not points:
        empty(axes, "no metrics")
        return
    steps, losses = zip(*points, strict=True)
    axes.plot(steps, losses, color=palette.LOSS, linewidth=1.5, marker="." if len(points) < 3 else None)
    axes.set_xlabel("step", **STYLE)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y", color=palette.FAINT, linewidth=0.8)
    axes.margins(x=0.01)
    for recovery in scene.found:
        if recovery.step is not None:
            colour = palette.OUTCOME[recovery.outcome]
            axes.axvline(recovery.step + 1, color=colour, linewidth=1.0, linestyle=(0, (4, 2)), alpha=0.8, zorder=1)
    lines = []
    if any(recovery.step is not None for recovery in scene.found):
        lines.append(_line(palette.FAULT, (0, (4, 2)), "step that was redone"))
    for step in scene.checked.steps if scene.checked is not None else ():
        axes.axvline(step, color=palette.MISMATCH, linewidth=1.0, linestyle=":", zorder=1)
    if scene.checked is not None and scene.checked.steps:
        lines.append(_line(palette.MISMATCH, ":", "step with a mismatch (DMR)"))
    if lines:
        legend(axes, lines)


def _line(colour: str, style: str | tuple, label: str) -> Line2D:
    return Line2D([], [], color=colour, linestyle=style, linewidth=1.0, label=label)
