"""Slow workers in whole runs: one is named, and one is replaced without a change of the losses."""

import pytest
from agent_jobs import ft
from ft_runs import flags, ft_run

from ft.record import metrics

LAYOUT = "--use-distributed-optimizer --tensor-model-parallel-size 2"
SLOW = "--inject slow@step=12:rank=2:factor=4:for=600s"


@pytest.mark.long
def test_a_slow_worker_is_named_and_those_that_wait_for_it_are_not(corpus, tmp_path):
    done = ft_run(tmp_path / "run", flags(corpus, LAYOUT, 70), options=SLOW)
    assert done.code == 0, done.explain()
    found = done.named("straggler_found")
    assert [event.rank for event in found] == [2], done.explain()
    assert found[0].step <= 12 + 50 and found[0].detail["ratio"] > 1.5
    assert not done.named("fault_detected") and not done.named("straggler_gone")
    spans = metrics.read(done.folder)
    whole, own = (list(values[-1]) for values in ([s.step_ms for s in spans], [s.own_ms for s in spans]))
    assert max(whole) < 1.5 * min(whole), "all ranks wait for the slow one"
    assert own[2] > 1.5 * max(own[0], own[1], own[3]), (own, done.explain())
    assert "straggler  rank 2 (n0.w2): its own work takes" in _ft("status", done.folder)
    _ft("report", done.folder)
    report = (done.folder / "report.html").read_text()
    assert "Ranks: own work and waiting" in report and "it kept its place" in report


def test_a_slow_worker_is_replaced_and_the_losses_are_those_without(corpus, reference, tmp_path):
    done = ft_run(tmp_path / "run", flags(corpus, f"{LAYOUT} --ft-evict-stragglers 2.5", 100), options=SLOW)
    assert done.code == 0, done.explain()
    (fault,) = done.named("fault_detected")
    assert (fault.detail["category"], fault.detail["action"], fault.rank) == ("straggler", "replace", 2)
    assert [event.detail["joiners"] for event in done.named("epoch_opened")] == [[], [2]]
    assert len(done.named("resumed")) == 2 and not done.named("restarted"), done.explain()
    assert done.losses == reference(4, LAYOUT, 100)


def _ft(command: str, folder) -> str:
    done = ft(command, folder)
    assert done.returncode == 0, done.stdout
    return done.stdout
