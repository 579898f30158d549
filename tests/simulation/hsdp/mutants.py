"""Known bugs in the code of the quorum server and of the replicas' protocol, which the simulation has to find.

Each function here takes the right function of the production code and returns a wrong one (``campaign.Mutant``).
"""

from dataclasses import replace
from unittest import mock

from ft.job.quorum import decide, reactions, values
from ft.job.quorum.dispatch import Dispatch
from ft.job.quorum.values import NO_STATE
from ft.job.replicas.deadlines import RingLimits
from ft.systems.hsdp import exchange, protocol
from ft.systems.hsdp.protocol import Membership, Retry, Steps
from tests.simulation.campaign import Mutant

# --- the quorum server ------------------------------------------------------------------------------------------------


def _first_rows_stay(right):
    def give(self, peer, quorum, frame):
        known = {member: quorum.lives[member] for member in peer.rows if member in quorum.lives}
        peer.rows.update(known)
        right(self, peer, quorum, frame)

    return give


def _rows_follow(right):
    def give(self, peer, quorum, frame):
        rows = []
        with mock.patch.object(self, "send", lambda to, message: rows.append(message)):
            right(self, peer, quorum, frame)
        for message in (rows.pop(), *rows):
            self.send(peer, message)

    return give


def _entry_is_kept(table: str):
    """Return a bug: a new connection of a replica does not replace the replica's entry in an attribute of Dispatch.

    Args:
        table: name of the attribute, a dictionary by replica.
    """

    def kept(right):
        def welcome(self, now, peer, message):
            entries, replica = getattr(self, table), message["replica"]
            previous = entries.get(replica)
            right(self, now, peer, message)
            if previous is not None:
                entries[replica] = previous

        return welcome

    return kept


def _last_quorum_is_not_read(right):
    def welcome(self, now, peer, message):
        right(self, now, peer, {**message, "last": None})

    return welcome


def _beats_do_not_count(right):
    def take(self, now, peer, message):
        heard_at = self.state.of(peer.replica).heard_at if peer.replica is not None else None
        right(self, now, peer, message)
        if heard_at is not None and message["kind"] == "beat":
            self.state.of(peer.replica).heard_at = heard_at

    return take


def _reports_are_answered_in_part(right):
    def publish(self, now, decision):
        last = self._leaders.get(decision.to[-1]) if decision.quorum is not None and len(decision.to) > 1 else None
        with mock.patch.object(self, "send", lambda to, message: to is last or type(self).send(self, to, message)):
            right(self, now, decision)

    return publish


def _no_later_server(right):
    return lambda self: False


def _own_term_suffices(right):
    return lambda self: True


def _end_is_not_kept(right):
    def turn(self, now):
        with mock.patch.object(self, "keep_lease", lambda: self.world.keep_lease(self, self.state.term, None)):
            return right(self, now)

    return turn


SERVER_PLANTS = (
    Mutant("sends the addresses of a replica's first life only", Dispatch, "_give", _first_rows_stay),
    Mutant("sends a quorum before the addresses of its members", Dispatch, "_give", _rows_follow),
    Mutant("keeps the addresses of an earlier life", Dispatch, "_welcome", _entry_is_kept("_rows")),
    Mutant("answers on a leader's first connection", Dispatch, "_welcome", _entry_is_kept("_leaders")),
    Mutant("does not learn the last quorum from its clients", Dispatch, "_welcome", _last_quorum_is_not_read),
    Mutant("does not count heartbeats", Dispatch, "take", _beats_do_not_count),
    Mutant("does not answer the last member", Dispatch, "publish", _reports_are_answered_in_part),
    Mutant("goes on beside a later server", Dispatch, "_is_succeeded", _no_later_server),
    Mutant("stays in its term", Dispatch, "_raise_term", _own_term_suffices),
    Mutant("forgets that the last step is done", Dispatch, "turn", _end_is_not_kept),
)


# --- decisions and replicas -------------------------------------------------------------------------------------------


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
    Mutant("ignores the lineage", decide, "_quorum", _steps_alone_count),
    Mutant("an estimate has the name of the exact state", values, "estimated", lambda _: lambda lineage, *__: lineage),
    Mutant("two estimates have one name", values, "estimated", lambda right: lambda lineage, *_: right(lineage, 0, 0)),
    Mutant("forgets how far a mended replica is", reactions, "hello", lambda right: lambda *given: right(*given[:5])),
    Mutant(
        "a mended replica leaves before the last checkpoint",
        Steps,
        "__init__",
        lambda right: lambda self, *given: right(self, *given[:6]),
    ),
    Mutant("numbers quorums anew after a restart of the server", decide, "_quorum", _numbers_begin_anew),
    Mutant("does not wait for one that is further", decide, "_further", lambda right: lambda *arguments: ()),
    Mutant("does not wait for one that saves", reactions, "aside", lambda right: lambda *arguments: None),
    Mutant("leaves nobody out", decide, "judge", lambda right: lambda *arguments: {}),
    Mutant("loads a checkpoint as soon as one has no state", decide, "_quorum", _one_without_state_is_enough),
    Mutant("one rank ignores the vote", Steps, "vote", _one_rank_ignores_the_vote),
    Mutant("each rank goes on with what it has fetched", Steps, "caught_up", _each_adopts_what_it_has),
    Mutant("catches up without waiting for the fetch", Steps, "caught_up", _without_the_fetch),
    Mutant("fetches over the state that it claims", Steps, "catching_up", _over_the_claimed_state),
    Mutant("claims a state while it fetches it", Steps, "catching_up", _claims_what_it_fetches),
    Mutant("serves a state while the optimizer changes it", Steps, "_end_offer", _offer_stays),
    Mutant("never waits for who fetches", Steps, "_end_offer", _offer_ends_at_once),
    Mutant("goes on in its samples after a failed step", Steps, "_begin_anew", _old_position),
    Mutant("keeps the old model after a fetch", Steps, "_begin_anew", _old_model),
    Mutant("keeps the old model if the update is skipped", Steps, "updated", _old_model_after_a_skipped_update),
    Mutant("advances the positions of those behind", Steps, "updated", _advances_all),
    Mutant("keeps the lineage of the step before", Steps, "updated", _old_lineage),
    Mutant("contributes gradients while it is behind", Steps, "begins", _computes_though_behind),
    Mutant("does not ask again after a failed step", Steps, "_ask", _asks_once_for_a_step),
    Mutant("uses the ring of an old quorum again", protocol, "is_same_ring", _same_members_same_ring),
    Mutant("gives its gradients to a step of the others", Membership, "join", _gives_though_left_out),
    Mutant("leaves before the last checkpoint is there", Steps, "leaves", _leaves_at_once),
    Mutant("waits in a ring without a deadline", RingLimits, "wait", lambda right: lambda *_, **__: 1e9),
    Mutant("does not offer a new state", Steps, "committed", _old_offer_stays),
    Mutant("computes at once after a failed step", Steps, "_begin_anew", _sure_after_a_failure),
    Mutant("keeps a state that differs", exchange, "compare", _nobody_is_stale),
    Mutant("forgets those who have caught up", decide, "_most_steps", lambda right: lambda s, n: s.of(n).steps),
    *SERVER_PLANTS,
)
