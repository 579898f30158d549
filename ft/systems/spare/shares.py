"""What the groups of SPARe compute in a step, and which group adds the gradients of which shard type to the sum.

A type may be computed by several groups. If groups are lost during the step, a type needs a patch compute only if no
survivor has computed it (SPARe, section 3.2). The trainer decides by :func:`patches` and
:func:`rearrange`. The functions are pure, and every group calls them with the same arguments.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from ft.systems.spare.controller import Controller


class Patches(NamedTuple):
    """The shards that groups compute in a step in addition to their stacks ("patch computes" in SPARe's paper).

    Attributes:
        groups: shard type -> group that computes it.
        adopted: those of the types of which no host is alive (a wipe-out).
    """

    groups: dict[int, int]
    adopted: tuple[int, ...]

    def depth(self, done: Mapping[int, int] | None = None) -> int:
        """Return the number of stacks that the patch computes take: the largest number of types of one group.

        Args:
            done: type -> group of patch computes that are complete and are not counted.
        """
        done = done or {}
        counts = Counter(group for kind, group in self.groups.items() if done.get(kind) != group)
        return max(counts.values(), default=0)


@dataclass(frozen=True)
class Shares:
    """The division of one step.

    Attributes:
        computes: group -> the types that it computes: the first S of its stack, then patch computes. Groups that
            compute nothing are included.
        adds: group -> the types whose gradients it adds to the sum, in the same order. Every type is added once.
        patch: types that are in the first S positions of no group that is present.
        adopted: types among them of which no host is present. They are computed by the groups with the least to do.
    """

    computes: Mapping[int, tuple[int, ...]]
    adds: Mapping[int, tuple[int, ...]]
    patch: tuple[int, ...] = ()
    adopted: tuple[int, ...] = ()

    @property
    def owners(self) -> tuple[int, ...]:
        """Return the group that adds the gradients of each type, indexed by type."""
        by = {kind: group for group, types in self.adds.items() for kind in types}
        return tuple(by[kind] for kind in sorted(by))

    @property
    def most(self) -> int:
        """Return the largest number of types that one group computes."""
        return max((len(types) for types in self.computes.values()), default=0)

    def added_to(self, planned: "Shares") -> tuple[int, ...]:
        """Return the types that groups must compute in addition to what they compute by ``planned``, ascending."""
        owners = enumerate(self.owners)
        return tuple(kind for kind, group in owners if kind not in planned.computes.get(group, ()))

    def moved_from(self, planned: "Shares") -> tuple[int, ...]:
        """Return the types that another group adds than by ``planned``, ascending."""
        pairs = zip(self.owners, planned.owners, strict=True)
        return tuple(kind for kind, (group, before) in enumerate(pairs) if group != before)


def patches(controller: Controller, absent: Collection[int], able: Set[int]) -> Patches:
    """Return which types need a patch compute, and who computes them.

    A type goes to the host that has it at the smallest position of its stack. So if further groups are lost, the types
    of the others stay where they are computed already. Types without a host go to the groups with the fewest patch
    computes.

    Args:
        absent: groups that the controller counts as alive, and that are not present.
    """
    found: dict[int, int] = {}
    hostless = []
    for kind in controller.missing(absent):
        hosts = [group for group in controller.placement.hosts(kind) if group in able]
        if hosts:
            found[kind] = min(hosts, key=lambda group: (controller.order(group).index(kind), group))
        else:
            hostless.append(kind)
    load = Counter(found.values())
    for kind in hostless:
        found[kind] = min(able, key=lambda group: (load[group], group))
        load[found[kind]] += 1
    return Patches(found, tuple(hostless))


def divide(controller: Controller, planned: Collection[int], here: Collection[int]) -> Shares:
    """Divide the types of a step among the groups in ``here``.

    Of the groups that compute a type, the one that has it earliest in its stack adds its gradients. Only planned groups
    compute, so that what they have begun to compute stays useful if another group comes back during the step.

    Args:
        controller: the stacks by which the step was planned.
    """
    alive = _alive(controller)
    able = sorted(set(planned) & set(here)) or sorted(here)
    first = {group: controller.order(group)[: controller.stack] if group in alive else () for group in able}
    owners: dict[int, int] = {}
    for position in range(controller.stack):
        for group in able:
            if group in alive:
                owners.setdefault(first[group][position], group)
    extra = patches(controller, alive.difference(able), set(able))
    owners.update(extra.groups)
    computes = {group: list(first.get(group, ())) for group in sorted({*able, *here})}
    for kind, group in extra.groups.items():
        computes[group].append(kind)
    adds = {group: tuple(kind for kind in types if owners[kind] == group) for group, types in computes.items()}
    whole = {group: tuple(types) for group, types in computes.items()}
    return Shares(whole, adds, tuple(sorted(extra.groups)), extra.adopted)


def rearrange(controller: Controller, healthy: Iterable[int]) -> tuple[int, ...]:
    """Update the controller after a committed step: remove lost groups, and add groups that have returned.

    The result depends only on the controller's state and ``healthy``, so it is equal on all groups. A group that has
    returned is added only after it has contributed gradients. Otherwise every step during which it still fetches its
    state would need two attempts.

    Returns:
        Groups that are lost, and that the controller still counts as alive, because without them some type would have
        no host. ``healthy`` without them are the groups with which the next step is planned.

    Raises:
        UserError: a member of ``healthy`` is not a group.
    """
    alive, healthy = _alive(controller), set(healthy)
    if len(healthy) == controller.groups:
        if len(alive) < controller.groups or controller.stack > 1:
            controller.reset()
        return ()
    for group in sorted(healthy - alive):
        controller.bring_back(group)
    lost = sorted(alive - healthy)
    if not lost or not controller.lose(lost).wipe_out:
        return ()
    return tuple(group for group in lost if controller.lose([group]).wipe_out)


def _alive(controller: Controller) -> set[int]:
    return set(numpy.flatnonzero(controller.alive).tolist())
