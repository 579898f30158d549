"""Peer copies in clusters of any size: rotations equal what the integer program finds where both can be had, and hold
what they promise where only rotations can. What is promised for every placement: test_placement."""

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


def cluster(tp: int, dp: int, pp: int, gpus: int, nodes_per_rack: int, pipeline_first: bool = False):
    """(where, groups) of a regular cluster; pipeline_first: --use-tp-pp-dp-mapping."""
    nodes = [{"node": f"n{n}", "rack": f"r{n // nodes_per_rack}"} for n in range(-(-tp * dp * pp // gpus))]
    where = {rank: nodes[rank // gpus] for rank in range(tp * dp * pp)}
    step, stage = (tp * pp, tp) if pipeline_first else (tp, tp * dp)
    return where, [[t + step * d + stage * p for d in range(dp)] for p in range(pp) for t in range(tp)]


def domains_of(where) -> dict:
    return {rank: frozenset(kinds.items()) for rank, kinds in where.items()}


def loads(holders) -> Counter:
    return Counter(holder for held in holders.values() for holder in held)


def shared(where, holders) -> int:
    """Copies too many in some domain."""
    excess = 0
    for owner, held in holders.items():
        for kind in where[owner]:
            names = [where[rank].get(kind, rank) for rank in (owner, *held)]
            excess += len(names) - len(set(names))
    return excess


def foreign(groups, holders) -> int:
    group_of = {rank: i for i, group in enumerate(groups) for rank in group}
    return sum(group_of[owner] != group_of[holder] for owner, held in holders.items() for holder in held)


def sound(where, holders, k) -> None:
    assert sorted(holders) == sorted(where)
    assert all(len(set(held)) == k and owner not in held for owner, held in holders.items())


@pytest.fixture
def rotations_only(monkeypatch):
    monkeypatch.setattr(assign, "_MOST_PAIRS", 0)


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
    sound(where, turned, k)
    assert set(loads(turned).values()) == {k}


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_where_domains_are_of_one_size_and_too_few_a_rotation_shares_as_few_as_can_be(racks, nodes, gpus, k):
    where, groups = cluster(1, racks * nodes * gpus, 1, gpus, nodes)
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
    where, groups = cluster(*sizes, pipeline_first=pipeline_first)
    solved = place(where, groups, k)
    monkeypatch.setattr(assign, "_MOST_PAIRS", 0)
    turned = place(where, groups, k)
    sound(where, turned, k)
    assert shared(where, turned) == shared(where, solved)
    assert max(loads(turned).values()) == max(loads(solved).values())
    assert foreign(groups, turned) == foreign(groups, solved)


@pytest.mark.parametrize("k", [1, 2])
def test_racks_and_power_feeds_that_cut_across_each_other(k, rotations_only):
    where = {r: {"node": f"n{r}", "rack": f"r{r // 4}", "power": f"p{r % 3}"} for r in range(24)}
    holders = place(where, [list(range(24))], k)
    assert shared(where, holders) == 0 and set(loads(holders).values()) == {k}


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
    where, groups = cluster(*sizes)
    holders = place(where, groups, 2)
    sound(where, holders, 2)
    assert not find_problems(where, groups, 2, holders) and set(loads(holders).values()) == {2}
    nodes = {tuple(where[rank]["node"] for rank in (owner, *held)) for owner, held in holders.items()}
    assert len(nodes) <= 2 * 10_000  # the ranks of a node have their copies on the same nodes, or nearly


def test_4096_ranks_in_two_racks_of_which_three_are_asked_for():
    where, groups = cluster(8, 128, 4, 8, 256)
    holders = place(where, groups, 2)
    assert shared(where, holders) == 4096 and set(loads(holders).values()) == {2}
    assert any("k = 2 asks for 3 failure domains" in each for each in find_problems(where, groups, 2, holders))


@pytest.mark.parametrize("sizes", [(1, 4096, 1, 8, 4), (8, 512, 1, 8, 4), (1, 8, 512, 8, 4)])
def test_after_a_swap_in_a_large_cluster_only_what_is_wrong_moves(sizes):
    where, groups = cluster(*sizes)
    holders = place(where, groups, 2)
    assert place(where, groups, 2, holders) == holders
    lost = where[80]["node"]
    there = {rank: kinds["rack"] for rank, kinds in where.items()}[holders[80][0]]  # the worst rack it could be
    swapped = {r: {"node": "standby", "rack": there} if kinds["node"] == lost else kinds for r, kinds in where.items()}
    after = place(swapped, groups, 2, holders)
    sound(swapped, after, 2)
    assert not shared(swapped, after) and max(loads(after).values()) == 2
    moved = sum(holder not in holders[owner] for owner, held in after.items() for holder in held)
    wrong = shared(swapped, holders)
    assert 0 < wrong / 2 <= moved <= 2 * wrong  # a rank that shares a rack shares none of its nodes


def test_groups_of_many_shapes_are_not_solved_without_end(monkeypatch):
    calls = []
    monkeypatch.setattr(assign, "_MOST_PAIRS", 600)
    monkeypatch.setattr(assign, "solve_strictly", lambda *given: calls.append(given) or solve_strictly(*given))
    groups = [list(range(20 * i, 20 * i + 20)) for i in range(12)]
    where = {r: {"node": f"n{(r % 20) // (1 + r // 100)}.{r // 20 % 5}"} for r in range(240)}
    holders = place(where, groups, 1)
    sound(where, holders, 1)
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
