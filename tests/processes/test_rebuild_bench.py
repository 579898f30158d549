"""The benchmarks ``rebuild`` and ``connections``: the groups of a layout, and what production rebuilds of them."""

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from ft_runs import flags, ft_run
from pythons import python

from ft.base.errors import UserError
from ft.net.store import StoreServer
from ft.state.groups import Groups, Rendezvous
from megatron.core import package_info

CORE = (package_info.MAJOR, package_info.MINOR)
ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools/bench"))

from layout_groups import (  # noqa: E402
    USED,
    Sizes,
    Work,
    blocked_in,
    decide,
    everything,
    groups_of,
    make_groups,
    work_of,
)

LAYOUTS_ON_8 = [Sizes(8, tp=2, pp=2, ep=2), Sizes(8, tp=2, cp=2)]


def really_made(rendezvous: Rendezvous, sizes: Sizes) -> tuple[str, list[tuple[str, list[int]]]]:
    """The groups of this rank, made and connected as a worker makes them: digest over all, and its own ones."""
    rank = int(os.environ["RANK"])
    groups = Groups.start(
        rendezvous=rendezvous,
        prefix="made",
        rank=rank,
        world_size=sizes.ranks,
        device_backend="gloo",
        alone=False,
        on_failure=lambda name, error: None,
    )
    make_groups(sizes)
    dist.barrier()
    return groups.topology(), [(report.name, report.ranks) for report in groups.reports()]


@pytest.mark.parametrize("sizes", LAYOUTS_ON_8, ids=str)
def test_the_groups_are_those_that_8_ranks_really_make(sizes, ranks):
    server = StoreServer("127.0.0.1", 0, "of the test")
    made = ranks(really_made, 8, Rendezvous(server.address, "of the test"), sizes, init=False)
    server.close()
    groups = groups_of(sizes)
    digest = hashlib.sha256(json.dumps([(g.name, g.ranks) for g in groups]).encode()).hexdigest()[:16]
    assert {topology for topology, _ in made} == {digest}
    for rank, (_, own) in enumerate(made):
        assert own == [(group.name, group.ranks) for group in groups if rank in group.ranks]


@pytest.mark.parametrize("sizes", [Sizes(8, tp=3), Sizes(8, pp=16), Sizes(8, tp=2, ep=8), Sizes(12, cp=5)])
def test_an_impossible_layout_is_refused(sizes):
    with pytest.raises(UserError, match="are not a multiple of"):
        groups_of(sizes)


def test_with_nobody_blocked_only_used_groups_of_the_lost_rank_are_rebuilt():
    groups = groups_of(Sizes(32, tp=2, pp=4))
    plan = decide(groups, [5], stuck=False)
    shared = [group for group in groups if 5 in group.ranks and len(group.ranks) > 1]
    assert set(plan.rebuild) == {group.name for group in shared if group.purpose in USED}
    assert set(plan.defer) == {group.name for group in shared if group.purpose not in USED}


def test_everybody_ends_up_blocked_by_a_lost_rank():
    groups = groups_of(Sizes(32, tp=2, pp=4))
    by_name = {group.name: group for group in groups}
    waiting = blocked_in(groups, [0])
    assert sorted(waiting) == list(range(1, 32))
    assert all(rank in by_name[name].ranks for rank, name in waiting.items())
    assert by_name[waiting[1]].purpose == "TENSOR_MODEL_PARALLEL_GROUP"
    # ranks 8, 16, 24 are the later stages of rank 0's pipeline, rank 2 is its data-parallel neighbour
    assert {by_name[waiting[rank]].purpose for rank in (8, 16, 24)} == {"PIPELINE_MODEL_PARALLEL_GROUP"}
    assert by_name[waiting[2]].purpose == "DATA_PARALLEL_GROUP_WITH_CP"


def test_groups_with_somebody_blocked_are_rebuilt_too():
    groups = groups_of(Sizes(32, tp=2, pp=4))
    least, most = (set(decide(groups, [0], stuck=stuck).rebuild) for stuck in (False, True))
    assert least < most
    assert most - least <= set(blocked_in(groups, [0]).values())


def test_losing_a_node_asks_for_more_groups_than_losing_a_rank_and_for_fewer_than_all():
    groups = groups_of(Sizes(64, tp=2, pp=4))
    for stuck in (False, True):
        one, node = (decide(groups, lost, stuck=stuck).rebuild for lost in ([0], range(8)))
        assert len(one) < len(node) < len(everything(groups))


def test_a_real_run_uses_the_groups_that_are_said_to_be_used(tmp_path, corpus):
    """What its survivors report of them after a kill, with the distributed optimizer, TP and PP on 4 ranks."""
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer"
    done = ft_run(tmp_path / "run", flags(corpus, layout, steps=6), options="--inject kill@step=3:rank=1")
    assert done.code == 0, done.explain()
    groups = {group.name: group for group in groups_of(Sizes(4, tp=2, pp=2))}
    journal = [json.loads(text) for text in (done.folder / "journal.jsonl").read_text().splitlines()]
    said = [entry["report"] for entry in journal if (entry.get("report") or {}).get("kind") == "WorkerReleased"]
    assert said
    used = {groups[one["name"]].purpose for report in said for one in report["groups"] if one["used"]}
    assert used == USED & {group.purpose for group in groups.values() if len(group.ranks) > 1}


def test_work_is_counted_by_hand():
    groups = [
        dataclasses.replace(g, ranks=r) for g, r in zip(groups_of(Sizes(2)), ([0, 1, 2], [0, 1], [2]), strict=False)
    ]
    names = [group.name for group in groups]
    assert work_of(groups, names) == Work(groups=2, memberships=5, connections=4, most_groups=2, most_connections=3)
    assert work_of(groups, []) == Work(0, 0, 0, 0, 0)


def bench(name: str, *words: str) -> list[dict]:
    done = python(f"tools/bench/{name}.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(text) for text in done.stdout.splitlines()]


def test_the_bench_loses_a_rank_and_rebuilds_what_production_would():
    rows = bench("rebuild", "--ranks", "4", "--pp", "2", "--rounds", "1")
    assert [row["kind"] for row in rows] == ["full", "least"]  # a node of 4 ranks would be all there are
    groups = groups_of(Sizes(4, pp=2))
    assert rows[0]["groups"] == len(everything(groups))
    assert rows[1]["groups"] == len(decide(groups, [1], stuck=True).rebuild)
    assert all(row["wall_s"] > 0 and row["busiest_cpu_s"] > 0 and row["store_cpu_s"] > 0 for row in rows)


def test_the_connections_of_each_rank_are_counted_at_any_size():
    rows = bench("connections", "--ranks", "8", "64", "--tp", "2", "--pp", "4", "--ranks-per-node", "8")
    kinds = [(8, "full"), (8, "least"), (64, "full"), (64, "least"), (64, "node")]  # a node of 8 ranks would be all
    assert [(row["ranks"], row["kind"]) for row in rows] == kinds
    full, one, node = (row["blocked"]["connections"] for row in rows[2:])
    assert one < node < full
    assert rows[3]["idle"]["groups"] < rows[3]["blocked"]["groups"] and rows[3]["deferred"] > 0
    assert 0 < rows[3]["blocked"]["most_connections"] < rows[2]["blocked"]["most_connections"]
