"""Discrete-event simulation of a long FT-HSDP run with failing replicas, in virtual time (``ft simulate hsdp``).

Unlike the closed form (``ft.lab.simulate.hsdp.model.overlapping``), the simulation models three more effects:

- Steps are discrete: a rebuilt replica joins at the end of a step, contributes zeros to one more step (FT-HSDP, section
  4.3), and only then contributes to training.
- With fewer replicas than a minimum, no replica trains.
- If all replicas are lost at once, training resumes from a checkpoint.

A stall is the time that all replicas wait, when a replica fails or rejoins.
"""

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from ft.lab.simulate.hsdp.model import Case

PERIODIC, EXPONENTIAL, WEIBULL = FAMILIES = ("periodic", "exponential", "weibull")
"""Distributions of the time between two failures."""
_FAILS, _REBUILT, _COUNTS = range(3)
"""Kinds of events: a replica fails, a replica asks to rejoin, a rejoined replica contributes again."""


@dataclass(frozen=True)
class Failures:
    """The distribution of the time between failures.

    Attributes:
        family: name of the distribution, one of ``FAMILIES``.
        shape: shape of the Weibull distribution; below 1, failures come in bursts.
    """

    family: str = EXPONENTIAL
    shape: float = 0.7

    def times(self, mean_s: float, rng: random.Random) -> Iterator[float]:
        """Yield the seconds from each failure to the next, endlessly; their mean is ``mean_s``."""
        scale = mean_s / math.gamma(1.0 + 1.0 / self.shape)
        while True:
            if self.family == PERIODIC:
                yield mean_s
            elif self.family == WEIBULL:
                yield rng.weibullvariate(scale, self.shape)
            else:
                yield rng.expovariate(1.0 / mean_s)


@dataclass(frozen=True)
class Rules:
    """The rules of training.

    Attributes:
        minimum: minimum number of replicas in a step.
        checkpoint_steps: number of steps between persistent checkpoints; 0: no training is lost when all replicas are
            lost.
    """

    minimum: int = 1
    checkpoint_steps: int = 100


@dataclass
class Outcome:
    """The totals of one simulated run. Times are in seconds of virtual time.

    Attributes:
        lasted: length of the run.
        trained: number of contributing replicas -> training time.
        stalled: time in which all replicas waited because of a failure or a rejoin.
        too_few: time with fewer replicas than the minimum.
        undone: training time that was lost with all replicas at once, converted to time of all replicas.
        failures: number of failures.
        during_rebuild: number of failures of a replica that was being rebuilt.
        overlapping: number of failures while another replica was out of training.
        losses: number of losses of all replicas at once.
        effective: effective training time: training done, as a fraction of that of all replicas without failures.
    """

    lasted: float = 0.0
    trained: dict[int, float] = field(default_factory=dict)
    stalled: float = 0.0
    too_few: float = 0.0
    undone: float = 0.0
    failures: int = 0
    during_rebuild: int = 0
    overlapping: int = 0
    losses: int = 0
    effective: float = 0.0


def simulate(case: Case, failures: Failures, rules: Rules, lasts_s: float, seed: int) -> Outcome:
    """Simulate one run.

    Args:
        case: number of replicas, and costs of a failure.
        failures: distribution of the time between failures.
        rules: minimum number of replicas and checkpoint interval.
        lasts_s: length of the run in virtual seconds.
        seed: seed of all randomness.
    """
    history = _History(case, rules, random.Random(seed))
    times = failures.times(case.interval_s, history.rng)
    history.at(next(times), _FAILS)
    while history.events[0][0] < lasts_s:
        if history.turn() == _FAILS:
            history.at(history.now + next(times), _FAILS)
    history.pass_to(lasts_s)
    found, replicas = history.found, case.replicas
    found.undone /= replicas
    found.lasted = lasts_s
    done = sum(seconds * members for members, seconds in found.trained.items())
    found.effective = (done / replicas - found.undone) / lasts_s
    return found


