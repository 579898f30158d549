"""Compute the results of ``ft simulate recovery``: the process groups to rebuild, per parallel layout and kind of loss.

A rebuild follows a hot-swap, which replaces lost ranks by standby processes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ft.base.errors import UserError
from ft.lab.simulate.recovery.loss import Decision, Work, decide, everything, work_of
from ft.lab.simulate.recovery.topology import Sizes, groups_of

FULL, RANK, NODE = "full", "least", "node"


@dataclass(frozen=True)
class Rebuild:
    """The groups to rebuild after one kind of loss, as amounts of work.

    Attributes:
        kind: FULL (all groups, whatever was lost), RANK or NODE (the groups that production rebuilds after the loss of
            a rank or of a node).
        most: work if every surviving rank is blocked in an operation.
        least: work if no surviving rank is in an operation.
        deferred: number of groups that are connected only at their first use.
        decision: the production decision behind ``most``; None for FULL, which needs no decision.
        over_all: the part of ``most`` in groups that span all ranks.
    """

    kind: str
    most: Work
    least: Work
    deferred: int
    decision: Decision | None
    over_all: Work


@dataclass(frozen=True)
class Entry:
    """The results of one parallel layout.

    Attributes:
        sizes: the layout.
        groups: number of all groups, including groups of one member.
        rebuilds: the rebuilds, one per kind of loss.
    """

    sizes: Sizes
    groups: int
    rebuilds: list[Rebuild]


def layouts(ranks: Sequence[int], tp: int | None, pp: int | None, dp: int | None, cp: int, ep: int) -> list[Sizes]:
    """Return one layout for each number of ranks; numbers that no layout fits are skipped.

    One of the sizes tp, pp and dp is derived from the number of ranks if it is None: dp first, else pp, else tp.

    Args:
        ranks: numbers of ranks.
        tp: tensor parallel size, or None.
        pp: pipeline parallel size, or None.
        dp: data parallel size, or None.
        cp: context parallel size.
        ep: expert parallel size.

    Raises:
        UserError: no number of ranks fits the sizes.
    """
    found = []
    for count in ranks:
        sizes = _sizes(count, tp, pp, dp, cp, ep)
        if sizes is not None:
            found.append(sizes)
    if not found:
        given = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "ep": ep}
        said = " ".join(f"--{name} {size}" for name, size in given.items() if size is not None)
        counts = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
        raise UserError(
            f"no layout of {counts} ranks has {said}",
            "ranks are tp x cp x pp x dp, and a multiple of tp x ep x pp; remove one of --tp, --pp, --dp",
        )
    return found


def _sizes(ranks: int, tp: int | None, pp: int | None, dp: int | None, cp: int, ep: int) -> Sizes | None:
    if dp is not None and pp is None:
        pp = ranks // ((tp or 1) * cp * dp)
    elif dp is not None and tp is None:
        tp = ranks // ((pp or 1) * cp * dp)
    sizes = Sizes(ranks, tp or 1, pp or 1, cp, ep)
    if min(sizes.tp, sizes.pp, sizes.dp) < 1 or (dp is not None and sizes.dp != dp):
        return None
    try:
        sizes.check()
    except UserError:
        return None
    return sizes


def sweep(found: Iterable[Sizes], ranks_per_node: int, lost: int, experts: bool) -> list[Entry]:
    """Compute the entries of all layouts.

    Args:
        found: the layouts.
        ranks_per_node: number of logical ranks of a node; they are consecutive.
        lost: the logical rank that is lost, alone or with its node; in a layout without this rank, the last rank.
        experts: whether the model is a mixture of experts.
    """
    return [_entry(sizes, ranks_per_node, lost, experts) for sizes in found]


def _entry(sizes: Sizes, ranks_per_node: int, lost: int, experts: bool) -> Entry:
    groups = groups_of(sizes)
    lost = min(lost, sizes.ranks - 1)
    first = lost // ranks_per_node * ranks_per_node
    node = range(first, min(first + ranks_per_node, sizes.ranks))
    full = work_of(groups, everything(groups))
    over_all = [group for group in groups if len(group.ranks) == sizes.ranks]
    rebuilds = [Rebuild(FULL, full, full, 0, None, work_of(over_all, everything(groups)))]
    for kind, gone in ((RANK, [lost]), (NODE, list(node))):
        if len(gone) < sizes.ranks:
            decision = decide(groups, gone, stuck=True, experts=experts)
            idle = decide(groups, gone, stuck=False, experts=experts)
            most, least = work_of(groups, decision.plan.rebuild), work_of(groups, idle.plan.rebuild)
            all_ranks = work_of(over_all, decision.plan.rebuild)
            rebuilds.append(Rebuild(kind, most, least, len(decision.plan.defer), decision, all_ranks))
    return Entry(sizes, len(groups), rebuilds)
