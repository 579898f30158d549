"""Collects the times of the workers' steps: it compares the ranks of each role, and writes ``step_times.jsonl``.

It stands before the decision function, like the detection of lost heartbeats in the agents: the reports on steps are
many, so the journal gets only what follows from them (``PaceJudged``). A new control plane begins with an empty book,
and knows the paces again after ``WINDOW`` steps.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ft.base.lines import Lines
from ft.base.step_clock import BLOCK, OWN
from ft.job.control import eviction, stragglers
from ft.job.control.state import State
from ft.job.control.stragglers import WINDOW, Pace
from ft.job.messages import PaceJudged, StepTimes
from ft.record.metrics import Span, as_line

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
    """The book of one control plane.

    Args:
        path: the file to write.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lines: Lines | None = None
        self._epoch = -1
        self._ranks: dict[int, _Rank] = {}
        self._compared: dict[str, int] = {}
        self._span: list[StepTimes] = []
        self._began = self._span_began = 0.0

    def take(self, state: State, reports: Iterable[StepTimes], wall: float) -> list[PaceJudged]:
        """Add the times of steps, and return what they say of ranks that are slow, or are not slow any more.

        Args:
            state: state of the control plane, which is not changed.
            reports: times that have arrived.
            wall: time in seconds since 1970.
        """
        roles = {}
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

    def _compare(self, state: State, role: str) -> Iterable[PaceJudged]:
        """Compare the ranks of a role, as soon as all of them have reported a step."""
        ranks = {number: rank for number, rank in self._ranks.items() if rank.role == role}
        newest = min(rank.last for rank in ranks.values())
        if newest <= self._compared.get(role, 0):
            return
        self._compared[role] = newest
        common = sorted(set.intersection(*(set(rank.own) for rank in ranks.values())))[-WINDOW:]
        times = {number: [rank.own[step] for step in common] for number, rank in ranks.items()}
        known = eviction.present(state)
        for number, pace in stragglers.compare(times).items():
            is_known = number in known
            is_news = pace.is_late and not is_known
            is_over = is_known and stragglers.is_punctual(pace)
            if is_news or is_over or (is_known and eviction.wants_news(state, number, pace.ratio, newest)):
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
