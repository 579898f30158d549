"""``ft dmr estimate``: traces that can have happened, the paper's configurations, and input that cannot work."""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from ft import cli
from ft.lab.estimate.cluster import DEVICES, MODELS, Cluster, fitted
from ft.lab.estimate.command import KEYS, EstimateQuestion, calibrated, cluster_of, estimate, question, shares
from ft.lab.estimate.profile import profile
from ft.systems.dmr.plan.check import problems
from ft.systems.dmr.plan.file import read_trace, write_trace
from ft.systems.dmr.plan.predict import Clock
from ft.systems.dmr.plan.trace import OPTIMIZER

SCENARIOS = sorted((Path(__file__).parent.parent.parent / "examples" / "dmr").glob("*.toml"))
SMALL = "--model llama3-8b --gpus 4 --tp 2 --pp 2 --batch 2"


def asked_for(words: str) -> EstimateQuestion:
    parser = argparse.ArgumentParser()
    KEYS.add_flags(parser)
    return question(parser.parse_args(words.split()))


def said(words: str, capsys) -> str:
    assert cli.main(["dmr", "estimate", *words.split()]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_configuration_gets_a_plan_whose_phases_never_make_it_worse(path):
    # With fewer microbatches four stages idle for more than the share that is asked for.
    asked = asked_for(f"{path} --batch {2 if 'pp = 4' in path.read_text() else 1}")
    found = estimate(asked, cluster_of(asked))
    assert not list(problems(found))
    overheads = [phase.overhead for phase in found.phases]
    assert len(overheads) == 4 and overheads == sorted(overheads, reverse=True)
    assert 0 < overheads[3] < overheads[1] < overheads[0]
    assert found.predicted.peak_bytes <= asked.budget


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "printed", "batches"),
    [
        ("llama3-70b_80gb", 0.033, (16,)),
        ("mistral-large-123b_80gb", 0.061, (16,)),
        ("llama4-scout_94gb", 0.098, (16,)),
        ("llama4-scout_141gb", 0.081, (16, 32, 64)),
    ],
)
def test_the_overhead_is_at_or_below_the_paper_s(name, printed, batches):
    """One of each model, and as the paper has it, the mean of three batches, where that is the closest."""
    path = SCENARIOS[0].with_name(f"{name}.toml")
    asked = [asked_for(f"{path} --batch {batch}") for batch in batches]
    cluster = cluster_of(asked[len(asked) // 2])
    assert fmean(estimate(each, cluster).predicted.overhead for each in asked) <= printed


@pytest.mark.parametrize(
    ("model", "pp", "others"),
    [
        ("llama3-8b", 1, {}),
        ("llama3-8b", 3, {"early_stop": True}),
        ("llama3-8b", 2, {"recompute": "none", "micro": 2, "batch": 4}),
        ("llama3-8b", 2, {"chunks": 4, "early_stop": True}),
        ("llama4-scout", 2, {"early_stop": True}),
        ("llama4-scout", 2, {"tp": 4, "ep": 2}),
    ],
)
def test_a_trace_is_one_that_can_have_happened(model, pp, others, tmp_path):
    cluster = Cluster(DEVICES["h200"], 8 * pp)
    layout = fitted(MODELS[model], cluster, pp, **({"batch": 2, "dp": 1} | others))
    trace = profile(MODELS[model], layout, cluster)
    write_trace(tmp_path / "prof.json", trace)
    again = read_trace(tmp_path / "prof.json")
    assert len(again.ops) == len(trace.ops) and again.windows == trace.windows
    assert Clock(trace).none_us() == pytest.approx(max(op.end_us for op in trace.ops), rel=1e-9)
    names = [op.name for op in trace.ops]
    for once in ("embedding", "embedding.backward", "logits", "loss.backward"):
        assert names.count(once) == layout.microbatches
    assert {op.layer for op in trace.ops} == set(range(MODELS[model].layers + 2))
    for stage in range(pp):
        _nothing_overlaps_and_nothing_is_left_out(trace, stage)


def _nothing_overlaps_and_nothing_is_left_out(trace, stage):
    """Operators and windows of a stage follow one another without gaps, up to the optimizer."""
    spans = [(op.start_us, op.end_us) for op in trace.ops if op.stage == stage and op.phase != OPTIMIZER]
    spans += [(window.start_us, window.end_us) for window in trace.windows if window.stage == stage]
    spans.sort()
    [optimizer] = [op for op in trace.ops if op.stage == stage and op.phase == OPTIMIZER]
    assert spans[0][0] == 0 and spans[-1][1] == pytest.approx(optimizer.start_us)
    for (_, end), (start, _) in pairwise(spans):
        assert start == pytest.approx(end, abs=1e-3)


def test_early_stop_recomputes_up_to_the_last_product_and_marks_it():
    cluster = Cluster(DEVICES["h200"], 8)
    layout = fitted(MODELS["llama3-8b"], cluster, 1, dp=1, batch=1, early_stop=True)
    trace = profile(MODELS["llama3-8b"], layout, cluster)
    layer = [op for op in trace.ops if op.layer == 1]
    recomputed = [op.name for op in layer if op.phase == "recompute"]
    assert recomputed[-1] == "mlp_act" and "mlp_down" not in recomputed
    [last] = [op for op in layer if op.ac_segment is not None and op.is_segment_last]
    assert (last.name, last.comm_tail) == ("mlp_down", True)


@pytest.mark.parametrize(("target", "share"), [("idle", 0.68), ("idle", 0.5), ("naive_overhead", 0.36)])
def test_calibration_hits_its_target(target, share):
    model, cluster = MODELS["llama3-70b"], Cluster(DEVICES["h200"], 24)
    layout = fitted(model, cluster, 3, batch=16)
    found = calibrated(model, layout, cluster, target, share)
    assert getattr(shares(model, layout, found), target) == pytest.approx(share, abs=1e-6)


def test_slower_transfers_and_more_memory_never_make_dmr_dearer():
    def overhead(slowdown: float, budget: float) -> float:
        asked = asked_for(f"--model llama3-8b --gpus 8 --tp 4 --pp 2 --batch 2 --memory {budget}")
        return estimate(asked, Cluster(DEVICES["h200"], 8, slowdown=slowdown)).predicted.overhead

    assert overhead(1.0, 60e9) >= overhead(3.0, 60e9) >= overhead(9.0, 60e9)
    assert overhead(3.0, 36e9) >= overhead(3.0, 40e9) >= overhead(3.0, 140e9)


def test_programs_get_the_keys_of_a_plan_and_the_scenario(capsys):
    found = json.loads(said(f"{SMALL} --json", capsys))
    assert {"model", "gpus", "batch", "slowdown", "idle", "predicted", "phases", "sets", "assumed"} <= set(found)
    assert all(stage["alone"] <= stage["planned"] for stage in found["memory"]["stages"].values())


def test_the_planner_makes_the_same_plan_of_the_profile_that_is_written(capsys, tmp_path):
    estimated = json.loads(said(f"{SMALL} --memory 80GB --out {tmp_path}/prof.json --json", capsys))
    assert cli.main(["dmr", "plan", f"{tmp_path}/prof.json", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned == {key: estimated[key] for key in planned}


def test_flags_override_a_scenario(capsys, tmp_path):
    path = tmp_path / "one.toml"
    path.write_text(
        '[model]\nmodel = "llama3-8b"\n[cluster]\ngpus = 2\n[layout]\nbatch = 1\n[calibration]\nidle = 0.9\n'
    )
    found = json.loads(said(f"{path} --gpus 4 --pp 2 --naive-overhead 0.4 --json", capsys))
    assert (found["gpus"], found["pp"]) == (4, 2) and found["slowdown"] != 1
