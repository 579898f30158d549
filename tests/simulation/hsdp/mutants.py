"""Known bugs in the code of the quorum server and of the replicas' protocol, which the simulation has to find.

Each function here does the wrong thing in the place of the right function, its first argument.
"""

from dataclasses import replace
from unittest import mock

from ft.job.quorum import decide, reactions, values
from ft.job.quorum.dispatch import Dispatch
from ft.job.quorum.values import NO_STATE
from ft.job.replicas.deadlines import RingLimits
from ft.systems.hsdp import exchange, protocol
from ft.systems.hsdp.protocol import QuorumMembership, Retry, Steps
from tests.simulation.campaign import Mutant, planter

PLANTS: list[Mutant] = []
plant = planter(PLANTS)

# --- the quorum server ------------------------------------------------------------------------------------------------


@plant("sends the addresses of a replica's first life only", Dispatch, "_give")
def _first_rows_stay(right, self, peer, quorum, frame):
    known = {member: quorum.lives[member] for member in peer.rows if member in quorum.lives}
    peer.rows.update(known)
    right(self, peer, quorum, frame)


@plant("sends a quorum before the addresses of its members", Dispatch, "_give")
def _rows_follow(right, self, peer, quorum, frame):
    rows = []
    with mock.patch.object(self, "send", lambda to, message: rows.append(message)):
        right(self, peer, quorum, frame)
    for message in (rows.pop(), *rows):
        self.send(peer, message)


def _entry_is_kept(table: str):
    """Return a bug: a new connection of a replica does not replace the replica's entry in an attribute of Dispatch."""

    def kept(right):
        def welcome(self, now, peer, message):
            entries, replica = getattr(self, table), message["replica"]
            previous = entries.get(replica)
            right(self, now, peer, message)
            if previous is not None:
                entries[replica] = previous

        return welcome

    return kept


@plant("does not learn the last quorum from its clients", Dispatch, "_welcome")
def _last_quorum_is_not_read(right, self, now, peer, message):
    right(self, now, peer, {**message, "last": None})


@plant("does not count heartbeats", Dispatch, "take")
def _beats_do_not_count(right, self, now, peer, message):
    heard_at = self.state.of(peer.replica).heard_at if peer.replica is not None else None
    right(self, now, peer, message)
    if heard_at is not None and message["kind"] == "beat":
        self.state.of(peer.replica).heard_at = heard_at


@plant("does not answer the last member", Dispatch, "publish")
def _reports_are_answered_in_part(right, self, now, decision):
    last = self._leaders.get(decision.to[-1]) if decision.quorum is not None and len(decision.to) > 1 else None
    with mock.patch.object(self, "send", lambda to, message: to is last or type(self).send(self, to, message)):
        right(self, now, decision)


@plant("goes on beside a later server", Dispatch, "_is_succeeded")
def _no_later_server(right, self):
    return False


@plant("stays in its term", Dispatch, "_raise_term")
def _own_term_suffices(right, self):
    return True


@plant("forgets that the last step is done", Dispatch, "turn")
def _end_is_not_kept(right, self, now):
    with mock.patch.object(self, "keep_lease", lambda: self.world.keep_lease(self, self.state.term, None)):
        return right(self, now)


# --- decisions and replicas -------------------------------------------------------------------------------------------


@plant("ignores the lineage", decide, "_quorum")
def _steps_alone_count(right, state, chosen, excluded):
    found = right(state, chosen, excluded)
    healthy = tuple(n for n, r in sorted(chosen.items()) if r.next_step == found.step and r.state != NO_STATE)
    if not healthy:
        return found
    return replace(found, healthy=healthy, behind=tuple(sorted(chosen.keys() - set(healthy))))


@plant("numbers quorums anew after a restart of the server", decide, "_quorum")
def _numbers_begin_anew(right, state, chosen, excluded):
    found = right(state, chosen, excluded)
    state.planted = getattr(state, "planted", 0) + 1
    return replace(found, number=state.planted)


@plant("loads a checkpoint as soon as one has no state", decide, "_quorum")
def _one_without_state_is_enough(right, state, chosen, excluded):
    found = right(state, chosen, excluded)
    return replace(found, load=any(report.state == NO_STATE for report in chosen.values()))


@plant("one rank ignores the vote", Steps, "vote")
async def _one_rank_ignores_the_vote(right, self):
    try:
        await right(self)
    except Retry:
        if self._rank.failure[0] or self._rank.index != self._rank.world.shape.ranks - 1:
            raise


