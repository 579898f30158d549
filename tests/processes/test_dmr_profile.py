"""ft dmr profile, plan, run: a profile names operators as the run does, a plan of it is followed, and training stays as
it is, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import small_runs as runs

from ft.base.errors import UserError
from ft.cli import main as ft
from ft.systems.dmr.plan.file import read_plan
from ft.systems.dmr.plan.trace import D_INTER, D_INTRA, Operator, Trace, Window
from ft.systems.dmr.profile.assemble import ComparisonCosts, assemble, blocks
from ft.systems.dmr.profile.recorder import StageRecord, Storage, Timed
from ft.systems.dmr.runtime.cursor import operator_id
from ft.systems.schedule.kinds import Pipeline

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
LAYOUTS = {
    "alone": (1, FULL),
    "pp2": (2, "--pipeline-model-parallel-size 2 --hidden-dropout 0.1 " + FULL),
    "tp2": (2, "--tensor-model-parallel-size 2 "),
    "experts": (
        2,
        "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--disable-bias-linear ",
    ),
}


def followed(flags: str) -> dict:
    """Trains; how the last iteration was verified, and the most that was kept for later."""
    from megatron.patches import double_execution

    code = runs.launch(flags)
    listener = double_execution._listener
    return {"code": code, "coverage": listener.coverage(), "most_bytes": listener.queue.most_bytes}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in ("tp2", "experts") else ()) for name in LAYOUTS]
)
def test_a_run_follows_the_plan_of_its_profile(name, ranks, corpus, tmp_path, capsys):
    world, flags = LAYOUTS[name]
    command = f"{runs.BASE} --data-path {corpus} --train-iters 8 {flags}"
    profile, plan = tmp_path / "prof.json", tmp_path / "plan.json"
    saves = f"--save {tmp_path}/ck --metrics-file {tmp_path}/none.jsonl"
    handle = ranks.start(runs.launch, world, f"{command} {saves} --ft-dmr-profile {profile}", init=False)
    assert [each.value for each in handle.wait(timeout=180)] == [0] * world
    assert not (tmp_path / "ck").exists() and not (tmp_path / "none.jsonl").exists()

    values = json.loads(profile.read_text())
    for op in values["ops"]:  # putting aside costs more than most of these small operators
        op.pop("defer_us", None)
    profile.write_text(json.dumps(values))
    assert ft(["dmr", "plan", str(profile), "--memory-budget", "1GB", "--out", str(plan)]) == 0
    found = read_plan(plan)
    assert found.trace.pipeline.stages == len(found.trace.stages) == (2 if name == "pp2" else 1)
    assert {op.phase for op in found.trace.ops} >= {"forward", "backward", "between", "optimizer"}
    assert {op.layer for op in found.trace.ops} == set(range(5))

    off, on = tmp_path / "off.jsonl", tmp_path / "on.jsonl"
    code = ranks.start(runs.launch, world, f"{command} --metrics-file {off}", init=False).wait(timeout=180)
    assert [each.value for each in code] == [0] * world
    planned = f"{command} --metrics-file {on} --ft-dmr-plan {plan}"
    handle = ranks.start(followed, world, planned, init=False)
    told = [each.value for each in handle.wait(timeout=180)]
    assert [one["code"] for one in told] == [0] * world, handle.output(0)
    assert runs.losses(on) == runs.losses(off)
    for rank, one in enumerate(told):
        assert one["most_bytes"] < 1e9
        _is_as_planned(one["coverage"], found, stage=rank if name == "pp2" else 0, exactly=name != "experts")
    if name != "alone":
        assert all(one["coverage"]["in windows"] for one in told)
    assert "went wrong" not in handle.output(0) + capsys.readouterr().err


def _is_as_planned(coverage: dict, plan, stage: int, exactly: bool) -> None:
    """All ranks of a stage have found their operators where the profile of one of them says."""
    sets = [plan.assign[op.id].set for op in plan.trace.ops if op.stage == stage]
    for name in (D_INTER, D_INTRA) if exactly else ():
        assert coverage.get(name, 0) == sets.count(name)
    deferred = coverage.get(D_INTER, 0) + coverage.get(D_INTRA, 0)
    assert coverage["in windows"] + coverage["early"] + coverage["late"] <= deferred
    assert coverage["unverified"] == 0
    if exactly:
        assert coverage["late"] == 0


def test_a_plan_of_another_run_is_refused_before_training(ranks, corpus, tmp_path, a_plan):
    path = tmp_path / "plan.json"
    values = json.loads(a_plan.read_text())
    values["trace"]["fingerprint"].update(model="another", dp=2, micro_batch=4, microbatches=1)
    path.write_text(json.dumps(values))
    command = f"{runs.BASE} --data-path {corpus} {FULL} --ft-dmr-plan {path}"
    handle = ranks.start(runs.launch, 1, command, init=False)
    assert [each.exitcode for each in handle.wait(timeout=180)] == [2]
    assert "the DMR plan was made for another run: model: planned for 'another', the run has" in handle.output(0)
    assert (
        "dp: planned for 2, the run has 1; micro_batch: planned for 4, the run has 2; "
        "microbatches: planned for 1, the run has 4"
    ) in handle.output(0)
    assert "fix:" in handle.output(0) and "iteration" not in handle.output(0)


@pytest.fixture(scope="module")
def a_plan(_warm_ranks, corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    command = f"{runs.BASE} --data-path {corpus} --train-iters 9 {FULL} --ft-dmr-profile {folder}/prof.json"
    _warm_ranks.start(runs.launch, 1, command, init=False).wait(timeout=180)
    assert ft(["dmr", "plan", f"{folder}/prof.json", "--memory-budget", "1GB", "--out", f"{folder}/plan.json"]) == 0
    return folder / "plan.json"


def test_a_run_whose_next_steps_are_too_few_for_a_profile_is_refused(ranks, corpus, tmp_path):
    command = f"{runs.BASE} --data-path {corpus} --ft-dmr-profile {tmp_path}/prof.json"
    handle = ranks.start(runs.launch, 1, command, init=False)
    assert [each.exitcode for each in handle.wait(timeout=180)] == [2]
    assert "the run has 4 left" in handle.output(0)


def test_the_commands_own_failure_is_the_answer(tmp_path):
    out = ["dmr", "profile", "--out", str(tmp_path / "prof.json"), "--"]
    assert ft([*out, sys.executable, "-c", "import sys; sys.exit(7)"]) == 7
    shown = subprocess.run([sys.executable, "-m", "ft", "dmr", "--help"], capture_output=True, text=True, check=True)
    assert "profile" in shown.stdout


def executed(stage: int, name: str, phase: str, microbatch: int = 0, layer: int = 0, **how) -> Operator:
    where = {"stage": stage, "microbatch": microbatch, "layer": layer}
    return Operator(operator_id(stage, phase, 0, microbatch, 0), name, phase, 0.0, 0.0, **where, **how)


def stage_record(stage: int, us: float) -> StageRecord:
    """Two microbatches, each one operator forward and one backward of ``us``, with the waits of 1F1B on two stages."""
    f, b = (
        [executed(stage, "mm", phase, number, 1, out_ids=(f"t{2 * number + is_back}",)) for number in range(2)]
        for is_back, phase in enumerate(("forward", "backward"))
    )
    first = [f[0], "s", f[1], "r", b[0], "r", b[1]]
    last = ["r", f[0], b[0], "r", f[1], b[1], "s"]
    zero, adam = (executed(stage, name, phase) for name, phase in (("zero_", "between"), ("adam", "optimizer")))
    events = [zero, *(first if stage == 0 else last), adam]
    waits = iter(range(9))
    events = [
        Window(f"p2p.{next(waits)}", 0.0, 0.0, "p2p", stage) if isinstance(each, str) else each for each in events
    ]
    times = [Timed(1.0, 500.0 if isinstance(each, Window) else us) for each in events]
    memory = {f"t{number}": Storage(100, freed=len(events) - 1) for number in range(4)}
    return StageRecord(stage, events, memory, [100] * len(events), times)


def two_stages(us: tuple[float, float] = (10.0, 10.0)) -> Trace:
    records = [stage_record(stage, each) for stage, each in enumerate(us)]
    return assemble(records, Pipeline(2, 2), ComparisonCosts(1.0, 0.5), {})


def test_time_between_units_is_what_the_schedule_leaves_and_not_what_was_waited():
    trace = two_stages((30.0, 10.0))
    for stage in (0, 1):
        ops = [op for op in trace.ops if op.stage == stage]
        assert [op.start_us for op in ops] == sorted(op.start_us for op in ops)
        windows = [window for window in trace.windows if window.stage == stage]
        for window in windows:
            assert all(op.end_us <= window.start_us or op.start_us >= window.end_us for op in ops)
    assert trace.pipeline.comm_us == 500.0
    mine = {op.id: op for op in trace.ops}
    assert mine["s1.forward.0.0.0"].start_us >= mine["s0.forward.0.0.0"].end_us + 500.0
    assert mine["s0.backward.0.0.0"].start_us >= mine["s1.backward.0.0.0"].end_us + 500.0
    assert mine["s0.forward.0.0.0"].compare_us == 1.0 + 50.0


def test_a_stage_is_cut_where_it_waits_between_units():
    found = blocks(stage_record(0, 10.0))
    assert [block.unit and (block.unit.microbatch, block.unit.backward) for block in found] == [
        *(None, (0, False), (1, False), (0, True), (1, True), None)
    ]
    assert [block.waits for block in found] == [False, True, True, True, False, False]
    assert sum(len(block.events) for block in found) == 9


def test_a_stage_that_ran_another_schedule_cannot_be_put_together():
    with pytest.raises(UserError, match="has not run the schedule"):
        assemble([stage_record(0, 1.0), stage_record(1, 1.0)], Pipeline(2, 3), ComparisonCosts(0.0, 0.0), {})
