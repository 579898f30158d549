"""Mutation test: known bugs to inject, each of which the simulation must find.

A bug is injected into the production code of the quorum server (more of them in ``server_mutants``) or of the
replicas' protocol.
"""

from dataclasses import replace
from unittest import mock

from ft.job.quorum import blame, decide, reactions, values
from ft.job.quorum.values import NO_STATE
from ft.job.replicas.deadlines import RingLimits
from ft.systems.hsdp import exchange as equality
from ft.systems.hsdp import protocol
from ft.systems.hsdp.protocol import Membership, Retry, Steps
from tests.simulation.hsdp import server_mutants
from tests.simulation.mutation import Replaced, find_in


def _steps_alone_count(right):
    def quorum(state, chosen, excluded):
        found = right(state, chosen, excluded)
        healthy = tuple(n for n, r in sorted(chosen.items()) if r.next_step == found.step and r.state != NO_STATE)
        if not healthy:
            return found
        return replace(found, healthy=healthy, behind=tuple(sorted(chosen.keys() - set(healthy))))

    return quorum


def _numbers_begin_anew(right):
    def quorum(state, chosen, excluded):
        found = right(state, chosen, excluded)
        state.planted = getattr(state, "planted", 0) + 1
        return replace(found, number=state.planted)

    return quorum


def _one_without_state_is_enough(right):
    def quorum(state, chosen, excluded):
        found = right(state, chosen, excluded)
        return replace(found, load=any(report.state == NO_STATE for report in chosen.values()))

    return quorum


def _one_rank_ignores_the_vote(right):
    async def vote(self):
        try:
            await right(self)
        except Retry:
            if self._rank.failure[0] or self._rank.index != self._rank.world.shape.ranks - 1:
                raise

    return vote


def _each_adopts_what_it_has(right):
    async def caught_up(self):
        problem = await self._rank.fetched()
        has_all = await self._rank.all_agree(not problem)
        if not problem:
            self._rank.adopt()
            self.has_state = True
        if not has_all:
            raise Retry("planted")

    return caught_up


def _without_the_fetch(right):
    async def caught_up(self):
        self.has_state = True

    return caught_up


def _over_the_claimed_state(right):
    async def catching_up(self):
        await self._rank.fetch(self.agreed, self.quorum, False)

    return catching_up


def _claims_what_it_fetches(right):
    async def catching_up(self):
        await right(self)
        self.has_state = True

    return catching_up


def _offer_stays(right):
    async def end_offer(self):
        pass

    return end_offer


def _offer_ends_at_once(right):
    async def end_offer(self):
        await self._rank.withdraw(0.0)

    return end_offer


def _old_position(right):
    async def begin_anew(self, retry):
        self._rank.restore = lambda: None
        await right(self, retry)

    return begin_anew


def _old_model(right):
    async def begin_anew(self, retry):
        self._rank.publish = lambda: None
        await right(self, retry)

    return begin_anew


def _old_model_after_a_skipped_update(right):
    return lambda self, is_applied: right(self, True)


def _advances_all(right):
    def updated(self, is_applied):
        self._rank.advance(replace(self.quorum, healthy=self.quorum.members, behind=()))

    return updated


def _old_lineage(right):
    def updated(self, is_applied):
        self._rank.advance(replace(self.quorum, number=self._rank.state[1]))

    return updated


def _computes_though_behind(right):
    async def begins(self):
        await right(self)
        return True

    return begins


def _asks_once_for_a_step(right):
    def ask(self, is_last=False):
        if self.agreed.step is None or self.agreed.step.step != self._rank.state[0] or is_last:
            right(self, is_last)

    return ask


def _same_members_same_ring(right):
    return lambda last, quorum: last is not None and last.members == quorum.members


def _gives_though_left_out(right):
    return lambda self, question, agreed: right(self, replace(question, is_sure=False), agreed)


def _old_offer_stays(right):
    async def committed(self):
        with mock.patch.object(self._rank, "offer", lambda: None):
            await right(self)

    return committed


