"""Divide the shard types of a SPARe step among the groups, so that each type is in the sum of gradients exactly once.

SPARe divides a global batch into N shard types, as many as there are groups (replicas of the model). Each group hosts
several types, in an order that is called its stack. The functions are pure, and every group calls them with the same
arguments.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """The division of one step.

    Attributes:
        types: group -> the shard types that it computes, in the order of its stack; groups without types are included.
        patch: types that another group than planned computes, because the planned one is lost; SPARe, section 3, calls
            this patch compute.
        lost: types that no present group hosts. If there are any (a wipe-out), the step cannot be done.
    """

    types: Mapping[int, tuple[int, ...]]
    patch: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()

    @property
    def owners(self) -> tuple[int, ...]:
        """Return the group that computes each type, indexed by type. Only valid if ``lost`` is empty."""
        by = {kind: group for group, types in self.types.items() for kind in types}
        return tuple(by[kind] for kind in sorted(by))

    @property
    def most(self) -> int:
        """Return the largest number of types that one group computes."""
        return max((len(types) for types in self.types.values()), default=0)


def divide(orders: Sequence[Sequence[int]], stack: int, planned: Collection[int], here: Collection[int]) -> Shares:
    """Divide the types of a step among the groups in ``here``.

    Every type has one owner among the ``planned`` groups: the group that has it earliest in its stack. A type whose
    owner is lost goes to another host: preferably to one that has it among its first S types, and among these to the
    one with the fewest types. If no planned host is present, it goes to a host that has just come back. All other types
    stay with their owners. Therefore a group that has already computed its own types never finds one of them assigned
    to another group.

    Args:
        orders: orders[group][position] is the type at that position of the group's stack, (N, r).
        stack: S, the number of types after which groups take part in the all-reduce.
        planned: groups with which the step was planned.
        here: groups that are present.
    """
    hosts, returned = _hosts(orders, planned), _hosts(orders, set(here) - set(planned))
    own: dict[int, list[int]] = {group: [] for group in sorted(here)}
    orphans, lost = [], []
    for kind in range(len(orders)):
        places = hosts.get(kind, [])
        owner = min(places)[1] if places else None
        if owner in own:
            own[owner].append(kind)
        elif kind in returned or any(group in own for _, group in places):
            orphans.append(kind)
        else:
            lost.append(kind)
    for kind in orphans:
        able = [place for place in hosts.get(kind, []) if place[1] in own] or returned[kind]
        own[min((position >= stack, len(own[group]), position, group) for position, group in able)[-1]].append(kind)
    ordered = {group: tuple(sorted(types, key=list(orders[group]).index)) for group, types in own.items()}
    return Shares(ordered, tuple(orphans), tuple(lost))


def _hosts(orders: Sequence[Sequence[int]], groups: Collection[int]) -> dict[int, list[tuple[int, int]]]:
    """Return type -> [(stack position, group), ...] for all hosts of the type among ``groups``."""
    found: dict[int, list[tuple[int, int]]] = {}
    for group in groups:
        for position, kind in enumerate(orders[group]):
            found.setdefault(kind, []).append((position, group))
    return found
