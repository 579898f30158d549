"""Peer copies by failure domain: who holds what, after a start and after a swap, in clusters of any size.

Where both can be had, rotations equal what the integer program finds; where only rotations can, they hold what they
promise. Random cases print their seed.
"""

import itertools
import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft.state.placement import assign
from ft.state.placement.assign import find_problems, place
from ft.state.placement.rotate import rotate
from ft.state.placement.solve import Request, solve_best, solve_strictly


def grid(tp: int, dp: int, pp: int, gpus: int, nodes_per_rack: int = 1, pipeline_first: bool = False):
    """(where, groups) of a regular cluster; pipeline_first: --use-tp-pp-dp-mapping."""
    nodes = [{"node": f"n{n}", "rack": f"r{n // nodes_per_rack}"} for n in range(-(-tp * dp * pp // gpus))]
    where = {rank: nodes[rank // gpus] for rank in range(tp * dp * pp)}
    step, stage = (tp * pp, tp) if pipeline_first else (tp, tp * dp)
    return where, [[t + step * d + stage * p for d in range(dp)] for p in range(pp) for t in range(tp)]


def domains_of(where) -> dict:
    return {rank: frozenset(kinds.items()) for rank, kinds in where.items()}


def shared(where, holders) -> int:
    """Copies too many in some domain, which is what the assignment makes least."""
    excess = 0
    for owner, held in holders.items():
        counts = Counter(item for rank in (owner, *held) for item in where[rank].items())
        excess += sum(count - 1 for count in counts.values())
    return excess


def loads(holders) -> Counter:
    return Counter(holder for held in holders.values() for holder in held)


def moved(before, after) -> int:
    return sum(holder not in before[owner] for owner, held in after.items() for holder in held)


def foreign(groups, holders) -> int:
    group_of = {rank: i for i, group in enumerate(groups) for rank in group}
    return sum(group_of[owner] != group_of[holder] for owner, held in holders.items() for holder in held)


def check(where, k, holders):
    """What holds for every placement."""
    assert sorted(holders) == sorted(where)
    for owner, held in holders.items():
        assert len(set(held)) == len(held) == min(k, len(where) - 1) and owner not in held


@pytest.fixture
def rotations_only(monkeypatch):
    monkeypatch.setattr(assign, "_MOST_PAIRS", 0)


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


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("most_pairs", [assign._MOST_PAIRS, 0], ids=["solved", "rotated"])
def test_racks_and_power_feeds_that_cut_across_each_other(k, most_pairs, monkeypatch):
    monkeypatch.setattr(assign, "_MOST_PAIRS", most_pairs)
    for size in (12, 24):
        where = {r: {"node": f"n{r}", "rack": f"r{r // 4}", "power": f"p{r % 3}"} for r in range(size)}
        holders = place(where, [list(range(size))], k)
        assert not find_problems(where, [list(range(size))], k, holders)
        assert shared(where, holders) == 0 and set(loads(holders).values()) == {k}


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
            check(where, k, holders)
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
    check(where, k, holders)
    best = least_possible(where, k)
    assert shared(where, holders) == best[0], (where, holders)
    assert max(loads(holders).values()) == best[1], (where, holders)


def least_possible(where, k) -> tuple[int, int]:
    """(shared, most copies at one rank) by going through everything."""
    ranks = sorted(where)
    options = [
        [
            (shared(where, {owner: held}), held)
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
    check(other, k, after)
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


# --- clusters of any size ---------------------------------------------------------------------------------------------


@st.composite
def nested(draw):
    """Racks of nodes of GPUs, each of any size."""
    where = {}
    for rack, nodes in enumerate(draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1))[:5]):
        for node, gpus in enumerate(nodes):
            for _ in range(gpus):
                where[len(where)] = {"node": f"n{rack}.{node}", "rack": f"r{rack}"}
    return where


@settings(max_examples=40, deadline=None)
@given(nested(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_where_domains_are_nested_a_rotation_is_found_whenever_there_is_a_placement(where, k, dice):
    group, domains = list(where), domains_of(where)
    dice.shuffle(group)
    if len(group) <= k:
        return
    pairs = {(a, b): float(b != group[(i + 1) % len(group)]) for i, a in enumerate(group) for b in group if a != b}
    solved = solve_strictly(Request(domains, pairs, dict.fromkeys(group, k)), k)
    turned, excess = rotate(group, domains, k)
    assert excess == shared(where, turned)
    assert (excess == 0) == (solved is not None)
    check(where, k, turned)
    assert set(loads(turned).values()) == {k}


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_where_domains_are_of_one_size_and_too_few_a_rotation_shares_as_few_as_can_be(racks, nodes, gpus, k):
    where, groups = grid(1, racks * nodes * gpus, 1, gpus, nodes)
    if len(where) <= k:
        return
    domains = domains_of(where)
    pairs = dict.fromkeys(((a, b) for a in where for b in where if a != b), 0.0)
    solved = solve_best(Request(domains, pairs, dict.fromkeys(where, k)), k)
    turned, excess = rotate(groups[0], domains, k)
    assert excess == shared(where, solved) and set(loads(turned).values()) == {k}


ALIKE = [(1, 2, 4, 2, 1), (1, 4, 4, 2, 1), (1, 4, 4, 2, 2), (2, 4, 4, 4, 1), (1, 6, 4, 3, 1), (2, 2, 6, 2, 1)]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("sizes", ALIKE)
@pytest.mark.parametrize("pipeline_first", [False, True])
def test_of_groups_that_are_alike_as_many_copies_stay_with_peers_as_the_program_finds(
    sizes, k, pipeline_first, monkeypatch
):
    where, groups = grid(*sizes, pipeline_first=pipeline_first)
    solved = place(where, groups, k)
    monkeypatch.setattr(assign, "_MOST_PAIRS", 0)
    turned = place(where, groups, k)
    check(where, k, turned)
    assert shared(where, turned) == shared(where, solved)
    assert max(loads(turned).values()) == max(loads(solved).values())
    assert foreign(groups, turned) == foreign(groups, solved)


def test_hosts_of_which_some_have_no_switch(rotations_only):
    where = {r: {"node": f"n{r}"} | ({"switch": f"s{r // 2}"} if r < 6 else {}) for r in range(10)}
    holders = place(where, [list(range(10))], 2)
    assert shared(where, holders) == 0 and set(loads(holders).values()) == {2}


@pytest.mark.parametrize(
    "sizes",
    [(1, 80_000, 1, 8, 4), (8, 2500, 4, 8, 4), (8, 200, 50, 8, 4), (1, 8, 10_000, 8, 4)],
    ids=lambda sizes: "x".join(map(str, sizes[:3])),
)
def test_80000_ranks(sizes):
    where, groups = grid(*sizes)
    holders = place(where, groups, 2)
    check(where, 2, holders)
    assert not find_problems(where, groups, 2, holders) and set(loads(holders).values()) == {2}
    nodes = {tuple(where[rank]["node"] for rank in (owner, *held)) for owner, held in holders.items()}
    assert len(nodes) <= 2 * 10_000  # the ranks of a node have their copies on the same nodes, or nearly


def test_4096_ranks_in_two_racks_of_which_three_are_asked_for():
    where, groups = grid(8, 128, 4, 8, 256)
    holders = place(where, groups, 2)
    assert shared(where, holders) == 4096 and set(loads(holders).values()) == {2}
    assert any("k = 2 asks for 3 failure domains" in each for each in find_problems(where, groups, 2, holders))


@pytest.mark.parametrize("sizes", [(1, 4096, 1, 8, 4), (8, 512, 1, 8, 4), (1, 8, 512, 8, 4)])
def test_after_a_swap_in_a_large_cluster_only_what_is_wrong_moves(sizes):
    where, groups = grid(*sizes)
    holders = place(where, groups, 2)
    assert place(where, groups, 2, holders) == holders
    lost = where[80]["node"]
    there = {rank: kinds["rack"] for rank, kinds in where.items()}[holders[80][0]]  # the worst rack it could be
    swapped = {r: {"node": "standby", "rack": there} if kinds["node"] == lost else kinds for r, kinds in where.items()}
    after = place(swapped, groups, 2, holders)
    check(swapped, 2, after)
    assert not shared(swapped, after) and max(loads(after).values()) == 2
    wrong = shared(swapped, holders)
    assert 0 < wrong / 2 <= moved(holders, after) <= 2 * wrong  # a rank that shares a rack shares none of its nodes


def test_groups_of_many_shapes_are_not_solved_without_end(monkeypatch):
    calls = []
    monkeypatch.setattr(assign, "_MOST_PAIRS", 600)
    monkeypatch.setattr(assign, "solve_strictly", lambda *given: calls.append(given) or solve_strictly(*given))
    groups = [list(range(20 * i, 20 * i + 20)) for i in range(12)]
    where = {r: {"node": f"n{(r % 20) // (1 + r // 100)}.{r // 20 % 5}"} for r in range(240)}
    holders = place(where, groups, 1)
    check(where, 1, holders)
    assert len(calls) <= 600 * 3 / (20 * 19) + 1 and not shared(where, holders)


def test_a_plan_for_10000_nodes_fits_into_a_small_memory():
    """In a process of its own: it may not have more than 4 GB of addresses."""
    words = "plan snapshot --nodes 10000 --nodes-per-rack 4 --step-time 10s --params 70B --copies 2"
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30));"
        "from ft.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", limited, *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "10000 nodes, 80000 ranks: DP80000" in ended.stdout