def _sure_after_a_failure(right):
    async def begin_anew(self, retry):
        await right(self, retry)
        self._is_sure = self.has_state

    return begin_anew


def _nobody_is_stale(right):
    return lambda rows, place: replace(right(rows, place), is_stale=False)


def _leaves_at_once(right):
    async def leaves(self, is_saved):
        return False

    return leaves


PLANTS = (
    Replaced("ignores the lineage", decide, "_quorum", _steps_alone_count),
    Replaced(
        "an estimate has the name of the exact state", values, "estimated", lambda _: lambda lineage, *__: lineage
    ),
    Replaced(
        "two estimates have one name", values, "estimated", lambda right: lambda lineage, *_: right(lineage, 0, 0)
    ),
    Replaced("forgets how far a mended replica is", reactions, "hello", lambda right: lambda *given: right(*given[:5])),
    Replaced(
        "a mended replica leaves before the last checkpoint",
        Steps,
        "__init__",
        lambda right: lambda self, *given: right(self, *given[:6]),
    ),
    Replaced("numbers quorums anew after a restart of the server", decide, "_quorum", _numbers_begin_anew),
    Replaced("does not wait for one that is further", decide, "_further", lambda right: lambda *arguments: ()),
    Replaced("does not wait for one that saves", reactions, "aside", lambda right: lambda *arguments: None),
    Replaced("leaves nobody out", blame, "judge", lambda right: lambda *arguments: {}),
    Replaced("loads a checkpoint as soon as one has no state", decide, "_quorum", _one_without_state_is_enough),
    Replaced("one rank ignores the vote", Steps, "vote", _one_rank_ignores_the_vote),
    Replaced("each rank goes on with what it has fetched", Steps, "caught_up", _each_adopts_what_it_has),
    Replaced("catches up without waiting for the fetch", Steps, "caught_up", _without_the_fetch),
    Replaced("fetches over the state that it claims", Steps, "catching_up", _over_the_claimed_state),
    Replaced("claims a state while it fetches it", Steps, "catching_up", _claims_what_it_fetches),
    Replaced("serves a state while the optimizer changes it", Steps, "_end_offer", _offer_stays),
    Replaced("never waits for who fetches", Steps, "_end_offer", _offer_ends_at_once),
    Replaced("goes on in its samples after a failed step", Steps, "_begin_anew", _old_position),
    Replaced("keeps the old model after a fetch", Steps, "_begin_anew", _old_model),
    Replaced("keeps the old model if the update is skipped", Steps, "updated", _old_model_after_a_skipped_update),
    Replaced("advances the positions of those behind", Steps, "updated", _advances_all),
    Replaced("keeps the lineage of the step before", Steps, "updated", _old_lineage),
    Replaced("contributes gradients while it is behind", Steps, "begins", _computes_though_behind),
    Replaced("does not ask again after a failed step", Steps, "_ask", _asks_once_for_a_step),
    Replaced("uses the ring of an old quorum again", protocol, "is_same_ring", _same_members_same_ring),
    Replaced("gives its gradients to a step of the others", Membership, "join", _gives_though_left_out),
    Replaced("leaves before the last checkpoint is there", Steps, "leaves", _leaves_at_once),
    Replaced("waits in a ring without a deadline", RingLimits, "wait", lambda right: lambda *_, **__: 1e9),
    Replaced("does not offer a new state", Steps, "committed", _old_offer_stays),
    Replaced("computes at once after a failed step", Steps, "_begin_anew", _sure_after_a_failure),
    Replaced("keeps a state that differs", equality, "compare", _nobody_is_stale),
    Replaced("forgets those who have caught up", decide, "_most_steps", lambda right: lambda s, n: s.of(n).steps),
    *server_mutants.PLANTS,
)


def find(name: str) -> list[Replaced]:
    """Return the planted bugs with the title ``name``, or all of them for "all". See :func:`find_in`."""
    return find_in(PLANTS, name)
