"""Draw ``timeline.png`` of a run: lanes of workers or of replicas over time, phases of recoveries, steps, and the loss.

With SPARe, two more panels show how many shard types each group computed in a step, and which group computed which
type. A mismatch of DMR is marked by a diamond.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ft.base.events import Event
from ft.observe.report.lineage import FAILURE, REJOIN, RESTART, depth, has_stacks
from ft.observe.report.record import (
    CATCHING_UP,
    OFFLINE,
    ONLINE,
    REBUILDING,
    STATES,
    RankInterval,
    Record,
    end_of_time,
    rank_intervals,
)
from ft.record.recoveries import PHASES, Recovery
from ft.record.recoveries import RESTART as RESTARTED
from ft.record.run import number
from ft.show import palette
from ft.show.axes import STYLE, as_png, empty, legend, plain, rows
from ft.show.text import count, percent, seconds, shortened

_MOST_BARS = 10
_MOST_LABELS, _MOST_REPLICA_LABELS = 16, 24
_LEAST_WIDTH = 1 / 600  # share of the whole width: shorter lanes are drawn that wide to stay visible
_DIAMOND = {"markersize": 7, "color": palette.MISMATCH, "markeredgecolor": "white"}
_DASHES = (0, (4, 2))
_STATE = {
    ONLINE: palette.FIRST_WORKER,
    CATCHING_UP: palette.PHASE["assemble"],
    REBUILDING: palette.PHASE["resume"],
    OFFLINE: palette.FAULT,
}
_INCIDENT = {FAILURE: palette.FAULT, REJOIN: palette.PHASE["rebuild"], RESTART: palette.OUTCOME[RESTARTED]}


def draw(record: Record) -> bytes:
    """Return the picture as PNG."""
    panels = list(_panels(record))
    figure, every = rows(_title(record), [inches for inches, _ in panels])
    for axes, (_, draw_panel) in zip(every, panels, strict=True):
        draw_panel(axes, record)
    return as_png(figure)


def _panels(record: Record) -> Iterator[tuple[float, Callable]]:
    """Yield (height in inches, function that draws) for the panels of a run, from the top to the bottom."""
    timed = [recovery for _, recovery in record.recoveries if recovery.phases]
    phases = (2.2 if len(timed) > _MOST_BARS else 0.75 + 0.3 * max(1, len(timed)), _draw_phases)
    if record.has_quorum:
        height = max(1.3, min(4.5, 0.42 * record.count + 0.5))
        yield height, _draw_replicas
        yield 1.7, _draw_steps
        if has_stacks(record.steps):
            yield from ((1.2, _draw_depth), (height, _draw_owners))
        if timed:
            yield phases
    else:
        ranks = 1 + max((lane.rank for lane in _workers(record)), default=-1)
        yield max(1.3, min(4.5, 0.36 * ranks + 0.55)), _draw_workers
        yield phases
    yield 2.3, _draw_loss


def _title(record: Record) -> str:
    name = shortened(record.folder.resolve().name, 40)
    if record.has_quorum:
        verdict = "each sample trained once" if record.audit.is_clean else "AUDIT NOT CLEAN"
        failures = count(len(record.of_kind(FAILURE)), "failure")
        return f"{name}   {failures}, effective {percent(record.effective.measured)}, {verdict}   {record.state}"
    recovered = sum(r.is_over for _, r in record.recoveries)
    return f"{name}   {count(len(record.recoveries), 'interruption')}, {recovered} recovered   {record.state}"


def _workers(record: Record) -> list[RankInterval]:
    return rank_intervals(record.only.events, record.only.recoveries)


def _draw_workers(axes, record: Record) -> None:
    run, found, lanes = record.only, record.only.recoveries, _workers(record)
    wrong = _mismatches(record, 1 + max((lane.rank for lane in lanes), default=-1))
    plain(axes, "Workers on logical ranks", pad=20 if found or wrong else 6)
    if not lanes:
        empty(axes, "no epoch has opened yet")
        return
    end = end_of_time(run.events, sum(number(m, "step_time_s") or 0.0 for m in run.metrics))
    _draw_bars(axes, record, lanes, end)
    for recovery in found:
        _draw_recovery(axes, recovery, record.zero, end)
    for event in wrong:
        axes.plot(event.wall - record.zero, event.rank, "D", **_DIAMOND, zorder=6)
    last = float("-inf")
    for recovery in found:  # a number that would overlap the previous one is left out
        at = recovery.began.wall - record.zero
        if at - last > end / 60:
            axes.text(at, -0.62, str(recovery.number), ha="center", va="bottom", fontsize=8, color=palette.QUIET)
            last = at
    axes.set_xlim(0, end)
    _name_rows(axes, "rank", 1 + max(lane.rank for lane in lanes), _MOST_LABELS)
    axes.set_xlabel("seconds since the first epoch opened", **STYLE)
    handles = [_marker(outcome) for outcome in dict.fromkeys(recovery.outcome for recovery in found)]
    handles += [Line2D([], [], linestyle="", marker="D", label="mismatch (DMR)", **_DIAMOND)] if wrong else []
    if handles:
        legend(axes, handles, above=1.07)


def _mismatches(record: Record, ranks: int) -> list[Event]:
    """Return the DMR mismatches to draw: the first one of each rank and attempt at a step, for ranks in the picture."""
    found = [event for _, checked in record.corruptions for event in checked.mismatches]
    shown = {
        (event.rank, event.step, event.epoch, str(event.detail.get("attempt"))): event for event in reversed(found)
    }
    return [event for event in shown.values() if event.rank is not None and event.rank < ranks]


def _draw_recovery(axes, recovery: Recovery, zero: float, end: float) -> None:
    begin, colour = recovery.began.wall - zero, palette.OUTCOME[recovery.outcome]
    width = max(recovery.total if recovery.total is not None else end - begin, end / 400)
    axes.axvspan(begin, begin + width, color=colour, alpha=0.2, linewidth=0, zorder=1)
    # The other workers wait as well: their bars are paler for the duration of the recovery.
    axes.axvspan(begin, begin + width, color=palette.PAPER, alpha=0.45, linewidth=0, zorder=3)
    for event in recovery.detected or [recovery.began]:
        if event.rank is not None:
            axes.plot(begin, event.rank, "X", markersize=9, color=colour, markeredgecolor="white", zorder=5)


def _name_rows(axes, kind: str, size: int, most: int) -> None:
    """Label the rows of lanes from the top to the bottom; of more than ``most`` rows, some have no label."""
    places = range(0, size, max(1, -(-size // most)))
    axes.set_yticks(places, [f"{kind} {place}" for place in places])
    axes.set_ylim(size - 0.4, -0.6)


def _marker(outcome: str) -> Line2D:
    return Line2D([], [], linestyle="", marker="X", markersize=8, color=palette.OUTCOME[outcome], label=outcome)


def _draw_bars(axes, record: Record, lanes: Sequence[RankInterval], whole: float) -> None:
    later = list(dict.fromkeys(lane.worker for lane in sorted(lanes, key=lambda x: x.begin) if not lane.is_first))
    colours = {worker: palette.LATER_WORKERS[i % len(palette.LATER_WORKERS)] for i, worker in enumerate(later)}
    last = {lane.rank: lane for lane in sorted(lanes, key=lambda lane: lane.end)}
    ranks = 1 + max(lane.rank for lane in lanes)
    for lane in lanes:
        colour = palette.FIRST_WORKER if lane.is_first else colours[lane.worker]
        end = max(lane.end, whole) if lane.end == last[lane.rank].end else lane.end
        axes.barh(lane.rank, end - lane.begin, left=lane.begin, height=0.7, color=colour, zorder=2)
        # Labels that do not fit are left out; 7 characters need about 6 % of the width.
        fits = (end - lane.begin) / whole > 0.009 * len(lane.worker) + 0.01
        if fits and ranks <= _MOST_LABELS:
            text = palette.INK if lane.is_first else "white"
            at = _free_from(lane.begin, record) + whole * 0.006
            axes.text(at, lane.rank, lane.worker, va="center", fontsize=8.5, color=text, zorder=6)


def _free_from(at: float, record: Record) -> float:
    """Return the time ``at`` or, within a recovery, the recovery's end, as labels on pale bars are hard to read."""
    for recovery in record.only.recoveries:
        begin = recovery.began.wall - record.zero
        if recovery.total is not None and begin <= at < begin + recovery.total:
            return begin + recovery.total
    return at


