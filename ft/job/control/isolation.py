"""A control plane that hears of few agents may itself be the one that was cut off: it lets the others decide that."""

from collections.abc import Mapping

from ft.job.control.timeouts import Timeouts

_A_MAJORITY = 3
"""Of fewer agents than these, none can outvote the one that the control plane runs beside."""


class Solitude:
    """Tells when to let the lease run out, and when nobody wanted it.

    Attributes:
        yields: the lease is not to be renewed, and nothing is to be decided because of time that passes.
    """

    def __init__(self, timeouts: Timeouts):
        self._timeouts = timeouts
        self._until: float | None = None
        self._missed: frozenset[str] = frozenset()
        self.yields = False

    def look(self, now: float, heard_at: Mapping[str, float]) -> None:
        """Judges anew.

        Most agents have been silent for ``quorum_s``: either they are gone, or this one is cut off from them. If it is
        the latter, one of them takes over once the lease has run out and each before it has let its turn pass. If none
        does, there is nobody: those that are silent are gone, and this one goes on without them.
        """
        quiet = frozenset(node for node, at in heard_at.items() if now - at > self._timeouts.quorum_s)
        if 2 * len(quiet) <= len(heard_at) or len(heard_at) < _A_MAJORITY:
            self.yields, self._until, self._missed = False, None, frozenset()
        elif quiet <= self._missed:
            self.yields = False
        elif self._until is None:
            turns = self._timeouts.turn_s * (len(heard_at) + 1)
            self.yields, self._until = True, now + self._timeouts.lease_s + turns + self._timeouts.contact_s
        elif now > self._until:
            self.yields, self._until, self._missed = False, None, quiet
