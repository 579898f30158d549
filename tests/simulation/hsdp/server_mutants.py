"""Defines bugs in the quorum server's dispatch (``ft.job.quorum.dispatch``), which the simulation has to find.

Each function here takes the right function and returns a wrong one. Those that replace a generator of acts change the
acts that it yields, or leave some out.
"""

from collections.abc import Callable
from dataclasses import replace

from ft.job.quorum.dispatch import Act, Acts, Dispatch, KeepLease, Peer, Send
from tests.simulation.mutation import Replaced


def _changed(acts: Acts, change: Callable[[Act], Act | None]) -> Acts:
    """Yield what ``change`` makes of each act of a generator, unless that is None; return the generator's result."""
    answer = None
    while True:
        try:
            act = change(acts.send(answer))
        except StopIteration as end:
            return end.value
        answer = None if act is None else (yield act)


def _first_rows_stay(right):
    def give(self, peer, quorum, frame):
        known = {member: quorum.lives[member] for member in peer.rows if member in quorum.lives}
        peer.rows.update(known)
        yield from right(self, peer, quorum, frame)

    return give


def _rows_follow(right):
    def give(self, peer, quorum, frame):
        rows = []
        for act in right(self, peer, quorum, frame):
            if act.frame is frame:
                yield act
            else:
                rows.append(act)
        yield from rows

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
            yield from right(self, now, peer, message)
            if previous is not None:
                entries[replica] = previous

        return welcome

    return kept


def _last_quorum_is_not_read(right):
    def welcome(self, now, peer, message):
        yield from right(self, now, peer, {**message, "last": None})

    return welcome


def _beats_do_not_count(right):
    def take(self, now, peer, message):
        heard_at = self.state.of(peer.replica).heard_at if peer.replica is not None else None
        yield from right(self, now, peer, message)
        if heard_at is not None and message["kind"] == "beat":
            self.state.of(peer.replica).heard_at = heard_at

    return take


def _reports_are_answered_in_part(right):
    def publish(self, now, decision):
        if decision.quorum is None or len(decision.to) == 1:
            yield from right(self, now, decision)
            return
        last = self._leaders.get(decision.to[-1])
        yield from _changed(right(self, now, decision), lambda act: None if _is_to(act, last) else act)

    return publish


def _is_to(act: Act, peer: Peer | None) -> bool:
    return isinstance(act, Send) and act.peer is peer


def _no_later_server(right):
    def is_succeeded(self):
        yield from ()
        return False

    return is_succeeded


def _own_term_suffices(right):
    def raise_term(self):
        yield from ()
        return True

    return raise_term


def _end_is_not_kept(right):
    def turn(self, now):
        return (yield from _changed(right(self, now), _without_end))

    return turn


def _without_end(act: Act) -> Act:
    return replace(act, end=None) if isinstance(act, KeepLease) else act


PLANTS = (
    Replaced("sends the addresses of a replica's first life only", Dispatch, "_give", _first_rows_stay),
    Replaced("sends a quorum before the addresses of its members", Dispatch, "_give", _rows_follow),
    Replaced("keeps the addresses of an earlier life", Dispatch, "_welcome", _entry_is_kept("_rows")),
    Replaced("answers on a leader's first connection", Dispatch, "_welcome", _entry_is_kept("_leaders")),
    Replaced("does not learn the last quorum from its clients", Dispatch, "_welcome", _last_quorum_is_not_read),
    Replaced("does not count heartbeats", Dispatch, "take", _beats_do_not_count),
    Replaced("does not answer the last member", Dispatch, "publish", _reports_are_answered_in_part),
    Replaced("goes on beside a later server", Dispatch, "_is_succeeded", _no_later_server),
    Replaced("stays in its term", Dispatch, "_raise_term", _own_term_suffices),
    Replaced("forgets that the last step is done", Dispatch, "turn", _end_is_not_kept),
)
