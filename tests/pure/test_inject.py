"""What is asked for with --inject, and what becomes of it."""

import json
import statistics
from itertools import pairwise

import pytest

from ft import faults as inject
from ft.base import events
from ft.base.errors import NOT_INJECTED, UserError
from ft.commands.protection import judge_faults
from ft.faults import Fault, from_json, parse, read_scenario, schedule, to_json, write
from ft.faults.spec import MOST_OF_A_DISTRIBUTION, Distribution, parse_duration
from ft.faults.table import NAMES
from ft.observe.report.page import page
from ft.observe.report.record import load
from ft.observe.report.text import summary

NODES = ["n0", "n1", "n2"]


def planned(text: str, seed: int = 0, world_size: int = 8, nodes=NODES) -> list[Fault]:
    return schedule(parse(text), world_size, nodes, seed)


def test_the_spec_of_the_readme():
    assert planned("kill@step=20:rank=3") == [Fault(1, "kill", step=20, rank=3)]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hang@time=1m:rank=0", Fault(1, "hang", time=60.0, rank=0)),
        ("hang@step=3:rank=0:for=500ms", Fault(1, "hang", step=3, rank=0, seconds=0.5)),
        ("slow@step=3:rank=1", Fault(1, "slow", step=3, rank=1, seconds=10.0)),
        ("slow@step=3:rank=1:factor=2.5:for=4", Fault(1, "slow", step=3, rank=1, seconds=4.0, factor=2.5)),
        ("exception@step=1:rank=7:error=software", Fault(1, "exception", step=1, rank=7, error="software")),
        ("kill@step=2:rank=1:phase=backward", Fault(1, "kill", step=2, rank=1, phase="backward")),
        ("corrupt-snapshot@step=2:rank=1:copies=peer", Fault(1, "corrupt-snapshot", step=2, rank=1, copies="peer")),
        ("drop@time=0:rank=2", Fault(1, "drop", time=0.0, rank=2)),
        ("partition@step=5:node=n2", Fault(1, "partition", step=5, node="n2", seconds=10.0)),
        ("kill@step=5:node=1", Fault(1, "kill", step=5, node="n1")),
        ("kill-control@time=2h", Fault(1, "kill-control", time=7200.0)),
        (" kill@step=2:rank=1 , ", Fault(1, "kill", step=2, rank=1)),
    ],
)
def test_specs(text, fault):
    assert planned(text) == [fault]
    assert from_json(to_json(planned(text))) == [fault]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no fault"]),
        ("kil@step=1", ["kil", *NAMES]),
        ("kill", ["when", "step"]),
        ("kill@", ["KEY=VALUE"]),
        ("kill@step", ["'step'", "KEY=VALUE"]),
        ("kill@step=0", ["step=0", "not a whole number from 1"]),
        ("kill@step=x:rank=1", ["step=x", "kill@step=x:rank=1"]),
        ("kill@step=1:time=3", ["step and time"]),
        ("kill@step=1:step=2", ["step is given twice"]),
        ("kill@step=1:wher=3", ["wher", "rank", "phase"]),
        ("kill@step=1:rank=-1", ["rank=-1", "random"]),
        ("kill@step=1:rank=8", ["logical rank 8", "among 8", "rank=7"]),
        ("kill@step=1:node=n9", ["n9", "n0, n1, n2"]),
        ("kill@step=1:rank=1:node=n1", ["rank or a node"]),
        ("kill@step=1:phase=sideways", ["phase=sideways", "backward", "transfer"]),
        ("kill@time=1:phase=forward", ["a phase needs a step"]),
        ("partition@step=1:phase=forward", ["phase"]),
        ("partition@step=1:rank=2", ["node"]),
        ("kill-control@step=1:rank=2", ["one control plane"]),
        ("kill@step=1:for=3s", ["for has no meaning for kill", "hang"]),
        ("kill@step=1:factor=3", ["slow"]),
        ("slow@step=1:factor=1", ["factor=1"]),
        ("slow@step=1:for=soon", ["for=soon", "500ms"]),
        ("hang@step=1:error=user", ["exception"]),
        ("exception@step=1:error=odd", ["error=odd", "software"]),
        ("corrupt-snapshot@step=1:copies=both", ["copies=both", "peer"]),
        ("kill@step=1:count=2", ["count", "every"]),
        ("kill@every=normal(mean=3)", ["every=normal", "weibull"]),
        ("kill@every=exponential(scale=3)", ["exponential takes mean"]),
        ("kill@every=weibull(shape=0.7)", ["weibull takes shape and scale"]),
        ("kill@every=weibull(shape=0.01,scale=1)", ["shape"]),
        ("kill@every=exponential(mean=0)", ["mean=0"]),
        ("kill@every=exponential(mean=0steps)", ["0steps", "steps"]),
        ("kill@every=exponential(mean=5steps):until=3m", ["until is a time", "count"]),
        ("kill@trace=failures", ["no key named 'trace'", "time"]),
        ("kill@step=1:rank=1,hang@stp=2", ["hang@stp=2", "stp"]),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(text, words):
    with pytest.raises(UserError) as raised:
        planned(text)
    assert "fix: " in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_faults_are_numbered_by_step_then_by_time():
    faults = planned("kill@time=9,kill@step=30:rank=1,hang@time=3:rank=0,drop@step=4:rank=2")
    assert [(f.number, f.step, f.time) for f in faults] == [(1, 4, None), (2, 30, None), (3, None, 3.0), (4, None, 9.0)]


