"""Peer copies by failure domain: who holds what, after a start and after a swap. Random cases print their seed."""

import itertools
import random
from collections import Counter

import pytest

from ft.state.placement.assign import find_problems, place, spans


def grid(tp: int, dp: int, pp: int, gpus: int, nodes_per_rack: int = 1, pipeline_first: bool = False):
    """(where, groups) of a regular cluster; pipeline_first: --use-tp-pp-dp-mapping."""
    where = {r: {"node": f"n{r // gpus}", "rack": f"r{r // gpus // nodes_per_rack}"} for r in range(tp * dp * pp)}
    step, stage = (tp * pp, tp) if pipeline_first else (tp, tp * dp)
    return where, [[t + step * d + stage * p for d in range(dp)] for p in range(pp) for t in range(tp)]


def shared(where, ranks) -> int:
    """Pairs of ranks in one failure domain, counted for each kind."""
    return sum(
        where[a].get(kind) == name for a, b in itertools.combinations(ranks, 2) for kind, name in where[b].items()
    )


def loads(holders) -> Counter:
    return Counter(holder for held in holders.values() for holder in held)


def moved(before, after) -> int:
    return sum(holder not in before[owner] for owner, held in after.items() for holder in held)


def check(where, groups, k, holders):
    """What holds for every placement."""
    assert sorted(holders) == sorted(where)
    for owner, held in holders.items():
        assert len(set(held)) == len(held) == min(k, len(where) - 1) and owner not in held


def test_where_all_nodes_hold_one_rank_of_each_group_the_ring_stays():
    where, groups = grid(tp=2, dp=4, pp=2, gpus=4, pipeline_first=True)
    for k in (1, 2, 3):
        holders = place(where, groups, k)
        for group in groups:
            for i, rank in enumerate(group):
                assert holders[rank] == [group[(i + d) % 4] for d in range(1, k + 1)]