def _draw_phases(axes, record: Record) -> None:
    plain(axes, "Phases of recoveries")
    timed = [(replica, r) for replica, r in record.recoveries if r.phases]
    if not timed:
        empty(axes, "no recovery")
        return
    names = [name for name in PHASES if any(name in r.phases for _, r in timed)]
    lies = len(timed) <= _MOST_BARS
    base = [0.0] * len(timed)
    places = range(len(timed))
    for name in names:
        sizes = [r.phases.get(name, 0.0) for _, r in timed]
        if lies:
            axes.barh(places, sizes, left=base, height=0.62, color=palette.PHASE[name])
        else:
            axes.bar(places, sizes, bottom=base, width=0.8, color=palette.PHASE[name])
        base = [a + b for a, b in zip(base, sizes, strict=True)]
    labels = [f"{replica}, #{r.number}" if record.has_quorum else str(r.number) for replica, r in timed]
    if lies:
        name = "replica {}" if record.has_quorum else "recovery {}"
        _label_bars(axes, [r for _, r in timed], base, [name.format(label) for label in labels])
    else:
        axes.set_ylabel("seconds", **STYLE)
        axes.set_xlabel("replica, recovery" if record.has_quorum else "recovery", **STYLE)
        every = max(1, len(timed) // 20)
        axes.set_xticks(places[::every], labels[::every])
        _grid(axes, 4)
        axes.set_xlim(-0.8, len(timed) - 0.2)
    legend(axes, [Patch(color=palette.PHASE[name], label=name) for name in names])


def _label_bars(axes, timed: Sequence[Recovery], ends: Sequence[float], labels: Sequence[str]) -> None:
    most = max(ends)
    for place, (recovery, end) in enumerate(zip(timed, ends, strict=True)):
        text = f"{seconds(recovery.total)}, {recovery.outcome}" if recovery.total is not None else recovery.outcome
        axes.text(end + most * 0.008, place, text, va="center", **STYLE)
    axes.set_yticks(range(len(timed)), labels)
    axes.set_ylim(len(timed) - 0.5, -0.5)
    axes.set_xlim(0, most * 1.16 or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.set_xlabel("seconds since the fault, or since its detection where the fault is not on record", **STYLE)


def _draw_replicas(axes, record: Record) -> None:
    plain(axes, "Replicas")
    if not record.lanes:
        empty(axes, "the run has recorded nothing yet")
        return
    end = max(lane.end for lane in record.lanes)
    for lane in sorted(record.lanes, key=lambda lane: lane.state != STATES[0]):
        width = max(lane.end - lane.begin, end * _LEAST_WIDTH)
        axes.barh(lane.replica, width, left=lane.begin, height=0.7, color=_STATE[lane.state], zorder=2)
    _name_rows(axes, "replica", record.count, _MOST_REPLICA_LABELS)
    axes.set_xlim(0, end)
    axes.set_xlabel("seconds since the run began", **STYLE)
    shown = {lane.state for lane in record.lanes}
    legend(axes, [Patch(color=_STATE[state], label=state) for state in STATES if state in shown])


def _draw_steps(axes, record: Record) -> None:
    """Draw the duration of every step, with the steps of incidents in colour."""
    plain(axes, "Time of steps")
    if not record.steps:
        empty(axes, "the run has recorded no step")
        return
    times = [step.when - record.zero for step in record.steps]
    took_s = record.pace.took
    axes.step(times, took_s, where="pre", color=palette.QUIET, linewidth=0.9, zorder=2)
    at = {step.number: index for index, step in enumerate(record.steps)}
    for kind, colour in _INCIDENT.items():
        inside = sorted({i for one in record.of_kind(kind) for i in range(at[one.first], at[one.last] + 1)})
        took = [took_s[index] for index in inside]
        begins = [times[index] - took_s[index] for index in inside]
        axes.bar(begins, took, width=took, align="edge", color=colour, alpha=0.75, zorder=3)
    axes.set_xlim(0, max(times[-1], max((lane.end for lane in record.lanes), default=0.0)))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds", **STYLE)
    _grid(axes, 4)
    kinds = dict.fromkeys(one.kind for one in record.incidents)
    if kinds:
        legend(axes, [Patch(color=_INCIDENT[kind], label=f"step of a {kind}") for kind in kinds])


def _grid(axes, ticks: int, **how: bool) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(ticks, **how))
    axes.grid(axis="y", color=palette.FAINT, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_depth(axes, record: Record) -> None:
    """Draw the stack depth of every step, and a mark on each step that had patch computes.

    A stack is the largest number of shard types that one group computes in a step. A patch compute is the computation,
    in the same step, of types that were lost with a group.
    """
    plain(axes, "Stacks per step, and patch computes")
    numbers = [step.number for step in record.steps]
    stacks = [step.commit.stack or 1 for step in record.steps]
    axes.step(numbers, stacks, where="mid", color=palette.QUIET, linewidth=1.2)
    patched = [step for step in record.steps if step.commit.patch]
    depths = [depth(step) for step in patched]
    marks = {"linestyle": "", "marker": "o", "markersize": 5, "color": palette.FAULT}
    axes.plot([step.number for step in patched], depths, **marks)
    axes.set_ylim(bottom=0)
    axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    _grid(axes, 4, integer=True)


def _draw_owners(axes, record: Record) -> None:
    """Draw a row for each shard type over time, in the colour of the group that computed the type in each step."""
    plain(axes, "Group that computed each shard type")
    steps, types = record.steps, record.count
    owners = numpy.full((types, steps[-1].number - steps[0].number + 1), numpy.nan)
    for step in steps:
        owners[: len(step.commit.owners), step.number - steps[0].number] = step.commit.owners
    colours = ListedColormap([(palette.FIRST_WORKER, *palette.LATER_WORKERS)[g % 9] for g in range(types)])
    extent = (steps[0].number - 0.5, steps[-1].number + 0.5, types - 0.5, -0.5)
    axes.imshow(
        owners, aspect="auto", interpolation="nearest", cmap=colours, vmin=-0.5, vmax=types - 0.5, extent=extent
    )
    places = range(0, types, max(1, -(-types // _MOST_REPLICA_LABELS)))
    axes.set_yticks(places, [f"type {kind}" for kind in places])
    axes.set_xlabel("step; the colour is that of the group that owned the type in the first step", **STYLE)


def _draw_loss(axes, record: Record) -> None:
    """Draw the loss, with a line at each step that was redone or in which a replica failed, or with a mismatch."""
    plain(axes, "Loss")
    losses = record.losses
    if not losses.points:
        empty(axes, "the run has recorded no losses" if record.has_quorum else "no metrics")
        return
    amounts, values = zip(*losses.points, strict=True)
    axes.plot(amounts, values, color=palette.LOSS, linewidth=1.5, marker="." if len(amounts) < 3 else None)
    axes.set_xlabel(losses.over, **STYLE)
    if losses.over == "step":
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    _grid(axes, 5)
    axes.margins(x=0.01)
    for at, colour in losses.marks:
        axes.axvline(at, color=colour, linewidth=1.0, linestyle=_DASHES, alpha=0.8, zorder=1)
    wrong = {step for _, checked in record.corruptions for step in checked.steps} & set(losses.at)
    for step in wrong:
        axes.axvline(losses.at[step], color=palette.MISMATCH, linewidth=1.0, linestyle=":", zorder=1)
    what = "step in which a replica failed" if record.has_quorum else "step that was redone"
    lines = [_line(palette.FAULT, _DASHES, what)] if losses.marks else []
    lines += [_line(palette.MISMATCH, ":", "step with a mismatch (DMR)")] if wrong else []
    if lines:
        legend(axes, lines)


def _line(colour: str, style: str | tuple, label: str) -> Line2D:
    return Line2D([], [], color=colour, linestyle=style, linewidth=1.0, label=label)