class _History:
    """The state of one simulated run.

    Attributes:
        contributes: whether each replica contributes to training.
        joining: rejoining replica -> virtual time in seconds from which the replica contributes.
        kept: training since the last checkpoint in replica-seconds, which is lost if all replicas are lost.
        quiet_at: virtual time in seconds at which the current stall ends.
    """

    def __init__(self, case: Case, rules: Rules, rng: random.Random):
        self.case, self.rules, self.rng = case, rules, rng
        self.events: list[tuple[float, int, int, int, int]] = []
        self.now = self.quiet_at = self.kept = self.since_checkpoint = 0.0
        self.contributes = [True] * case.replicas
        self.joining: dict[int, float] = {}
        self.found, self._asked, self._stamps = Outcome(), 0, [0] * case.replicas

    def at(self, when: float, kind: int, replica: int = 0) -> None:
        """Schedule an event. A later change of the replica's ``_stamps`` cancels it, unless it is a failure."""
        self._asked += 1
        heapq.heappush(self.events, (when, self._asked, kind, replica, self._stamps[replica]))

    def turn(self) -> int:
        """Process the next event and return its kind."""
        when, _, kind, replica, stamp = heapq.heappop(self.events)
        self.pass_to(when)
        if kind == _FAILS:
            self._fails(self.rng.randrange(self.case.replicas))
        elif stamp == self._stamps[replica]:
            self._rebuilt(replica) if kind == _REBUILT else self._counts(replica)
        return kind

    def pass_to(self, when: float) -> None:
        """Account for the event-free time up to ``when``."""
        found, members = self.found, sum(self.contributes)
        waits = min(max(self.quiet_at - self.now, 0.0), when - self.now)
        rest = when - self.now - waits
        self.now = when
        if members < self.rules.minimum:
            found.too_few += waits + rest
            return
        found.stalled += waits
        found.trained[members] = found.trained.get(members, 0.0) + rest
        self.kept += rest * members
        self.since_checkpoint += rest
        every = self.rules.checkpoint_steps * self.case.step_s
        if self.since_checkpoint >= every:
            self.since_checkpoint = self.since_checkpoint % every if every else 0.0
            self.kept = self.since_checkpoint * members

    def _fails(self, replica: int) -> None:
        found, others = self.found, sum(self.contributes) - self.contributes[replica]
        found.failures += 1
        found.overlapping += others < self.case.replicas - 1
        was_in = self.contributes[replica] or replica in self.joining
        found.during_rebuild += not was_in
        if self.contributes[replica] and not others:
            found.losses += 1
            found.undone += self.kept
            self.kept = self.since_checkpoint = 0.0
        self.contributes[replica] = False
        self.joining.pop(replica, None)
        self._stamps[replica] += 1
        self.at(self.now + self.case.rebuild_s, _REBUILT, replica)
        if was_in:
            self._all_wait(self.case.stall_s)

    def _all_wait(self, seconds: float) -> None:
        """Stall all replicas while the step is repeated. No replica rejoins before the end of the stall."""
        self.quiet_at = max(self.quiet_at, self.now + seconds)
        for replica, when in self.joining.items():
            self._will_count(replica, max(when, self.quiet_at))

    def _rebuilt(self, replica: int) -> None:
        if not any(self.contributes):
            self._counts(replica)  # no replica has state newer than the checkpoint, so there is nothing to wait for
            return
        since = self.now - self.quiet_at
        step_ends = self.quiet_at if since < 0 else self.now + self.case.step_s - since % self.case.step_s
        self._will_count(replica, step_ends + self.case.step_s)

    def _will_count(self, replica: int, when: float) -> None:
        self._stamps[replica] += 1
        self.joining[replica] = when
        self.at(when, _COUNTS, replica)

    def _counts(self, replica: int) -> None:
        self.joining.pop(replica, None)
        self.contributes[replica] = True
        self.quiet_at = max(self.quiet_at, self.now + self.case.rejoin_s)
