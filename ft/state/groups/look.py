"""What the process groups of this worker know of the operations of training at one moment, for ``ft.faults.hang``."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ft.faults.hang.look import Departure, Operation, operation_name
from ft.net.codec import Numbers
from ft.state.groups.device import DEVICE
from ft.state.groups.group import Group
from ft.state.groups.history import Entry
from ft.state.groups.state import EpochState
from ft.state.groups.work import GroupWork, Message, Opaque


@dataclass(frozen=True)
class GroupsLook:
    """What is known of the operations of training at one moment.

    Attributes:
        members: name of a group -> logical ranks of its members.
        counts: number of operations that this worker has started, by channel (``ft.faults.hang.look.channel``).
        operations: those that have not ended, and the last one of each channel; and collectives in which other threads
            are blocked.
        departure: how the present step differs from the one before.
        blocked: whether the training thread waits in an operation, for the connection of a group, or for a thread that
            does.
    """

    members: Mapping[str, Numbers]
    counts: Mapping[str, int]
    operations: tuple[Operation, ...]
    departure: Departure | None
    blocked: bool


def look(groups: Sequence[Group], state: EpochState, threads: Collection[str] = ()) -> GroupsLook:
    """Return what these groups know. Safe from any thread.

    Args:
        groups: the groups.
        state: their state.
        threads: names of other threads that the training thread waits for.
    """
    counts: dict[str, int] = {}
    for group in groups:
        counts |= group.counts()
    labels = {group.group_name: group.label for group in groups}
    marked = {(labels.get(name, name), began) for name, began in DEVICE.marked()}
    waiting = state.waiting
    awaited = {*threads, *(() if waiting is None else (f"ft-tree-{waiting[0]}",))}
    besides = dict(state.besides)
    works = [state.awaited, *(work for name, work in besides.items() if name in awaited)]

    def status(entry: Entry) -> tuple[bool, bool]:
        work = entry.work()
        if work is None:  # nobody keeps it; an operation without a work is known by its mark
            done = (entry.group, entry.began) not in marked
            return done, not done
        # gloo tells only the thread that waits for a message when it has ended.
        done = work.ended if work.on_host and isinstance(work, Opaque) else not work.keeps_training()
        return done, not done and (any(work is one for one in works) or not work.on_host)

    members = {group.label: Numbers(group.ranks) for group in groups}
    others = [
        _beside(work, name in awaited)
        for name, work in besides.items()
        if work.sequence and not isinstance(work, Message)
    ]
    operations = (*state.history.operations(status), *others)
    blocked = waiting is not None or bool(threads)
    return GroupsLook(members, counts, operations, state.history.departure(), blocked)


def _beside(work: GroupWork, is_awaited: bool) -> Operation:
    """Return the operation, a collective, in which a thread beside training is blocked."""
    age_s = round(time.monotonic() - work.began, 3)
    name, group = operation_name(work.operation), work.group.label
    return Operation(group, name, work.sequence, awaited=is_awaited, age_s=age_s)