def test_on_one_node_the_ring_stays_and_it_is_said_what_that_means():
    where, groups = grid(tp=1, dp=4, pp=2, gpus=8)
    holders = place(where, groups, 1)
    assert holders == {r: [r // 4 * 4 + (r + 1) % 4] for r in range(8)}
    (problem,) = find_problems(where, groups, 1, holders)
    assert "0-7" in problem and "node n0" in problem and "no number of copies" in problem


def test_data_parallel_peers_on_one_node_give_their_copies_to_other_nodes():
    where, groups = grid(tp=1, dp=2, pp=2, gpus=2)
    assert groups == [[0, 1], [2, 3]]
    holders = place(where, groups, 1)
    assert all(where[owner]["node"] != where[held[0]]["node"] for owner, held in holders.items())
    assert set(loads(holders).values()) == {1} and not find_problems(where, groups, 1, holders)


def test_a_peer_on_another_node_comes_before_the_ring_neighbour_on_the_same():
    where, groups = grid(tp=1, dp=4, pp=1, gpus=2)
    holders = place(where, groups, 1)
    assert all(where[owner]["node"] != where[held[0]]["node"] for owner, held in holders.items())
    assert set(loads(holders).values()) == {1}


def test_racks_and_power_feeds_that_cut_across_each_other():
    where = {r: {"node": f"n{r}", "rack": f"r{r // 4}", "power": f"p{r % 3}"} for r in range(12)}
    for k in (1, 2):
        holders = place(where, [list(range(12))], k)
        assert not find_problems(where, [list(range(12))], k, holders)
        assert all(not shared(where, [owner, *held]) for owner, held in holders.items())
        assert set(loads(holders).values()) == {k}


def test_what_cannot_be_had_is_said_with_the_number_that_can():
    where, groups = grid(tp=1, dp=8, pp=1, gpus=2, nodes_per_rack=2)  # two racks of two nodes
    holders = place(where, groups, 2)
    problems = find_problems(where, groups, 2, holders)
    assert len(problems) == 2 and all("of their state and its 2 copies 2 are in rack r" in each for each in problems)
    assert "k = 2 asks for 3 failure domains, and workers are in 2 rack(s)" in problems[0]
    assert problems[-1].endswith("(--ft-snapshot-peers 1 can be placed)")
    assert all(len({where[r]["node"] for r in (owner, *held)}) == 3 for owner, held in holders.items())


def test_a_world_that_is_too_small_is_named():
    where, groups = grid(tp=1, dp=2, pp=1, gpus=1)
    holders = place(where, groups, 3)
    assert holders == {0: [1], 1: [0]}
    assert "k = 3 copies need 3 other workers, there are 1" in find_problems(where, groups, 3, holders)[0]


def test_state_that_no_copy_holds_is_lost_with_its_peers():
    where, groups = grid(tp=1, dp=2, pp=2, gpus=2)
    problems = find_problems(where, groups, 1, place(where, groups, 1), incomplete=range(4))
    assert len(problems) == 2 and "0-1" in problems[0] and "only in node n0" in problems[0]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_regular_clusters_are_placed_perfectly(k):
    for tp, dp, pp, gpus, per_rack in [(2, 8, 2, 4, 1), (4, 4, 4, 8, 2), (8, 16, 1, 8, 4), (1, 8, 8, 8, 1)]:
        for pipeline_first in (False, True):
            where, groups = grid(tp, dp, pp, gpus, per_rack, pipeline_first)
            holders = place(where, groups, k)
            check(where, groups, k, holders)
            racks = len({kinds["rack"] for kinds in where.values()})
            if racks > k:
                assert not find_problems(where, groups, k, holders)
                assert set(loads(holders).values()) == {k}


@pytest.mark.parametrize("seed", range(12))
def test_random_clusters_against_all_placements_there_are(seed):
    dice = random.Random(seed)
    size = dice.randint(3, 5)
    nodes = dice.randint(2, size)
    rack_of = {n: f"r{dice.randrange(dice.randint(1, 3))}" for n in range(nodes)}
    where = {r: {"node": f"n{n}", "rack": rack_of[n]} for r in range(size) for n in [dice.randrange(nodes)]}
    groups = [list(range(size))] if dice.random() < 0.5 else [[0, 1], list(range(2, size))]
    k = dice.randint(1, 2)
    holders = place(where, groups, k)
    check(where, groups, k, holders)
    best = least_possible(where, k)
    assert rows_shared(where, holders) == best[0], (where, holders)
    assert max(loads(holders).values()) == best[1], (where, holders)


def rows_shared(where, holders) -> int:
    """Copies too many in some domain, which is what the assignment makes least."""
    excess = 0
    for owner, held in holders.items():
        counts = Counter(item for rank in (owner, *held) for item in where[rank].items())
        excess += sum(count - 1 for count in counts.values())
    return excess


def least_possible(where, k) -> tuple[int, int]:
    """(shared, most copies at one rank) by going through everything."""
    ranks = sorted(where)
    options = [
        [
            (rows_shared(where, {owner: held}), held)
            for held in itertools.combinations([r for r in ranks if r != owner], min(k, len(ranks) - 1))
        ]
        for owner in ranks
    ]
    fewest = [min(cost for cost, _ in each) for each in options]
    best = [[held for cost, held in each if cost == least] for each, least in zip(options, fewest, strict=True)]
    most = min(max(Counter(itertools.chain(*choice)).values()) for choice in itertools.product(*best))
    return sum(fewest), most


@pytest.mark.parametrize("seed", range(8))
def test_the_order_in_which_things_are_told_changes_nothing(seed):
    dice = random.Random(seed)
    where, groups = grid(dice.choice([1, 2]), 4, dice.choice([1, 2]), dice.choice([2, 3, 4]), dice.choice([1, 2]))
    expected = place(where, groups, 2)
    ranks = list(where)
    dice.shuffle(ranks)
    again = {r: dict(reversed(where[r].items())) for r in ranks}
    assert place(again, groups, 2) == expected == place(where, groups, 2)


@pytest.mark.parametrize("seed", range(10))
def test_after_a_swap_the_domains_hold_again_and_no_more_moves_than_has_to(seed):
    """Where the lost node's copies alone can be put elsewhere, nothing else moves; nothing that is right ever does
    when the new node stands where the old one stood."""
    dice = random.Random(seed)
    gpus, racks, k = dice.choice([1, 2]), dice.choice([3, 4]), dice.choice([1, 2])
    where, groups = grid(1, gpus * racks * 2, 1, gpus, nodes_per_rack=2)
    holders = place(where, groups, k)
    victim = dice.choice(sorted({kinds["node"] for kinds in where.values()}))
    old_rack = next(kinds["rack"] for kinds in where.values() if kinds["node"] == victim)

    def swapped(rack):
        return {
            r: {"node": "standby", "rack": rack} if kinds["node"] == victim else kinds for r, kinds in where.items()
        }

    same = swapped(old_rack)
    assert place(same, groups, k, holders) == holders
    other = swapped(dice.choice([f"r{i}" for i in range(racks) if f"r{i}" != old_rack]))
    after = place(other, groups, k, holders)
    check(other, groups, k, after)
    # Racks of unequal size may leave no even way; that is all there is to say.
    assert all("of unequal size" in problem for problem in find_problems(other, groups, k, after))
    wrong = sum(
        not {item for rank in (owner, *held[:i]) for item in other[rank].items()}.isdisjoint(other[holder].items())
        for owner, held in holders.items()
        for i, holder in enumerate(held)
    )
    assert wrong <= moved(holders, after) <= 2 * wrong
    assert place(other, groups, k, after) == after


def test_copies_come_back_to_data_parallel_peers_when_those_are_apart_again():
    where, groups = grid(tp=1, dp=2, pp=2, gpus=2)
    away = place(where, groups, 1)
    spread = {0: {"node": "n0"}, 1: {"node": "n1"}, 2: {"node": "n0"}, 3: {"node": "n1"}}
    assert place(spread, groups, 1, away) == {0: [1], 1: [0], 2: [3], 3: [2]}


def test_4096_ranks_whose_peers_share_a_node():
    where, groups = grid(tp=2, dp=4, pp=512, gpus=8, nodes_per_rack=16)
    holders = place(where, groups, 2)
    assert not find_problems(where, groups, 2, holders)
    assert set(loads(holders).values()) == {2}


def test_spans():
    assert spans([3, 0, 1, 2, 7]) == "0-3, 7" and spans([]) == ""
