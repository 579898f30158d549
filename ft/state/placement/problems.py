"""Describes in words what a placement of peer copies does not achieve: which ranks share which failure domain."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ft.platform.slurm import NODE
from ft.show.text import spans
from ft.state.placement.assign import Holders, place

Where = Mapping[int, Mapping[str, str]]
"""Logical rank -> kind of failure domain (such as "rack") -> name of the rank's domain. One of the kinds is "node"."""


def find_problems(
    where: Where, groups: Sequence[Sequence[int]], k: int, holders: Holders, incomplete: Collection[int] = ()
) -> list[str]:
    """Return one sentence for each problem.

    There is no problem if each state and its ``k`` copies are in ``k + 1`` failure domains and all ranks hold equally
    many copies.

    Args:
        where: the failure domains of every logical rank.
        groups: data-parallel groups, each in ring order.
        k: number of copies of each rank's state.
        holders: the placement, as returned by :func:`ft.state.placement.assign.place`.
        incomplete: ranks whose peer copies lack the part of the state that is the same on all data-parallel peers;
            such a part is restored from one of these peers.
    """
    shared: dict[tuple[str, str, int], list[int]] = {}
    for owner, (kind, domain, count) in _worst_of_all(holders, where).items():
        if count > 1:
            shared.setdefault((kind, domain, count), []).append(owner)
    sentences = _too_few(holders, k)
    best = _best_k(where, groups, k) if shared else k
    for (kind, domain, count), owners in sorted(shared.items(), key=lambda item: item[1]):
        copies = len(holders[owners[0]])
        what = f"logical rank(s) {spans(owners)}: "
        if count == copies + 1:
            what += f"their state and {_all(copies)} of it are in {kind} {domain}, whose loss ends in a warm restart"
        else:
            what += f"of their state and its {copies} copies {count} are in {kind} {domain}"
        there = len({kinds[kind] for kinds in where.values() if kind in kinds})
        sentences.append(f"{what}; k = {k} asks for {k + 1} failure domains, and workers are in {there} {kind}(s)")
    if shared:
        works = f"--ft-snapshot-peers {best} can be placed" if best else "no number of copies can be placed better"
        sentences[-1] += f" ({works})"
    return sentences + _too_many(holders, k) + _lost_with_their_peers(where, groups, incomplete)


def _all(copies: int) -> str:
    return "the only copy" if copies == 1 else f"all {copies} copies"


def _worst_of_all(holders: Holders, where: Where) -> dict[int, tuple[str, str, int]]:
    """Return :func:`_worst` for every owner with its holders. Equal sets of domains are computed only once."""
    number: dict[tuple[tuple[str, str], ...], int] = {}
    place_of = {rank: number.setdefault(tuple(kinds.items()), len(number)) for rank, kinds in where.items()}
    known: dict[tuple[int, ...], tuple[str, str, int]] = {}
    found = {}
    for owner in sorted(holders):
        ranks = (owner, *holders[owner])
        places = tuple([place_of[rank] for rank in ranks])
        if places not in known:
            known[places] = _worst(ranks, owner, where)
        found[owner] = known[places]
    return found


def _worst(ranks: Sequence[int], owner: int, where: Where) -> tuple[str, str, int]:
    """Return (kind, domain, count) of the failure domain that has most of ``ranks``.

    Among domains with equal counts, a node comes first, then the kinds in the order of ``where[owner]``.
    """
    worst = ("", "", 0)
    for kind in [NODE, *(kind for kind in where[owner] if kind != NODE)]:
        names = [where[rank][kind] for rank in ranks if kind in where[rank]]
        for name in dict.fromkeys(names):
            if names.count(name) > worst[2]:
                worst = (kind, name, names.count(name))
    return worst


def _too_few(holders: Holders, k: int) -> list[str]:
    short = [owner for owner, held in holders.items() if len(held) < k]
    if not short:
        return []
    least = min(len(holders[owner]) for owner in short)
    return [
        f"logical rank(s) {spans(short)}: k = {k} copies need {k} other workers, there are {least} "
        f"(--ft-snapshot-peers {least} can be placed)"
    ]


def _too_many(holders: Holders, k: int) -> list[str]:
    load = Counter(holder for held in holders.values() for holder in held)
    full = [rank for rank, count in load.items() if count > k]
    if not full:
        return []
    most = max(load.values())
    return [
        f"logical rank(s) {spans(full)} hold up to {most} copies, {k} each would be even: failure domains are of "
        "unequal size, and there is no other way to keep copies apart"
    ]


def _best_k(where: Where, groups: Sequence[Sequence[int]], k: int) -> int:
    """Return the largest number of copies below ``k`` for which no domain is shared; 0 if there is none."""
    for fewer in range(k - 1, 0, -1):
        holders = place(where, groups, fewer)
        if all(count <= 1 for _, _, count in _worst_of_all(holders, where).values()):
            return fewer
    return 0


def _lost_with_their_peers(where: Where, groups: Sequence[Sequence[int]], incomplete: Collection[int]) -> list[str]:
    """Return a sentence for each data-parallel group with incomplete copies that is in a single failure domain."""
    sentences = []
    for group in groups:
        if not set(group) & set(incomplete):
            continue
        for kind in where[group[0]]:
            names = {where[rank].get(kind) for rank in group}
            if len(names) == 1 and names != {None}:
                sentences.append(
                    f"logical rank(s) {spans(group)}: the part of the state that is the same on all of them is only in "
                    f"{kind} {names.pop()}, and no copy holds it "
                    "(--use-distributed-optimizer makes every copy complete)"
                )
                break
    return sentences