def test_a_seed_decides_everything():
    text = "kill@every=exponential(mean=60s):count=40,hang@step=3,partition@every=weibull(shape=2,scale=9m):count=5"
    assert planned(text, seed=5) == planned(text, seed=5)
    assert planned(text, seed=5) != planned(text, seed=6)


@pytest.mark.parametrize("family", ["exponential(mean=5steps)", "weibull(shape=0.7,scale=4 steps)"])
def test_a_seed_decides_the_steps_of_faults_by_step(family):
    faults = planned(f"kill@every={family}:rank=random:count=200", seed=5)
    assert faults == planned(f"kill@every={family}:rank=random:count=200", seed=5)
    assert faults != planned(f"kill@every={family}:rank=random:count=200", seed=6)
    steps = [fault.step for fault in faults]
    assert all(fault.time is None for fault in faults) and steps == sorted(steps) and steps[0] >= 1
    assert steps[-1] / 200 == pytest.approx(parse(f"kill@every={family}")[0].every.mean, rel=0.2)
    assert {fault.rank for fault in faults} == set(range(8))


def test_a_fault_added_at_the_end_changes_no_other():
    first = planned("kill@every=exponential(mean=60s):count=4", seed=5)
    both = planned("kill@every=exponential(mean=60s):count=4,hang@time=99h", seed=5)
    assert both[:4] == first


def test_random_victims_reach_every_rank_and_spare_the_first_node():
    kills = planned("kill@every=exponential(mean=1s):count=400:rank=random", seed=3)
    assert {fault.rank for fault in kills} == set(range(8))
    partitions = planned("partition@every=exponential(mean=1s):count=60", seed=3)
    assert {fault.node for fault in partitions} == {"n1", "n2"}
    assert planned("partition@step=1", nodes=["n0"])[0].node == "n0"


