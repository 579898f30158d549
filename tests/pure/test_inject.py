"""Faults that are drawn from a seed, their ways to the workers, and what becomes of them.

What can be asked for, and what is refused, is in ``conversations/faults``.
"""

import statistics
from itertools import pairwise

import pytest

from ft import faults as inject
from ft.base import events
from ft.base.errors import NOT_INJECTED, UserError
from ft.commands.protection import judge_faults
from ft.faults import Fault, from_json, parse, schedule, to_json, write
from ft.faults.spec import MOST_OF_A_DISTRIBUTION, Distribution
from ft.observe.report.page import page
from ft.observe.report.record import load
from ft.observe.report.text import summary

NODES = ["n0", "n1", "n2"]


def planned(text: str, seed: int = 0, world_size: int = 8, nodes=NODES) -> list[Fault]:
    return schedule(parse(text), world_size, nodes, seed)


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
    assert inject.planned({"FT_FAULTS": str(file)}) == faults == from_json(to_json(faults))
    assert [path.name for path in tmp_path.iterdir()] == ["faults.n0.json"]
    with pytest.raises(UserError, match="cannot be read"):
        inject.planned({"FT_FAULTS": str(tmp_path / "none.json")})


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
