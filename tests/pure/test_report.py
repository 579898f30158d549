"""Goodput, durations and tenures of histories made by hand; and ``ft status`` of a run whose launcher is dead.

What is told of recoveries, and what ``ft report`` and ``ft status`` say of a folder, is in ``conversations/report`` and
``conversations/record``.
"""

import os
import subprocess
import time

import pytest
from histories import START, History, write

from ft import cli
from ft.base import events
from ft.observe.report import status, timeline
from ft.observe.report.record import effective_of_one, goodput, load, rank_intervals
from ft.platform import election, processes
from ft.record import recoveries as kinds
from ft.record import run as records
from ft.record.block import recovery_block
from ft.record.recoveries import recoveries
from ft.show import palette
from ft.show.axes import rows


def steps(number: int, step_time_s: float = 0.1) -> list[dict]:
    return [{"step": s, "loss": 1.0, "step_time_s": step_time_s} for s in range(1, number + 1)]


def replaced() -> History:
    history = History()
    history.replacement(5.0, rank=3, by="n0.w4", step=20)
    return history


def test_no_fault_is_no_recovery():
    history = History()
    history.finish(9.0, 80)
    assert recoveries(history.events) == []
    assert recoveries([]) == []
    assert recovery_block(history.events) == ""


@pytest.mark.parametrize("length", range(3, 12))
def test_a_recovery_under_way_is_known_as_far_as_it_has_come(length):
    history = replaced()
    history.events = history.events[:length]
    found = recoveries(history.events)
    for recovery in found:
        assert recovery.outcome == (kinds.REPLACED if recovery.ended else kinds.UNDER_WAY)
        assert sum(recovery.phases.values()) <= 0.4
        assert recovery_block(history.events)
    begun = any(event.name == events.EPOCH_CLOSED for event in history.events)
    assert len(found) == begun


def test_goodput():
    history = replaced()
    history.finish(11.0, 90)
    found = recoveries(history.events)
    times = goodput(steps(90), history.events, found)
    assert times.wall == pytest.approx(10.0)
    assert times.startup == pytest.approx(1.0)
    assert times.productive == pytest.approx(9.0)
    assert times.recovering == pytest.approx(0.4)
    assert times.other == pytest.approx(0.6)
    assert times.share == pytest.approx(0.9)
    assert times.step == pytest.approx(0.1)


def test_the_effective_time_of_one_replica_that_waits_for_its_recoveries():
    history = replaced()
    history.finish(11.0, 90)
    found = recoveries(history.events)
    effective = effective_of_one(goodput(steps(90), history.events, found), found)
    assert effective.measured == pytest.approx(90 * 0.1 / 10.0)
    assert (effective.failures, effective.between_s) == (1, pytest.approx(10.0))
    assert effective.stall_s == effective.repair_s == pytest.approx(0.4)
    assert effective.formula == pytest.approx(0.96)
    assert effective_of_one(goodput([], [], []), []).measured is None
    undisturbed = effective_of_one(goodput(steps(10), [], []), [])
    assert (undisturbed.measured, undisturbed.formula) == (pytest.approx(1.0), None)


def test_goodput_of_next_to_nothing():
    empty = goodput([], [], [])
    assert (empty.share, empty.step, empty.wall) == (None, None, 0.0)
    assert goodput(steps(10), [], []).share == pytest.approx(1.0)
    assert goodput(steps(100), History().events, []).share == pytest.approx(1.0)
    assert goodput([{"step": 1}, {"step": 2, "step_time_s": "x"}], History().events, []).productive == 0.0


def test_tenures_end_at_the_fault():
    history = replaced()
    history.say(10.1, events.RESTARTED, number=1, reason="both copies of rank 2 are lost")
    history.seats = {rank: worker.replace("w", "v") for rank, worker in history.seats.items()}
    history.open(12.0)
    history.finish(16.0, 100)
    held = rank_intervals(history.events, recoveries(history.events))
    third = [(t.worker, round(t.begin, 2), round(t.end, 2), t.is_first) for t in held if t.rank == 3]
    assert third == [("n0.w3", 0.0, 4.0, True), ("n0.w4", 4.03, 9.1, False), ("n0.v4", 11.0, 15.0, True)]


def test_the_picture_has_a_mark_for_each_wrong_attempt(tmp_path):
    history = replaced()
    for at, rank, step, attempt in ((6.0, 1, 20, 1), (6.0, 2, 20, 1), (7.0, 3, 40, 1), (7.1, 3, 40, 2)):
        told = {"operator": "mm", "phase": "backward", "layer": 3, "microbatch": 2, "how": "at once", "note": ""}
        place = {"rank": rank, "epoch": 1, "step": step, "attempt": attempt, "host": "a", "device": "cuda:1"}
        history.say(at, events.DMR_MISMATCH, **place, **told)
    history.finish(11.0, 90)
    run = load(write(tmp_path, history, steps=90))
    _, (lanes, loss) = rows("", [2.0, 2.0])
    timeline._draw_workers(lanes, run)
    timeline._draw_loss(loss, run)
    marks = [line for line in lanes.lines if line.get_marker() == "D"]
    assert sorted(int(line.get_ydata()[0]) for line in marks) == [1, 2, 3, 3]
    legend = [text.get_text() for text in lanes.get_legend().get_texts()]
    assert legend == ["replaced", "mismatch (DMR)"]
    dotted = [line for line in loss.lines if line.get_color() == palette.MISMATCH]
    assert sorted(int(line.get_xdata()[0]) for line in dotted) == [20, 40]


def test_events_are_put_in_the_order_of_time(tmp_path):
    history = History()
    history.say(9.0, events.RESUMED, epoch=1, step=80)
    history.say(5.0, events.RESUMED, epoch=1, step=40)
    found = records.load(write(tmp_path / "a", history)).events
    assert [event.wall - START for event in found if event.step is not None][-2:] == [5.0, 9.0]


def dead_process() -> str:
    """The identity of a process that has ended."""
    process = subprocess.Popen(["sleep", "60"])
    known = processes.identity(process.pid)
    process.kill()
    process.wait()
    return known


@pytest.mark.parametrize("extra", [[], ["--watch"], ["--json"]])
def test_status_ends_with_1_where_the_launcher_is_dead(extra, tmp_path, capsys):
    folder = write(tmp_path / "a", History(), steps=3)
    (folder / "status.json").write_text(f'{{"phase": "running", "updated": {time.time()}, "nodes": {{"n0": "up"}}}}')
    election.renew(folder, election.LeaseRecord(0, 0, "", "n0", 1, launcher=processes.identity(os.getpid())))
    assert cli.main(["status", str(folder)]) == 0
    election.renew(folder, election.LeaseRecord(0, 0, "", "n0", 1, launcher=dead_process()))
    assert cli.main(["status", str(folder), *extra]) == 1
    assert "the process ft run on this host has disappeared" in capsys.readouterr().out


def test_who_has_the_lease_elsewhere_is_gone_after_a_while_without_a_renewal(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "_SUCCESSION_S", 0.1)
    elsewhere = "another-boot 7 99"
    election.renew(tmp_path, election.LeaseRecord(0, 0, "", "n0", 1, launcher=elsewhere))
    assert status.gone(tmp_path, 10.0, 2) == "", "another one may be taking over"
    assert "no process renews the lease" in status.gone(tmp_path, status.GONE_S + 1, 2)
    assert "no process renews the lease" in status.gone(tmp_path, None, 2, is_steady=True)
    assert status.gone(tmp_path / "nowhere", 1000.0, 1) == "", "no lease was ever taken"
