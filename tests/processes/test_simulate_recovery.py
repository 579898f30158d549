"""``ft simulate recovery``: the groups of a layout, what production rebuilds of them, and how times are carried on."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch.distributed as dist
from ft_runs import flags, ft_run

from ft import cli
from ft.base.errors import UserError
from ft.lab.simulate.recovery import fit as fitting
from ft.lab.simulate.recovery.deadpool import RECOVERY_S
from ft.lab.simulate.recovery.fit import fit, line, read
from ft.lab.simulate.recovery.loss import USED, Work, blocked_in, decide, everything, work_of
from ft.lab.simulate.recovery.sweep import layouts, sweep
from ft.lab.simulate.recovery.topology import Sizes, groups_of, make_groups
from ft.net.store import StoreServer
from ft.state.groups import Groups, Rendezvous
from megatron.core import package_info

CORE = (package_info.MAJOR, package_info.MINOR)
recorded = pytest.mark.skipif(
    CORE != (0, 16), reason="the measurements were made with megatron-core 0.16.1; later releases make more groups"
)
ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "tools/bench/results"
LAYOUTS_ON_8 = [Sizes(8, tp=2, pp=2), Sizes(8, tp=2, pp=2, ep=2), Sizes(8, tp=2, cp=2), Sizes(8)]


def of(purpose: str, groups) -> list[list[int]]:
    return [group.ranks for group in groups if group.purpose == purpose]


# --- which groups there are -------------------------------------------------------------------------------------------


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


@recorded
def test_their_number_is_that_of_the_recorded_runs():
    known = {2: Sizes(2), 4: Sizes(4, pp=2), 8: Sizes(8, tp=2, pp=2), 16: Sizes(16, tp=2, pp=4)}
    rows = [json.loads(text) for text in (RESULTS / "hot_swap.jsonl").read_text().splitlines()]
    recorded = [(row["ranks"], row["groups_rebuilt_of"]) for row in rows if row["bench"] == "recovery"]
    assert {ranks for ranks, _ in recorded} == set(known)
    for ranks, (rebuilt, in_all) in recorded:
        groups = groups_of(known[ranks])
        assert len(groups) == in_all
        most = len(decide(groups, [1], stuck=True).plan.rebuild)
        assert abs(most - rebuilt) <= 2, f"{ranks} ranks: {rebuilt} rebuilt in the run, at most {most} expected"


def test_members_follow_megatrons_order_tp_cp_dp_pp():
    groups = groups_of(Sizes(16, tp=2, pp=2, cp=2))
    assert of("TENSOR_MODEL_PARALLEL_GROUP", groups)[0] == [0, 1]
    assert of("CONTEXT_PARALLEL_GROUP", groups)[0] == [0, 2]
    assert of("DATA_PARALLEL_GROUP", groups)[0] == [0, 4]
    assert of("PIPELINE_MODEL_PARALLEL_GROUP", groups)[0] == [0, 8]
    assert of("WORLD", groups) == [list(range(16))]


def test_4096_ranks_are_laid_out_and_nothing_of_them_stays():
    groups = groups_of(Sizes(4096, tp=8, pp=8))
    assert [len(ranks) for ranks in of("DATA_PARALLEL_GROUP", groups)] == [64] * 64
    assert not dist.is_initialized()
    assert len(groups_of(Sizes(8, tp=2, pp=2))) == (98 if CORE >= (0, 19) else 80)


@pytest.mark.parametrize("sizes", [Sizes(8, tp=3), Sizes(8, pp=16), Sizes(8, tp=2, ep=8), Sizes(12, cp=5)])
def test_an_impossible_layout_is_refused(sizes):
    with pytest.raises(UserError, match="are not a multiple of"):
        groups_of(sizes)


# --- what is rebuilt --------------------------------------------------------------------------------------------------


def test_with_nobody_blocked_only_used_groups_of_the_lost_rank_are_rebuilt():
    groups = groups_of(Sizes(32, tp=2, pp=4))
    plan = decide(groups, [5], stuck=False).plan
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
    least, most = (set(decide(groups, [0], stuck=stuck).plan.rebuild) for stuck in (False, True))
    assert least < most
    assert most - least <= set(blocked_in(groups, [0]).values())


def test_losing_a_node_asks_for_more_groups_than_losing_a_rank_and_for_fewer_than_all():
    groups = groups_of(Sizes(64, tp=2, pp=4))
    for stuck in (False, True):
        one, node = (decide(groups, lost, stuck=stuck).plan.rebuild for lost in ([0], range(8)))
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


# --- times ------------------------------------------------------------------------------------------------------------


def row(ranks: int, groups: int, connections: int, wall: float, kind: str = "full") -> dict:
    counts = {"memberships": groups, "connections": connections, "most_groups": groups, "most_connections": connections}
    times = {"wall_s": wall, "busiest_cpu_s": wall / 2, "store_cpu_s": wall / 4}
    return {"bench": "rebuild", "ranks": ranks, "kind": kind, "groups": groups, **counts, **times}


def some_rows() -> list[dict]:
    """Made by 2 ms + 1 ms per membership + 0.1 ms per connection."""
    sizes = [(8, 20, 100), (8, 5, 60), (16, 30, 300), (16, 9, 400), (32, 70, 1500), (32, 10, 1200)]
    return [row(n, g, c, 0.002 + 0.001 * g + 0.0001 * c) for n, g, c in sizes]


def test_a_fit_finds_the_line_that_rows_were_made_by():
    fitted = fit(some_rows())
    assert fitted.here.constant_s == pytest.approx(0.002)
    assert fitted.here.slopes_s == pytest.approx((0.001, 0.0001))
    assert fitted.here.largest_error < 1e-9
    assert fitted.checked < 1e-9
    work = Work(10, 1000, 5000, 10, 50)
    assert fitted.here.at(work) == pytest.approx(0.002 + 1 + 0.5)
    assert fitted.spread_out(work) == pytest.approx((0.002 + 0.01 + 0.005) / 2 + (0.002 + 1 + 0.5) / 4)
    assert fitted.here.at(Work(0, 0, 0, 0, 0)) == 0.0


def test_no_coefficient_is_negative():
    seed = 11
    print(f"seed {seed}")
    rng = numpy.random.default_rng(seed)
    for _ in range(20):
        rows = [row(8, int(g), int(c), float(w)) for g, c, w in rng.uniform((1, 1, 0.01), (90, 900, 1), (8, 3))]
        found = line(rows, "wall_s", ("memberships", "connections"))
        assert found.constant_s >= 0 and min(found.slopes_s) >= 0
        assert len(found.errors) == 8


@recorded
def test_the_recorded_measurements_cover_8_16_and_32_ranks_and_are_fitted():
    rows = read(RESULTS / "rebuild.jsonl")
    assert {row["ranks"] for row in rows} == {8, 16, 32}
    assert {row["kind"] for row in rows} == {"full", "least", "node"}
    for one in rows:
        groups = groups_of(Sizes(one["ranks"], one["tp"], one["pp"], one["cp"], one["ep"]))
        if one["kind"] == "full":
            assert one["groups"] == len(everything(groups))
    fitted = fit(rows)
    assert fitted.most_ranks == 32
    assert fitted.here.typical_error < 0.5


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "0 measured rebuilds, which are too few"),
        ("{", "line 1 of"),
        ('{"bench": "rebuild", "ranks": 8}', "line 1 of"),
        (json.dumps({**row(8, 5, 9, 1.0), "wall_s": -1}), "missing or invalid"),
        ("[1]", "line 1 of"),
    ],
)
def test_results_that_are_no_results_are_refused(text, part, tmp_path):
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(UserError, match=part):
        fit(read(tmp_path / "r.jsonl"))


def test_other_benchmarks_in_the_file_are_left_out(tmp_path):
    rows = [{"bench": "recovery"}, *some_rows()]
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(one) for one in rows))
    assert read(tmp_path / "r.jsonl") == some_rows()
    assert fitting.fit(some_rows()).most_ranks == 32


def test_the_bench_loses_a_rank_and_rebuilds_what_production_would():
    words = [sys.executable, "tools/bench/rebuild.py", "--ranks", "4", "--pp", "2", "--rounds", "1"]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(text) for text in done.stdout.splitlines()]
    assert [row["kind"] for row in rows] == ["full", "least"]  # a node of 4 ranks would be all there are
    groups = groups_of(Sizes(4, pp=2))
    assert rows[0]["groups"] == len(everything(groups))
    assert rows[1]["groups"] == len(decide(groups, [1], stuck=True).plan.rebuild)
    assert all(row["wall_s"] > 0 and row["busiest_cpu_s"] > 0 and row["store_cpu_s"] > 0 for row in rows)


# --- the command ------------------------------------------------------------------------------------------------------


def recovery(words: str) -> int:
    return cli.main(["simulate", "recovery", *words.split()])


def test_the_sweep_is_printed_with_the_papers_figures_beside_the_fit(tmp_path, capsys):
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(one) for one in some_rows()))
    picture = tmp_path / "p.png"
    assert recovery(f"--ranks 8..512 --tp 2 --pp 2 --results {tmp_path}/r.jsonl --plot {picture}") == 0
    text = capsys.readouterr().out
    for word in ("TP2 DP128 PP2", "a node", "9 - 13", "extrapolated", "EXTRAPOLATION", "17.1 s", "29.8 s"):
        assert word in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json_says_the_same(capsys):
    assert recovery("--ranks 32,64 --tp 2 --pp 4 --ranks-per-node 4 --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["ranks"], one["kind"]) for one in found] == [
        (n, k) for n in (32, 64) for k in ("full", "least", "node")
    ]
    assert found[0]["dp"] == 4 and found[0]["deadpool_recovery_s"] == RECOVERY_S[32]
    assert found[1]["least"]["groups"] <= found[1]["most"]["groups"] < found[0]["most"]["groups"]


def test_of_tp_pp_and_dp_the_one_that_is_missing_is_worked_out():
    assert layouts([64], 2, 4, None, 1, 1)[0].dp == 8
    assert layouts([64], 2, None, 8, 1, 1) == [Sizes(64, 2, 4)]
    assert layouts([64], None, 4, 8, 1, 1) == [Sizes(64, 2, 4)]
    assert layouts([8, 16, 64], 4, 4, None, 1, 1) == [Sizes(16, 4, 4), Sizes(64, 4, 4)]


def test_a_node_that_is_all_there_is_cannot_be_replaced():
    assert [rebuild.kind for rebuild in sweep([Sizes(8, 2, 2)], 8, 0, False)[0].rebuilds] == ["full", "least"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--ranks 8 --tp 3", "no layout of 8 ranks has --tp 3"),
        ("--ranks 64 --tp 2 --pp 2 --dp 8", "no layout of 64 ranks"),
        ("--ranks 8 --results nowhere.jsonl", "the results cannot be read"),
        ("--ranks 8 --tp 2 --plot nowhere/p.png", "the picture cannot be written"),
    ],
)
def test_input_that_cannot_work_is_refused(words, part, capsys):
    assert recovery(words) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--ranks 1", "--ranks 64..8", "--ranks x", "--ranks 99999", "--tp 0", "--lost -1"])
def test_a_flag_that_makes_no_sense_is_refused_by_name(words, capsys):
    assert recovery(words) == 2
    assert f"error: {words.split()[0]}: " in capsys.readouterr().err
