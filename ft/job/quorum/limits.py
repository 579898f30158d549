"""Every timeout of the quorum, in one table."""

from dataclasses import dataclass, replace

from ft.base import timeout_order as ladder


@dataclass(frozen=True)
class Limits:
    """All in seconds.

    Attributes:
        lost_s: the connection of a member broke: so long it may be on its way back; then the others go on.
        wait_s: a replica is about to report for the first time: the others wait so long for it, once for each arrival.
        arrive_s: its processes have begun, and it is to report soon (``--ft-hsdp-wait``, as wait_s; the paper's
            trade-off, section 6.1).
        blamed_s: a member that another one's ring could not reach has not reported either; + a step.
        beat_s: between two signs of life of a client's thread. silent_s: without one it is waited for no longer.
        contact_s: without an answer to them a client looks for another server.
        regress_s: of those that may live one has done more steps than all that reported: a quorum without it would
            do its steps again.
        member_s: a live member of the last quorum is slower than the first one to report; + 3 steps.
        aside_s: it has said that it is busy with something else than steps: a checkpoint, an evaluation.
        back_s: a server that was started in the place of another waits so long for members of the last quorum.
        away_s: for so long a client looks for a server before what it asked for fails.
        start_s: for all replicas of the run, at its beginning; and in place of member_s while there is no step time.
        load_s: to load a checkpoint.
        stall_s: all members of the last quorum are at work, for those that wait to join them; + 10 steps.
        minimum_s: there are fewer replicas than the minimum; then those that wait are told so.
        ban_s: a replica that the others cannot reach is left out so long; twice as long each time it happens again.
        ban_most_s: at most so long.
    """

    lost_s: float = 0.1
    wait_s: float = 0.1
    arrive_s: float = 0.0
    blamed_s: float = 0.5
    beat_s: float = 0.25
    silent_s: float = 3.0
    contact_s: float = 2.0
    regress_s: float = 5.0
    member_s: float = 1.0
    aside_s: float = 120.0
    back_s: float = 5.0
    away_s: float = 120.0
    start_s: float = 600.0
    load_s: float = 900.0
    stall_s: float = 600.0
    minimum_s: float = 1800.0
    ban_s: float = 10.0
    ban_most_s: float = 600.0

    def check(self) -> "Limits":
        """Returns itself.

        Raises:
            UserError: one is no positive number, or not longer than those it waits for.
        """
        ladder.check(self, "limit", _LADDER, _MAY_BE_ZERO)
        return self

    def calibrated(self, step_s: float | None) -> "Limits":
        """Those that a step may hold up, longer by what steps take. ``step_s``: None before a step has ended."""
        if step_s is None:
            return replace(self, member_s=self.start_s)
        return replace(
            self,
            blamed_s=self.blamed_s + step_s,
            member_s=self.member_s + 3.0 * step_s,
            stall_s=self.stall_s + 10.0 * step_s,
            ban_s=self.ban_s + 5.0 * step_s,
        )


_MAY_BE_ZERO = ("wait_s", "arrive_s", "lost_s")
_LADDER = (
    ("lost_s", "silent_s"),
    ("lost_s", "blamed_s"),
    ("beat_s", "contact_s"),
    ("beat_s", "silent_s"),
    ("blamed_s", "member_s"),
    ("silent_s", "aside_s"),
    ("member_s", "aside_s"),
    ("silent_s", "regress_s"),
    ("contact_s", "back_s"),
    ("contact_s", "away_s"),
    ("back_s", "away_s"),
    ("member_s", "start_s"),
    ("wait_s", "start_s"),
    ("arrive_s", "start_s"),
    ("aside_s", "stall_s"),
    ("wait_s", "stall_s"),
    ("arrive_s", "stall_s"),
    ("stall_s", "minimum_s"),
    ("start_s", "minimum_s"),
    ("ban_s", "ban_most_s"),
)
