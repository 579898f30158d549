"""What the ranks know of the functions that DMR (SpareTrain) executes twice as a whole, and agree on.

Whether a call is executed once or twice must not differ between ranks, because functions communicate with each other
from within. So each rank notes what it sees, all ranks put their notes together at the end of an iteration, and only
what they have agreed on decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known of a function.

    Attributes:
        is_pure: whether it has never changed anything that it can reach.
        in_forward: paths of what it makes in the forward pass of each activation-checkpointing segment; None: it was
            not called there.
        keeps_more: whether it makes more than that in the recomputation, because gradients are recorded there.
        is_recomputed: whether each recomputation has called the same function at the same place.
    """

    is_pure: bool
    in_forward: frozenset[str] | None
    keeps_more: bool
    is_recomputed: bool

    @property
    def can_wait(self) -> bool:
        """Return whether the recomputation of a segment can be the second execution of the function."""
        return self.is_pure and self.is_recomputed and self.in_forward is not None


@dataclass(slots=True)
class Notes:
    """What one rank has seen of a function. ``changed``: paths of the tensors that it has ever changed; the other
    attributes are those of :class:`Knowledge`."""

    changed: set[str] = field(default_factory=set)
    in_forward: frozenset[str] | None = None
    keeps_more: bool = False
    is_recomputed: bool | None = None

    def made_in_forward(self, paths: Sequence[str]) -> None:
        """Note what a call in the forward pass of a segment has made."""
        self.in_forward = frozenset(paths) if self.in_forward is None else self.in_forward.intersection(paths)

    def made_again(self, paths: Sequence[str]) -> None:
        """Note what a call in the recomputation of a segment has made."""
        self.keeps_more |= self.in_forward is not None and not self.in_forward.issuperset(paths)

    def was_called_again(self, is_same: bool) -> None:
        """Note whether the recomputation has called the same function where the forward pass has called this one."""
        self.is_recomputed = self.is_recomputed is not False and is_same

    def knowledge(self) -> Knowledge:
        return Knowledge(not self.changed, self.in_forward, self.keeps_more, bool(self.is_recomputed))


def agree(told: Sequence[Mapping[str, Knowledge]]) -> dict[str, Knowledge]:
    """Return the knowledge that holds on all ranks, given that of each, by names of functions."""
    agreed: dict[str, Knowledge] = {}
    for of_rank in told:
        for name, one in of_rank.items():
            agreed[name] = _both(agreed[name], one) if name in agreed else one
    return agreed


def _both(one: Knowledge, other: Knowledge) -> Knowledge:
    paths = [known.in_forward for known in (one, other) if known.in_forward is not None]
    return Knowledge(
        one.is_pure and other.is_pure,
        frozenset.intersection(*paths) if paths else None,
        one.keeps_more or other.keeps_more,
        one.is_recomputed and other.is_recomputed,
    )
