"""Recoveries, goodput and the block at the terminal, from histories made by hand.

What is told of each kind of recovery is in ``conversations/report``.
"""

from pathlib import Path

import pytest
from histories import History

from ft.base import events
from ft.faults import verdict
from ft.observe.report.record import effective_of_one, goodput
from ft.observe.report.status import last_save, saves
from ft.record import recoveries as kinds
from ft.record.block import recovery_block
from ft.record.recoveries import SeatChange, recoveries
from ft.record.run import Run
from ft.show.text import count, seconds, table


def only(history: History) -> kinds.Recovery:
    found = recoveries(history.events)
    assert len(found) == 1
    return found[0]


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


def test_faults_are_ranked_by_gravity():
    ordered = [
        *(verdict.of_suspicion("16", "closed"), verdict.of_standstill("dp", 9, 8), verdict.of_lateness("idle", 3)),
        *(verdict.of_stall("dp", 9, 8), verdict.of_silence(9, "R"), verdict.of_error(["RuntimeError"], "no")),
        *(verdict.of_exit(-9), verdict.of_lost_agent("n1", "silent"), verdict.of_exit(2)),
    ]
    grades = [verdict.gravity(one.action, one.signal) for one in ordered]
    assert grades == sorted(set(grades))
    assert verdict.gravity(verdict.RESTART, "exit 1") == verdict.gravity(verdict.REPLACE, "SIGSEGV")


def test_seats_that_name_more_than_a_worker():
    history = replaced()
    for event in history.events:
        if event.name == events.EPOCH_OPENED:
            seats = event.detail["seats"]
            event.detail["seats"] = {rank: {"worker": worker, "node": "n0"} for rank, worker in seats.items()}
    assert only(history).seats == [SeatChange(3, "n0.w3", "n0.w4")]


def test_the_block_is_about_the_last_recovery():
    history = replaced()
    history.replacement(8.0, rank=0, by="n0.w5", step=50)
    assert "recovery 2" in recovery_block(history.events)


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
    going_on = goodput(steps(100), History().events, [])
    assert going_on.share == pytest.approx(1.0)
    assert goodput([{"step": 1}, {"step": 2, "step_time_s": "x"}], History().events, []).productive == 0.0


def test_durations_in_words():
    given = (None, float("nan"), 0.0, 0.0014, 0.065, 0.9996, 1.237, 12.34, 125.0, 4000.0)
    said = ("-", "-", "0 ms", "1.4 ms", "65 ms", "1.00 s", "1.24 s", "12.3 s", "2 min 05 s", "1 h 06 min")
    assert tuple(map(seconds, given)) == said
    assert (count(1, "step"), count(2, "step")) == ("1 step", "2 steps")
    assert table(("a", "long"), [("1", "x")], right=(1,)) == "a  long\n-  ----\n1     x"


def test_how_a_run_has_ended_in_words():
    def state(**detail) -> str:
        history = History()
        history.say(9.0, events.FINISHED, step=219, **detail)
        return Run(Path(), history.events).state

    assert state() == "finished"
    assert state(unsaved="the disk is full") == "finished, not saved"
    assert state(early="SIGTERM", steps=300) == "ended early (SIGTERM) at 219 of 300"
    assert state(early="SIGTERM", steps=300, unsaved="x") == "ended early (SIGTERM) at 219 of 300, not saved"
    assert state(early="a signal", steps=0) == "ended early (a signal)"


def test_the_last_save_and_its_age_in_words():
    history = History()
    assert last_save(history.events, 0.0) == "" and saves([]) == []
    history.say(5.0, events.SAVED, step=20, folder="ck")
    began = history.events[-1].wall - 5.0
    assert last_save(history.events, began + 35.0) == "step 20, 30.0 s ago"
    history.say(9.0, events.SAVE_FAILED, step=40, folder="ck", reason="the disk is full")
    failed = "THE LAST SAVE FAILED (step 40, 26.0 s ago): the disk is full; last saved: step 20, 30.0 s ago"
    assert last_save(history.events, began + 35.0) == failed
    history.say(12.0, events.SAVED, step=60, folder="ck")
    assert saves(history.events) == ["step 60, 0 ms before the last event"]
