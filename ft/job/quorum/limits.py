"""Timeouts of the quorum server and its clients, in one table with a check of their order."""

from dataclasses import dataclass, replace
from functools import lru_cache

from ft.base import timeout_order


@dataclass(frozen=True)
class Limits:
    """Timeouts of the quorum, in seconds; :meth:`calibrated` adds multiples of the step time to some of them.

    Attributes:
        lost_s: how long a replica whose connection broke may take to reconnect before the others continue without it.
        wait_s: how long the others wait for a connected replica that is about to report for the first time; counted
            once for each arrival.
        arrive_s: how long the others wait for a replica whose processes have started. ``--ft-hsdp-wait`` sets this
            limit and wait_s; FT-HSDP, section 6.1, describes the trade-off.
        blamed_s: how long to wait for a member that has not reported and that another member could not reach in its
            ring; one step time is added.
        beat_s: interval between heartbeats of a client's thread.
        silent_s: how long to wait for a member that sends no heartbeat.
        contact_s: time without any answer after which a client looks for another server.
        regress_s: how long to wait for a replica that may be alive and has committed more steps than all that reported;
            a quorum without this replica would repeat those steps.
        member_s: how long to wait, after the first report, for a slower live member of the last quorum; three step
            times are added.
        aside_s: how long to wait for a member that has announced work other than a step, such as a checkpoint or an
            evaluation.
        repair_s: how long to wait for a replica that replaces a lost worker and keeps its state.
        back_s: how long a server that replaced another one waits for members of the last quorum to reconnect.
        away_s: how long a client looks for a server before its request fails.
        start_s: how long to wait for all replicas at the beginning of the run; also used in place of member_s while no
            step time is known.
        load_s: how long to wait for members that load a checkpoint.
        stall_s: how long replicas that want to join wait while all members of the last quorum are training; ten step
            times are added.
        minimum_s: how long replicas wait while there are fewer than the minimum, before the server refuses them.
        ban_s: length of the first exclusion of a replica that others cannot reach; it doubles with each repetition.
            Five step times are added.
        ban_most_s: maximum length of an exclusion.
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
    repair_s: float = 60.0
    back_s: float = 5.0
    away_s: float = 120.0
    start_s: float = 600.0
    load_s: float = 900.0
    stall_s: float = 600.0
    minimum_s: float = 1800.0
    ban_s: float = 10.0
    ban_most_s: float = 600.0

    def check(self) -> "Limits":
        """Check the limits and return them.

        Raises:
            UserError: a limit is not a positive number, or is not longer than the limits that must run out before it.
        """
        timeout_order.check(self, "limit", _ORDER, _MAY_BE_ZERO)
        return self

    def calibrated(self, step_s: float | None) -> "Limits":
        """Return the limits, with multiples of the step time added to those that depend on it.

        ``step_s`` is the usual step time in seconds, or None before the first step.
        """
        return _calibrated(self, step_s)


@lru_cache(maxsize=16)  # a server asks for the same limits at every message of a step
def _calibrated(limits: Limits, step_s: float | None) -> Limits:
    if step_s is None:
        return replace(limits, member_s=limits.start_s)
    return replace(
        limits,
        blamed_s=limits.blamed_s + step_s,
        member_s=limits.member_s + 3.0 * step_s,
        stall_s=limits.stall_s + 10.0 * step_s,
        ban_s=limits.ban_s + 5.0 * step_s,
    )


_MAY_BE_ZERO = ("wait_s", "arrive_s", "lost_s")
"""Limits for which 0 (no waiting) is allowed."""
_ORDER = (
    ("lost_s", "silent_s"),
    ("lost_s", "blamed_s"),
    ("beat_s", "contact_s"),
    ("beat_s", "silent_s"),
    ("blamed_s", "member_s"),
    ("silent_s", "aside_s"),
    ("member_s", "aside_s"),
    ("lost_s", "repair_s"),
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
"""Pairs (shorter, longer) of limits: the first has to expire before the second."""
