"""Random situations for the recovery ladder, and an oracle that says by brute force what may follow each of them.

The oracle shares no code with the ladder, except the rule of CheckFree that says which stages can be rebuilt.
"""

import math
import random
from dataclasses import dataclass, fields, replace
from unittest import mock

from ft.job.control import recovery
from ft.job.control.recovery import (
    MIDDLE,
    PLUS,
    Decision,
    HostMemory,
    Others,
    Restarts,
    Seats,
    Situation,
    Stages,
    decide,
)
from ft.job.control.state import GridPosition
from ft.job.control.timeouts import Timeouts
from ft.job.parts import Holdings
from ft.job.quorum.limits import Limits

LADDER = "in place", "standby", "copy elsewhere", "another replica", "reorder", "CheckFree", "checkpoint", "end"
_EXACT, _EVERY_SAMPLE, _APPROXIMATE = range(3)
_WORDS = "bit for bit", "every sample once", "approximate"
_LIMITS = {
    f"{name}.{each.name}": [getattr(table.calibrated(step_s), each.name) for step_s in (None, 0.1, 60.0)]
    for name, table in (("control", Timeouts()), ("quorum", Limits()))
    for each in fields(table)
}


def situation(number: int) -> Situation:
    """Return the random situation of this number."""
    rng = random.Random(number)
    tp, dp, pp = rng.choice((1, 1, 2)), rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 3, 4, 5))
    ranks, step = range(tp * dp * pp), rng.choice((0, 1, 7, 100))
    blocks = [rng.choice((2, 2, 2, 3))] * pp if rng.random() < 0.9 else [rng.choice((2, 3)) for _ in range(pp)]
    lends = rng.random() < 0.8
    places = {
        rank: GridPosition(rank // (tp * dp), rank % tp, rank // tp % dp, 0, blocks[rank // (tp * dp)], lends=lends)
        for rank in ranks
    }
    peers = {r: [o for o in ranks if (places[o].pp, places[o].tp) == (places[r].pp, places[r].tp)] for r in ranks}
    harm = rng.choice((0.0, 0.05, 0.2, 0.5))
    lost = {rank for rank in ranks if rng.random() < harm}
    if rng.random() < 0.4:
        stages = rng.sample(range(pp), min(pp, rng.choice((1, 1, 2))))
        lost |= {rank for rank in ranks if places[rank].pp in stages}
    steps = [at for at in (step, step - 1, step - 2)[: rng.choice((1, 2, 2, 3))] if at >= 0]
    torn = rng.choice((0.0, 0.0, 0.1, 0.4))
    holdings = {rank: _holds(rng, rank, ranks, peers, steps, torn) for rank in ranks if rank not in lost}
    unverified = {
        (holder, owner, at)
        for holder, held in holdings.items()
        for owner, of in ((holder, held.own), *((int(o), s) for o, s in held.copies.items()))
        for at in of
        if torn and rng.random() < torn / 2
    }
    checkfree = rng.choice(("", MIDDLE, PLUS, PLUS))
    rebuilt = {rng.randrange(pp): rng.choice(steps)} if steps and checkfree == MIDDLE and rng.random() < 0.2 else {}
    memory = HostMemory(
        ranks,
        holdings,
        peers,
        spoiled=[at for at in steps if rng.random() < torn / 2],
        complete=[rank for rank in ranks if rng.random() < 0.5] if rng.random() < 0.3 else (),
        unusable={rank: [step] for rank in ranks if rng.random() < torn / 8},
        unbuildable=[at for at in steps if rng.random() < torn / 4],
    )
    return Situation(
        step,
        memory,
        Stages(checkfree, places, rebuilt),
        Seats(sorted(lost), rng.choice((0, 0, 1, 2, len(lost), len(ranks))), rng.choice((0, 0, 1, len(lost)))),
        Others(rng.choice((1, 1, 2, 3, 4)), rng.random() < 0.4),
        Restarts(
            rng.choice((0, 1, 3, 3, 3)),
            rng.choice((0, 0, 0, 1, 3)),
            len(ranks),
            rng.random() < 0.85,
            rng.choice((None, (), (0,), (max(0, step - 5),), (step, step + 3), range(0, step + 1, 2))),
        ),
        hot_swap=rng.random() < 0.85,
        barred=rng.choice(("", "", "", "", "", "the program has raised an error")),
        unverified=frozenset(unverified),
    )


def _holds(rng, rank, ranks, peers, steps, torn) -> Holdings:
    """Return what a worker holds: its own snapshots, the peer copies of the rank before it, and what a worker of its
    node has left, each with gaps.
    """
    own = [at for at in steps if rng.random() >= torn]
    ring = peers[rank] if len(peers[rank]) > 1 else list(ranks)
    before = ring[ring.index(rank) - 1]
    copies = {} if before == rank or rng.random() < 0.2 else {before: [s for s in steps if rng.random() >= torn]}
    whole = {rng.choice(ranks): [at for at in steps if rng.random() >= torn]} if rng.random() < 0.2 else {}
    return Holdings(own, copies | whole, rng.choice((None, *own, *own)), whole)


@dataclass(frozen=True)
class Possible:
    """A recovery that the oracle finds possible: ``loses`` is what it loses, in the order of :func:`_loses`."""

    level: str
    loses: tuple[float, ...]
    step: int | None = None


def _loses(*, steps=0.0, exactness=_EXACT, late=0.0, anew=False, ended=False) -> tuple[float, ...]:
    return float(ended), float(anew), float(exactness), late, float(steps)


class Oracle:
    """What is possible in a situation, found by looking at every snapshot."""

    def __init__(self, given: Situation):
        self.given, self.memory = given, given.memory
        self.held = {(h, h, s) for h, held in self.memory.holdings.items() for s in held.own}
        self.held |= {
            (h, int(o), s) for h, held in self.memory.holdings.items() for o, of in held.copies.items() for s in of
        }
        self.held -= set(given.unverified)
        self.whole = self.held & {
            (h, o, s) for h, held in self.memory.holdings.items() for o, of in held.whole.items() for s in of if o != h
        }
        self.held -= {(h, h, s) for h, o, s in self.held if h == o and s not in self.memory.holdings[h].own}
        live = {rank: held.live for rank, held in self.memory.holdings.items()}
        self.live = {r: live.get(r) if (r, r, live.get(r)) in self.held else None for r in self.memory.ranks}
        self.steps = sorted({s for _, _, s in self.held}, reverse=True)

    def inside(self, rank: int, step: int) -> bool:
        """Return whether this replica has a verified source of all of a rank's state."""
        if (rank, rank, step) in self.held:
            return True
        peers = [peer for peer in self.memory.dp_peers[rank] if peer != rank]
        left = {owner for _, owner, at in self.whole if at == step}
        copied = any((holder, rank, step) in self.held for holder in self.memory.ranks)
        alone = not peers or rank in self.memory.complete
        return rank in left or (
            copied and (alone or any(peer in left or (peer, peer, step) in self.held for peer in peers))
        )

    def newest(self) -> int | None:
        """Return the newest step of which all ranks have a source."""
        for step in self.steps:
            if step not in self.memory.spoiled and all(self.inside(rank, step) for rank in self.memory.ranks):
                return step
        return None

    def position_of(self) -> int | None:
        """Return the newest step of which a worker has a usable snapshot of its own."""
        own = [s for h, o, s in self.held if h == o and s not in self.memory.unusable.get(h, ())]
        return max(own, default=None)

    def can_use_memory(self) -> bool:
        seats = self.given.seats
        filled = len(seats.vacant) <= seats.standbys + seats.room
        return self.given.hot_swap and not self.given.barred and filled

    def can_rebuild(self) -> int | None:
        """Return the newest step at which CheckFree can rebuild what is lost, or None."""
        holdings = {
            rank: Holdings([s for s in self.steps if self.inside(rank, s)], {}, live)
            for rank, live in self.live.items()
        }
        plan = recovery.plan_from_memory(replace(self.memory, holdings=holdings), self.given.stages)
        return plan.step if plan.name == "CheckFree" else None

    def possible(self) -> list[Possible]:
        """Return all recoveries that are possible."""
        given, others, found = self.given, self.given.others, []
        late = 0.0 if others.reorders else 1.0 / others.replicas
        if self.can_use_memory():
            newest, rebuilt, position_of = self.newest(), self.can_rebuild(), self.position_of()
            if newest is not None:
                found.append(Possible(self._level(newest), _loses(steps=given.step - newest), newest))
            elif rebuilt is not None:
                loses = _loses(steps=given.step - rebuilt, exactness=_APPROXIMATE)
                found.append(Possible("CheckFree", loses, rebuilt))
            elif others.replicas > 1 and position_of is not None:
                found.append(Possible("another replica", _loses(exactness=_EVERY_SAMPLE, late=late), position_of))
        restarts = given.restarts
        can_restart = restarts.used < restarts.allowed and restarts.has_room
        if others.replicas > 1 and not any(one.level == "CheckFree" for one in found):
            level = "reorder" if others.reorders else "another replica"
            loses = _loses(exactness=_EVERY_SAMPLE, late=late, ended=not can_restart)
            found.append(Possible(level, loses))
        if others.replicas == 1 and can_restart:
            found.append(Possible("checkpoint", _loses(steps=self.since_checkpoint(), anew=True)))
        return found or [Possible("end", _loses(steps=self.since_checkpoint(), anew=True, ended=True))]

    def _level(self, step: int) -> str:
        seats = self.given.seats
        keeps = [rank for rank in self.memory.ranks if rank not in seats.vacant]
        if len(seats.vacant) > seats.standbys or any((rank, rank, step) not in self.held for rank in keeps):
            return "copy elsewhere"
        return "standby" if seats.vacant else "in place"

    def since_checkpoint(self) -> float:
        saved = self.given.restarts.checkpoints
        if saved is None:
            return math.inf
        return self.given.step - max([0, *(step for step in saved if step <= self.given.step)])


def broken(given: Situation, decision: Decision | None = None) -> list[str]:
    """Return which properties the ladder's decision on a situation does not have; none is right."""
    found = decide(given) if decision is None else decision
    oracle, said = Oracle(given), []
    lost = found.lost
    steps = math.inf if lost.steps is None else lost.steps
    exactness = _WORDS.index(lost.exactness)
    loses = _loses(steps=steps, exactness=exactness, late=lost.late, anew=lost.starts_anew, ended=lost.ended)
    possible = oracle.possible()
    match = [one for one in possible if (one.level, one.loses) == (found.level, loses)]
    if not match or match[0].step != (found.plan.step if found.plan else None):
        said.append(f"{found.level} that loses {loses} is not possible: {possible}")
    for one in possible:
        less = one.loses != loses and all(a <= b for a, b in zip(one.loses, loses, strict=True))
        if less:
            said.append(f"{one.level} would have lost less: {one.loses}, not {loses}")
        elif LADDER.index(one.level) < LADDER.index(found.level) and not any(
            other.loses != one.loses and all(a <= b for a, b in zip(other.loses, one.loses, strict=True))
            for other in possible
        ):
            said.append(f"{one.level} is skipped")
    said += _unverified(oracle, found) + _unlimited(found)
    return said if found.reason else [*said, "no reason"]


def _unverified(oracle: Oracle, found: Decision) -> list[str]:
    """Return what of the restored state is not verified, or comes from nowhere."""
    if found.plan is None:
        return []
    plan, said = found.plan, []
    for rank, source in plan.sources.items():
        if (source.owned, rank, plan.step) not in oracle.held:
            said.append(f"rank {rank} takes an unverified state of step {plan.step} from {source.owned}")
        whose = source.replicated if source.whose is None else source.whose
        whole = (source.replicated, whose, plan.step) in (oracle.held if source.whose is None else oracle.whole)
        if not whole and (source.replicated != source.owned or source.owned == rank):
            said.append(f"rank {rank} takes an unverified replicated state from {source.replicated}")
    places = oracle.given.stages.places
    for lost, beside in plan.rebuilt.items():
        if any(rank not in {*plan.sources, *plan.lent} for rank in beside.there):
            said.append(f"a stage is rebuilt from ranks {beside.there}, of which one has no state")
        if any(abs(places[rank].pp - places[lost].pp) != 1 for rank in beside.there):
            said.append(f"rank {lost} is rebuilt from ranks {beside.there}, of which one is of no stage beside it")
    for rank, peer in plan.lent.items():
        if oracle.live[peer] != plan.step or peer not in plan.sources or not places[peer].lends:
            said.append(f"rank {rank} takes weights from rank {peer}, which has none of step {plan.step}")
        if peer not in oracle.memory.dp_peers[rank]:
            said.append(f"rank {rank} takes weights from rank {peer}, which holds another part of the model")
    if plan.position_of is not None:
        return (
            said
            if (plan.position_of, plan.position_of, plan.step) in oracle.held
            else [*said, "nobody has the position"]
        )
    if sorted([*plan.sources, *plan.rebuilt, *plan.lent]) != list(oracle.memory.ranks):
        said.append("not every rank has one origin")
    return said


def _unlimited(found: Decision) -> list[str]:
    """Return which waits have no limit in the tables of timeouts."""
    if not found.waits and found.level != "end":
        return ["it waits for nothing"]
    limits = [limit for name in found.waits for limit in _LIMITS.get(name, [math.inf])]
    return [] if all(0 < limit < math.inf for limit in limits) else [f"no limit for one of {found.waits}"]


def _nothing(*_, **__):
    return iter(())


PLANTED = {
    "unverified snapshots are used": mock.patch.object(Situation, "verified", lambda self: self.memory),
    "the levels are tried in another order": mock.patch.object(recovery, "LADDER", LADDER[::-1]),
    "no position is looked for": mock.patch.object(recovery, "plan_fetch", lambda *_: None),
    "the other replicas are forgotten": mock.patch.object(recovery, "_without_this_replica", _nothing),
    "a restart has no limit": mock.patch.object(Restarts, "against", ""),
    "there is no warm restart": mock.patch.object(
        recovery, "_anew", lambda _, refused: refused.setdefault("checkpoint", "") and ()
    ),
    "seats are always filled": mock.patch.object(Seats, "level", recovery.STANDBY),
    "a limit has no name": mock.patch.object(recovery, "waits", lambda seats: ("control.patience_s",)),
    "a checkpoint is newer than it is": mock.patch.object(Restarts, "steps_since", lambda self, step: 0),
}
"""Bugs of the ladder that the properties have to find: title -> how to plant it, as a context manager."""
