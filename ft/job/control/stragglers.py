"""Stragglers: ranks whose own work in a step takes persistently longer than that of ranks with the same work.

A rank that waits for a straggler has longer steps, too, but not longer work of its own: the time in which it waits is
not compared. In each step, the time of a rank is divided by the median time of the others. A rank is late if the median
of these ratios over a window of steps is large, if it is large against the noise of the ratios, and if it is large in
both halves of the window. Medians ignore steps that are slow for once, such as those in which a rank collects garbage
or saves a checkpoint.

:class:`PaceBook` collects the times of the workers' steps and writes ``step_times.jsonl``. It stands before the
decision function: the reports on steps are many, so the journal gets only what follows from them (``PaceJudged``). A
new control plane begins with an empty book, and knows the paces again after ``WINDOW`` steps. :func:`pace_judged` names
stragglers, and replaces them if the run asks for that. A straggler has failed in nothing, so it is replaced only where
that is certain to help: one at a time, by a standby that is ready and uses another device, and then not again for many
steps.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ft.base import events
from ft.base.lines import Lines
from ft.base.step_clock import BLOCK, OWN
from ft.faults import verdict
from ft.job import messages as m
from ft.job.control import devices
from ft.job.control.failures import WorkerFault, react
from ft.job.control.state import RUNNING, ControlState, Decisions, Vacancy, Worker
from ft.job.messages import PaceJudged, StepTimes
from ft.record.metrics import Span, as_line

WINDOW = 40
"""Number of steps that are compared. A straggler is found before it was slow for 50 steps, because the times of ten
steps are reported together."""
LATE = 1.035
"""Smallest median ratio of a straggler. It lies below 1.05 so that noise does not hide a rank that is 5 % slower."""
PUNCTUAL = 1.02
"""A straggler stops being one when its median ratio falls below this."""
_IN_EACH_HALF = 1.0 + (LATE - 1.0) / 2
_SURE = 5.0
"""Smallest distance of the median ratio from 1, in standard errors."""
_ERROR_OF_MEDIAN, _DEVIATION_OF_MAD = 1.2533, 1.4826
"""For normal noise: standard error of a median / that of a mean, and standard deviation / median absolute deviation."""


@dataclass(frozen=True)
class Pace:
    """How fast a rank works compared with the others of its role.

    Attributes:
        ratio: median over the steps of its time divided by the median time of the others.
        own_s: median time of its own work in a step, in seconds.
        usual_s: median over the steps of the median time of the others, in seconds.
        is_late: whether it is a straggler.
    """

    ratio: float
    own_s: float
    usual_s: float
    is_late: bool


def compare(times: Mapping[int, Sequence[float]]) -> dict[int, Pace]:
    """Return logical rank -> its pace, nothing for a single rank or fewer than ``WINDOW`` steps.

    ``times``: the seconds of each rank's own work in the same steps, for all ranks of one role.
    """
    steps = min((len(own) for own in times.values()), default=0)
    if len(times) < 2 or steps < WINDOW:
        return {}
    ranks = list(times)
    usual: dict[int, list[float]] = {rank: [] for rank in ranks}
    for step in range(-WINDOW, 0):
        ordered = sorted(ranks, key=lambda rank: times[rank][step])
        for place, rank in enumerate(ordered):
            usual[rank].append(_median_of_others(ordered, place, times, step))
    return {rank: _pace(list(times[rank][-WINDOW:]), usual[rank]) for rank in ranks}


def is_punctual(pace: Pace) -> bool:
    """Return whether a rank that was a straggler is none any more."""
    return pace.ratio < PUNCTUAL


def _median_of_others(ordered: Sequence[int], place: int, times: Mapping[int, Sequence[float]], step: int) -> float:
    """Return the median time of all ranks but the one at ``place``. ``ordered``: the ranks by their times."""

    def other(index: int) -> float:
        return times[ordered[index if index < place else index + 1]][step]

    count = len(ordered) - 1
    return (other((count - 1) // 2) + other(count // 2)) / 2


def _pace(own: Sequence[float], usual: Sequence[float]) -> Pace:
    ratios = [mine / theirs if theirs > 0.0 else 1.0 for mine, theirs in zip(own, usual, strict=True)]
    ratio, half = statistics.median(ratios), len(ratios) // 2
    deviation = _DEVIATION_OF_MAD * statistics.median(abs(each - ratio) for each in ratios)
    error = _ERROR_OF_MEDIAN * deviation / len(ratios) ** 0.5
    is_late = (
        ratio >= LATE
        and ratio - 1.0 >= _SURE * error
        and min(statistics.median(ratios[:half]), statistics.median(ratios[half:])) >= _IN_EACH_HALF
    )
    return Pace(ratio, statistics.median(own), statistics.median(usual), is_late)


PAUSE_STEPS = 200
"""After a straggler was replaced, none is replaced for so many steps: a cause that stays does not use up standbys."""


def present(state: ControlState) -> dict[int, PaceJudged]:
    """Return logical rank -> the report on its worker, for the stragglers that still have their seats."""
    return {rank: slow for rank, slow in state.stragglers.items() if state.seats.get(rank) == slow.worker}


def pace_judged(state: ControlState, now: float, report: m.PaceJudged, out: Decisions) -> None:
    """Name a straggler, or take its name back; replace it if the run asks for that."""
    worker = state.workers.get(report.worker)
    if worker is None or worker.rank != report.rank or report.epoch != state.epoch or state.phase != RUNNING:
        out.add(f"ignored: the pace of {report.worker} in epoch {report.epoch}, which is over or is not running")
        return
    who, known = f"{worker.name} (logical rank {worker.rank})", present(state).get(report.rank)
    if not report.is_late:
        state.stragglers.pop(report.rank, None)
        out.add(f"{who} is as fast as the others again")
        if known is not None:
            out.note(events.STRAGGLER_GONE, **_place(state, worker, report), ratio=report.ratio)
        return
    state.stragglers[report.rank] = report
    out.add(f"{who} is slow: its own work takes {report.ratio:.3f} times as long as that of the others")
    if known is None:
        detail = {"own_s": report.own_s, "usual_s": report.usual_s, "cause": report.cause, "steps": report.steps}
        out.note(events.STRAGGLER_FOUND, **_place(state, worker, report), ratio=report.ratio, **detail)
    _evict(state, now, worker, report, out)


def wants_news(state: ControlState, rank: int, ratio: float, step: int) -> bool:
    """Return whether a straggler that is known already would be replaced now; then its pace is to be reported again."""
    worker = state.workers.get(state.seats.get(rank, ""))
    return worker is not None and not _why_not(state, worker, ratio, step)


def _evict(state: ControlState, now: float, worker: Worker, report: m.PaceJudged, out: Decisions) -> None:
    why_not, limit = _why_not(state, worker, report.ratio, report.step), state.evict_factor
    if why_not or limit is None:
        out.add(f"{worker.name} keeps its seat: {why_not}")
        return
    state.evicted_at = report.step
    has_device = state.agents[worker.node].joined.devices > 0
    found = verdict.of_straggler(report.ratio, limit, report.cause, has_device)
    react(state, now, [WorkerFault(worker, found)], out)


def _why_not(state: ControlState, worker: Worker, ratio: float, step: int) -> str:
    """Return why the straggler is not replaced, or "" if it is."""
    if state.evict_factor is None or not state.options.hot_swap:
        return "stragglers are not replaced in this run (--ft-evict-stragglers)"
    if ratio < state.evict_factor:
        return f"it is slower by a factor of {ratio:.3f}, and stragglers are replaced from {state.evict_factor:g} on"
    if state.phase != RUNNING or state.recovery is not None:
        return "a recovery is under way"
    if state.evicted_at is not None and step - state.evicted_at < PAUSE_STEPS:
        return f"the last straggler was replaced after step {state.evicted_at}, less than {PAUSE_STEPS} steps ago"
    if not any(_can_replace(state, standby, worker) for standby in state.standbys()):
        return "no standby with another device is ready"
    return ""


def _can_replace(state: ControlState, standby: Worker, worker: Worker) -> bool:
    """Return whether the standby's node has a free device that is not the straggler's own."""
    agent = state.agents[standby.node]
    if agent.gone or agent.suspect:
        return False
    taken = {(seated.node, seated.local_rank) for seated in state.seated()}
    return devices.choose(agent, Vacancy(worker.name, worker.node, worker.local_rank), taken) is not None


def _place(state: ControlState, worker: Worker, report: m.PaceJudged) -> dict[str, str | int]:
    return {
        "epoch": state.epoch,
        "node": worker.node,
        "worker": worker.name,
        "rank": report.rank,
        "step": report.step,
    }


_LEAST_SPAN_S, _SPANS = 0.5, 100
"""A line of the file covers at least so many seconds, and at least the time of the run so far divided by ``_SPANS``."""
_KEPT_BLOCKS = WINDOW // BLOCK


@dataclass
class _Rank:
    """The last steps of one logical rank, in one epoch."""

    worker: str
    role: str
    own: dict[int, float] = field(default_factory=dict)
    blocks: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=_KEPT_BLOCKS))

    @property
    def last(self) -> int:
        return next(reversed(self.own), 0)

    def add(self, times: StepTimes) -> None:
        self.own.update(zip(times.steps, times.own_s, strict=True))
        self.blocks.append(times)
        for step in list(self.own)[: -2 * WINDOW]:
            del self.own[step]

    def mean(self, part: str) -> float:
        """Return the time of a part of a step in seconds, on average over the last blocks."""
        return sum(block.parts.get(part, 0.0) for block in self.blocks) / sum(len(block.steps) for block in self.blocks)


class PaceBook:
    """The book of one control plane."""

    def __init__(self, path: Path):
        self._path = path
        self._lines: Lines | None = None
        self._epoch = -1
        self._ranks: dict[int, _Rank] = {}
        self._compared: dict[str, int] = {}
        self._span: list[StepTimes] = []
        self._began = self._span_began = 0.0

    def take(self, state: ControlState, reports: Iterable[StepTimes], wall: float) -> list[PaceJudged]:
        """Add the times of steps, and return what they say of ranks that are slow, or are not slow any more.

        The state is not changed. ``wall``: time in seconds since 1970.
        """
        roles: dict[str, None] = {}
        for times in reports:
            if times.epoch != state.epoch or state.seats.get(times.rank) != times.worker or not times.steps:
                continue
            if times.epoch != self._epoch:
                self._begin_epoch(times.epoch, wall)
            self._ranks.setdefault(times.rank, _Rank(times.worker, times.role)).add(times)
            self._span.append(times)
            roles[times.role] = None
        if not roles:
            return []
        self._end_span_when_due(state.options.world_size, wall)
        if len(self._ranks) < state.options.world_size:
            return []
        return [judged for role in roles for judged in self._compare(state, role)]

    def close(self) -> None:
        """Write the times that are not in the file yet."""
        self._end_span(self._span_began)
        if self._lines is not None:
            self._lines.close()

    # --- comparing ----------------------------------------------------------------------------------------------------

    def _begin_epoch(self, epoch: int, wall: float) -> None:
        self._end_span(wall)
        self._epoch, self._ranks, self._compared = epoch, {}, {}

    def _compare(self, state: ControlState, role: str) -> Iterable[PaceJudged]:
        """Compare the ranks of a role, as soon as all of them have reported a step."""
        ranks = {number: rank for number, rank in self._ranks.items() if rank.role == role}
        newest = min(rank.last for rank in ranks.values())
        if newest <= self._compared.get(role, 0):
            return
        self._compared[role] = newest
        common = sorted(set.intersection(*(set(rank.own) for rank in ranks.values())))[-WINDOW:]
        times = {number: [rank.own[step] for step in common] for number, rank in ranks.items()}
        known = present(state)
        for number, pace in compare(times).items():
            is_known = number in known
            is_news = pace.is_late and not is_known
            is_over = is_known and is_punctual(pace)
            if is_news or is_over or (is_known and wants_news(state, number, pace.ratio, newest)):
                yield self._judged(number, ranks, pace, newest, is_late=not is_over)

    def _judged(self, number: int, ranks: dict[int, _Rank], pace: Pace, step: int, is_late: bool) -> PaceJudged:
        others = [rank for each, rank in ranks.items() if each != number]
        more = {part: ranks[number].mean(part) - statistics.median(o.mean(part) for o in others) for part in OWN}
        return PaceJudged(
            worker=ranks[number].worker,
            epoch=self._epoch,
            rank=number,
            step=step,
            is_late=is_late,
            ratio=round(pace.ratio, 4),
            own_s=round(pace.own_s, 6),
            usual_s=round(pace.usual_s, 6),
            cause=max(more, key=lambda part: more[part]),
            steps=WINDOW,
        )

    # --- the file -----------------------------------------------------------------------------------------------------

    def _end_span_when_due(self, world_size: int, wall: float) -> None:
        if not self._began:
            self._began = self._span_began = wall
        due_s = max(_LEAST_SPAN_S, (wall - self._began) / _SPANS)
        if wall - self._span_began >= due_s and len({times.rank for times in self._span}) == world_size:
            self._end_span(wall)

    def _end_span(self, wall: float) -> None:
        taken, self._span, self._span_began = self._span, [], wall
        if not taken:
            return
        if self._lines is None:
            self._lines = Lines(self._path, is_shared=True)
        self._lines.write(as_line(_span(taken, wall)))


def _span(taken: Sequence[StepTimes], wall: float) -> Span:
    """Return the times of one span, summed up for each rank."""
    by_rank: dict[int, list[StepTimes]] = defaultdict(list)
    for times in taken:
        by_rank[times.rank].append(times)
    ranks = sorted(by_rank)
    steps = {rank: sum(len(times.steps) for times in by_rank[rank]) for rank in ranks}

    def per_step(rank: int, seconds: Iterable[float]) -> float:
        return round(1e3 * sum(seconds) / steps[rank], 3)

    def each(kind: str, name: str) -> list[float | None]:
        return [per_step(rank, (getattr(times, kind).get(name, 0.0) for times in by_rank[rank])) for rank in ranks]

    waits = sorted({name for times in taken for name in times.waits})
    return Span(
        wall=round(wall, 3),
        epoch=taken[-1].epoch,
        first=min(times.steps[0] for times in taken),
        last=max(times.steps[-1] for times in taken),
        ranks=ranks,
        roles=[by_rank[rank][-1].role for rank in ranks],
        steps=[steps[rank] for rank in ranks],
        step_ms=[per_step(rank, (sum(times.step_s) for times in by_rank[rank])) for rank in ranks],
        own_ms=[per_step(rank, (sum(times.own_s) for times in by_rank[rank])) for rank in ranks],
        parts={part: each("parts", part) for part in OWN if any(part in times.parts for times in taken)},
        waits={name: each("waits", name) for name in waits},
    )