@plant("each rank goes on with what it has fetched", Steps, "caught_up")
async def _each_adopts_what_it_has(right, self):
    problem = await self._rank.fetched()
    has_all = await self._rank.all_agree(not problem)
    if not problem:
        self._rank.adopt()
        self.has_state = True
    if not has_all:
        raise Retry("planted")


@plant("catches up without waiting for the fetch", Steps, "caught_up")
async def _without_the_fetch(right, self):
    self.has_state = True


@plant("fetches over the state that it claims", Steps, "catching_up")
async def _over_the_claimed_state(right, self):
    await self._rank.fetch(self.agreed, self.quorum, False)


@plant("claims a state while it fetches it", Steps, "catching_up")
async def _claims_what_it_fetches(right, self):
    await right(self)
    self.has_state = True


@plant("serves a state while the optimizer changes it", Steps, "_end_offer")
async def _offer_stays(right, self):
    pass


@plant("never waits for who fetches", Steps, "_end_offer")
async def _offer_ends_at_once(right, self):
    await self._rank.withdraw(0.0)


@plant("goes on in its samples after a failed step", Steps, "_begin_anew")
async def _old_position(right, self, retry):
    self._rank.restore = lambda: None
    await right(self, retry)


@plant("keeps the old model after a fetch", Steps, "_begin_anew")
async def _old_model(right, self, retry):
    self._rank.publish = lambda: None
    await right(self, retry)


@plant("keeps the old model if the update is skipped", Steps, "updated")
def _old_model_after_a_skipped_update(right, self, is_applied):
    return right(self, True)


@plant("advances the positions of those behind", Steps, "updated")
def _advances_all(right, self, is_applied):
    self._rank.advance(replace(self.quorum, healthy=self.quorum.members, behind=()))


@plant("keeps the lineage of the step before", Steps, "updated")
def _old_lineage(right, self, is_applied):
    self._rank.advance(replace(self.quorum, number=self._rank.state[1]))


@plant("contributes gradients while it is behind", Steps, "begins")
async def _computes_though_behind(right, self):
    await right(self)
    return True


@plant("does not ask again after a failed step", Steps, "_ask")
def _asks_once_for_a_step(right, self, is_last=False):
    if self.agreed.step is None or self.agreed.step.step != self._rank.state[0] or is_last:
        right(self, is_last)


@plant("uses the ring of an old quorum again", protocol, "is_same_ring")
def _same_members_same_ring(right, last, quorum):
    return last is not None and last.members == quorum.members


@plant("gives its gradients to a step of the others", QuorumMembership, "join")
def _gives_though_left_out(right, self, question, agreed):
    return right(self, replace(question, is_sure=False), agreed)


@plant("does not offer a new state", Steps, "committed")
async def _old_offer_stays(right, self):
    with mock.patch.object(self._rank, "offer", lambda: None):
        await right(self)


@plant("computes at once after a failed step", Steps, "_begin_anew")
async def _sure_after_a_failure(right, self, retry):
    await right(self, retry)
    self._is_sure = self.has_state


@plant("keeps a state that differs", exchange, "compare")
def _nobody_is_stale(right, rows, place):
    return replace(right(rows, place), is_stale=False)


@plant("leaves before the last checkpoint is there", Steps, "leaves")
async def _leaves_at_once(right, self, is_saved):
    return False


PLANTS += (
    Mutant("keeps the addresses of an earlier life", Dispatch, "_welcome", _entry_is_kept("_rows")),
    Mutant("answers on a leader's first connection", Dispatch, "_welcome", _entry_is_kept("_leaders")),
    Mutant("an estimate has the name of the exact state", values, "estimated", lambda _: lambda lineage, *__: lineage),
    Mutant("two estimates have one name", values, "estimated", lambda right: lambda lineage, *_: right(lineage, 0, 0)),
    Mutant("forgets how far a repaired replica is", reactions, "hello", lambda right: lambda *given: right(*given[:5])),
    Mutant(
        "a repaired replica leaves before the last checkpoint",
        Steps,
        "__init__",
        lambda right: lambda self, *given: right(self, *given[:6]),
    ),
    Mutant("does not wait for one that is further", decide, "_further", lambda right: lambda *arguments: ()),
    Mutant("does not wait for one that saves", reactions, "aside", lambda right: lambda *arguments: None),
    Mutant("leaves nobody out", decide, "judge", lambda right: lambda *arguments: {}),
    Mutant("waits in a ring without a deadline", RingLimits, "wait", lambda right: lambda *_, **__: 1e9),
    Mutant("forgets those who have caught up", decide, "_most_steps", lambda right: lambda s, n: s.of(n).steps),
)