@pytest.mark.parametrize("distribution", [Distribution("exponential", 60.0), Distribution("weibull", 90.0, 0.7)])
def test_means_of_the_distributions(distribution):
    seeds = range(20)
    gaps = []
    for seed in seeds:
        text = (
            "kill@every=exponential(mean=60s)" if distribution.shape == 1 else "kill@every=weibull(shape=0.7,scale=90)"
        )
        times = [0.0, *(fault.time for fault in planned(f"{text}:count=500", seed=seed))]
        gaps += [b - a for a, b in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(distribution.mean, rel=0.05)


def test_until_count_and_horizon_end_a_distribution():
    assert all(f.time <= 600 for f in planned("kill@every=exponential(mean=1s):until=10m"))
    assert len(planned("kill@every=exponential(mean=1ms)")) == MOST_OF_A_DISTRIBUTION
    assert schedule(parse("kill@every=exponential(mean=1s)"), 8, NODES, 0, horizon_s=5.0)[-1].time <= 5.0


def test_a_plan_of_any_length_reaches_the_workers_through_a_file(tmp_path):
    faults = planned("kill@every=exponential(mean=60s):rank=random:count=4000")
    file = tmp_path / "faults.n0.json"
    write(file, faults)
    assert file.stat().st_size > 128 * 1024, "more than the kernel lets into an environment variable"
    assert inject.planned({"FT_FAULTS": str(file)}) == faults
    assert [path.name for path in tmp_path.iterdir()] == ["faults.n0.json"]
    with pytest.raises(UserError, match="cannot be read"):
        inject.planned({"FT_FAULTS": str(tmp_path / "none.json")})


def test_durations():
    assert [parse_duration(text) for text in ("90", "90s", "1.5m", "2min", "1h", "2d", "250ms", 7, 0.5)] == [
        *(90.0, 90.0, 90.0, 120.0, 3600.0, 172800.0, 0.25, 7.0, 0.5)
    ]
    for text in ("", "s", "-3s", "1w", "nan", "inf", "1e999"):
        with pytest.raises(ValueError):
            parse_duration(text)


def test_scenario_files_in_all_formats(tmp_path):
    (tmp_path / "a.toml").write_text(
        'seed = 7\nfaults = ["kill@step=20:rank=3", {kind = "slow", time = "30s", rank = 2, for = "5s"}, '
        '"kill@time=7:rank=1"]\n'
    )
    values = {
        "seed": 7,
        "faults": [
            {"kind": "kill", "step": 20, "rank": 3},
            {"kind": "slow", "time": 30, "rank": 2, "for": 5},
            "kill@time=7:rank=1",
        ],
    }
    (tmp_path / "a.json").write_text(json.dumps(values))
    toml, plain = read_scenario(tmp_path / "a.toml"), read_scenario(tmp_path / "a.json")
    assert toml.seed == plain.seed == 7
    assert schedule(toml.specs, 4, NODES, 7) == schedule(plain.specs, 4, NODES, 7)
    (tmp_path / "a.yaml").write_text(
        "seed: 7\nfaults:\n  - kill@step=20:rank=3\n  - kind: slow\n    time: 30s\n    rank: 2\n    for: 5\n"
        "  - {kind: kill, time: 7, rank: 1}\n"
    )
    yaml = read_scenario(tmp_path / "a.yaml")
    assert yaml.seed == 7 and schedule(yaml.specs, 4, NODES, 7) == schedule(plain.specs, 4, NODES, 7)
    (tmp_path / "b.json").write_text(json.dumps(values["faults"]))
    assert read_scenario(tmp_path / "b.json").seed is None


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("s.json", "{", ["is not JSON"]),
        ("s.json", "3", ["not a list of faults"]),
        ("s.json", '{"fault": []}', ["not a list of faults"]),
        ("s.json", '{"faults": [], "seed": "x"}', ["seed 'x'"]),
        ("s.json", '{"faults": [3]}', ["fault 1", "3"]),
        ("s.json", '{"faults": ["kill@step=1", {"kind": "kill"}]}', ["fault 2", "when"]),
        ("s.json", '[{"kind": "kill", "step": [1]}]', ["fault 1", "step=[1]"]),
        ("s.yaml", "faults: [", ["is not YAML", "line 1"]),
        ("s.yml", "just words", ["not a list of faults"]),
        ("s.yaml", "faults: ['kill@step=1', {kind: kil, step: 2}]", ["fault 2", "no fault named 'kil'"]),
        ("s.yaml", "faults: [!!python/object/apply:os.getpid []]", ["is not YAML", "python/object"]),
        ("s.toml", "faults = [", ["is not TOML"]),
    ],
)
def test_a_wrong_scenario_is_named_in_each_format(name, text, words, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as raised:
        read_scenario(tmp_path / name)
    for word in (name, *words):
        assert word in str(raised.value)


def test_a_missing_scenario_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml"):
        read_scenario(tmp_path / "none.toml")


@pytest.mark.parametrize("text", ["[", '[{"number": 1, "sort": "kill"}]', "[3]"])
def test_a_broken_environment_is_said(text):
    with pytest.raises(UserError, match="not a list of planned faults"):
        from_json(text)


def test_no_faults_in_the_environment():
    assert inject.planned({}) == inject.planned({"FT_FAULTS": ""}) == from_json("[]") == []


def test_faults_in_words():
    assert str(Fault(1, "kill", step=20, rank=3, phase="backward")) == "kill of rank 3 at step 20 (backward)"
    assert str(Fault(2, "partition", time=3.0, node="n1")) == "partition of node n1 at 3.0 s"


# --- what has not happened --------------------------------------------------------------------------------------------


def leave(folder, faults: list[Fault], *injected: int) -> None:
    """Leave the files of a run in ``folder``: what was planned, and the numbers of the faults that were injected."""
    folder.mkdir(exist_ok=True)
    write(folder / "faults.n0.json", faults)
    with events.EventLog(folder / "events.jsonl") as log:
        log.write(events.now(events.RUN_STARTED, command=[], world_size=4))
        for number in injected:
            log.write(events.now(events.FAULT_INJECTED, node="n0", number=number, kind="kill"))


def test_faults_that_have_not_happened_are_named_in_the_report_and_strictly_they_are_an_exit_code(tmp_path):
    leave(tmp_path, planned("kill@step=5:rank=1,hang@step=9:rank=2:phase=evaluate"), 1)
    sentence = "1 of 2 planned fault(s) did not happen: hang of rank 2 at step 9 (evaluate)"
    told: list[str] = []
    codes = [judge_faults(code, tmp_path, strict, told.append) for code, strict in ((0, False), (0, True), (1, True))]
    assert codes == [0, NOT_INJECTED, 1] and told == [sentence] * 3
    record = load(tmp_path)
    assert f"faults     {sentence}" in summary(record, []) and sentence in page(record, b"")

    leave(tmp_path, planned("kill@step=5:rank=1,hang@step=9:rank=2:phase=evaluate"), 2)
    assert judge_faults(0, tmp_path, True, told.append) == 0 and len(told) == 3


def test_faults_of_replicas_that_have_not_happened_are_named_with_their_replica(tmp_path):
    first, second = planned("kill@step=5:rank=1,hang@step=9:rank=0")
    leave(tmp_path / "replica-0", [first], 1)
    leave(tmp_path / "replica-1", [second])
    assert inject.missed(tmp_path) == ("1 of 2 planned fault(s) did not happen: hang of rank 0 at step 9 of replica-1")
    leave(tmp_path / "replica-0", [])  # a replica that has started again gets only the faults that are left
    assert inject.missed(tmp_path).startswith("1 of 2")
    assert inject.missed(tmp_path / "replica-0") == "" and inject.missed(tmp_path / "nowhere") == ""
