"""What the process groups of this worker know of the operations of training at one moment, for ``ft.faults.hang``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ft.faults.hang.look import Departure, Operation
from ft.net.codec import Numbers
from ft.state.groups.device import DEVICE
from ft.state.groups.group import Group
from ft.state.groups.history import Entry
from ft.state.groups.state import EpochState
from ft.state.groups.work import Opaque


@dataclass(frozen=True)
class GroupsLook:
    """What is known of the operations of training at one moment.

    Attributes:
        members: name of a group -> logical ranks of its members.
        counts: number of operations that this worker has started, by channel (``ft.faults.hang.look.channel``).
        operations: those that have not ended, and the last one of each channel.
        departure: how the present step differs from the one before.
        blocked: whether the training thread waits in an operation, or for the connection of a group.
    """

    members: Mapping[str, Numbers]
    counts: Mapping[str, int]
    operations: tuple[Operation, ...]
    departure: Departure | None
    blocked: bool


def look(groups: Sequence[Group], state: EpochState) -> GroupsLook:
    """Return what these groups know. Safe from any thread."""
    counts: dict[str, int] = {}
    for group in groups:
        counts |= group.counts()
    labels = {group.group_name: group.label for group in groups}
    marked = {(labels.get(name, name), began) for name, began in DEVICE.marked()}
    blocked = state.waiting is not None

    def status(entry: Entry) -> tuple[bool, bool]:
        work = entry.work()
        if work is None:  # nobody keeps it; an operation without a work is known by its mark
            done = (entry.group, entry.began) not in marked
            return done, not done
        # gloo tells only the thread that waits for a message when it has ended.
        done = work.ended if work.on_host and isinstance(work, Opaque) else not work.keeps_training()
        return done, not done and (work is state.awaited or not work.on_host)

    members = {group.label: Numbers(group.ranks) for group in groups}
    return GroupsLook(members, counts, state.history.operations(status), state.history.departure(), blocked)
