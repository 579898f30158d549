"""Recoveries, goodput and the block at the terminal, from histories made by hand."""

from pathlib import Path

import pytest
from histories import START, History

from ft.base import events
from ft.faults import verdict
from ft.observe.report.record import effective_of_one, goodput
from ft.observe.report.status import last_save, saves
from ft.record import recoveries as kinds
from ft.record.block import recovery_block, what_differs
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


def test_a_replacement():
    recovery = only(replaced())
    assert recovery.outcome == kinds.REPLACED
    assert recovery.is_over
    assert (recovery.closed, recovery.epoch, recovery.attempts) == (0, 1, 1)
    assert recovery.seats == [SeatChange(3, "n0.w3", "n0.w4")]
    assert recovery.category == "host fault"
    assert recovery.signal == "SIGKILL"
    assert (recovery.step, recovery.steps_redone) == (20, 1)
    assert (recovery.rebuilt, recovery.kept, recovery.deferred, recovery.groups) == (9, 37, 8, 54)
    expected = {"detect": 0.02, "release": 0.07, "assemble": 0.04, "rebuild": 0.15, "restore": 0.05, "resume": 0.07}
    assert recovery.phases == pytest.approx(expected)
    assert list(recovery.phases) == list(kinds.PHASES)
    assert recovery.total == pytest.approx(0.4)
    assert sum(recovery.phases.values()) == pytest.approx(recovery.total)


def test_a_fault_nobody_injected_counts_from_its_detection():
    history = History()
    history.detect(5.02, 3, step=20)
    history.close(5.02)
    history.open(5.03, r3="n0.w4")
    history.repair(5.09, 20)
    recovery = only(history)
    assert "detect" not in recovery.phases
    assert recovery.injected == []
    assert recovery.total == pytest.approx(0.38)


def test_re_entry_in_place():
    history = History()
    history.inject(5.0, 1, kind="exception")
    history.detect(5.01, 1, step=7, action="in place", signal="exception")
    history.close(5.01)
    history.open(5.02)
    history.repair(5.05, 7)
    recovery = only(history)
    assert recovery.outcome == kinds.IN_PLACE
    assert recovery.seats == []


def test_a_failure_during_recovery_is_one_recovery_with_two_attempts():
    history = History()
    history.inject(5.0, 3)
    history.detect(5.02, 3, step=20)
    history.close(5.02)
    history.open(5.03, r3="n0.w4")
    history.inject(5.1, 1)
    history.detect(5.12, 1, step=20)
    history.close(5.12)
    history.open(5.2, r1="n0.w5")
    history.repair(5.3, 20)
    recovery = only(history)
    assert recovery.attempts == 2
    assert [change.rank for change in recovery.seats] == [1, 3]
    assert len(recovery.detected) == len(recovery.injected) == 2
    assert recovery.total == pytest.approx(0.61)
    assert sum(recovery.phases.values()) == pytest.approx(recovery.total)


def test_two_at_once():
    history = History()
    for rank in (1, 3):
        history.inject(5.0, rank)
        history.detect(5.02, rank, step=20)
    history.close(5.03)
    history.open(5.05, r1="n0.w4", r3="n0.w5")
    history.repair(5.1, 20)
    assert [event.rank for event in only(history).detected] == [1, 3]
    assert [event.rank for event in only(history).injected] == [1, 3]


@pytest.mark.parametrize("says_resumed", [True, False])
def test_a_warm_restart_and_what_comes_after_it(says_resumed):
    history = History()
    history.inject(5.0, 2)
    history.detect(5.02, 2, step=30)
    history.say(5.03, events.RESTARTED, number=1, reason="both copies of rank 2 are lost")
    history.seats = {rank: worker.replace("w", "v") for rank, worker in history.seats.items()}
    history.open(7.0)
    if says_resumed:
        history.say(7.5, events.RESUMED, epoch=1, step=10)
    history.replacement(9.0, rank=0, by="n0.v9", step=40)
    first, second = recoveries(history.events)
    assert first.outcome == kinds.RESTART
    assert first.total == pytest.approx(2.5 if says_resumed else 2.0)
    assert first.steps_redone == (20 if says_resumed else None)
    assert second.outcome == kinds.REPLACED
    assert second.total == pytest.approx(0.4)
    assert len(second.injected) == 1


def test_a_control_plane_that_was_killed():
    history = History()
    history.say(5.0, events.FAULT_INJECTED, node="n0", number=1, kind="kill-control")
    history.say(6.0, events.CONTROL_RESTARTED, node="n0", number=1)
    history.epoch = -1
    history.open(7.0)
    history.say(7.1, events.RESUMED, epoch=0, step=10)
    recovery = only(history)
    assert recovery.outcome == kinds.RESTART
    assert recovery.total == pytest.approx(2.1)
    assert recovery.steps_redone is None


def test_the_end_of_the_run_in_a_recovery():
    history = History()
    history.inject(5.0, 2)
    history.detect(5.02, 2, step=30, action="stop")
    history.say(5.1, events.STOPPED, code=1, message="no standby and no checkpoint")
    recovery = only(history)
    assert recovery.outcome == kinds.STOPPED
    assert not recovery.is_over
    assert "the run stopped" in recovery_block(history.events)


def test_a_run_that_is_told_to_stop_has_not_been_interrupted():
    history = History()
    history.say(5.1, events.STOPPED, code=130, message="")
    assert recoveries(history.events) == []


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


def test_a_standby_that_dies_interrupts_nobody():
    history = History()
    history.say(5.0, events.WORKER_LOST, node="n0", worker="n0.w4", reason="killed by SIGKILL")
    assert recoveries(history.events) == []


def test_an_earlier_fault_without_consequence_is_not_the_cause():
    history = History()
    history.inject(2.0, 3, kind="slow")
    history.inject(2.5, 3, kind="hang")
    history.inject(3.0, 3, kind="corrupt-snapshot")
    history.replacement(5.0, rank=3, by="n0.w4", step=20)
    recovery = only(history)
    assert [event.detail["kind"] for event in recovery.injected] == ["kill"]
    assert recovery.phases["detect"] == pytest.approx(0.02)


def test_a_broken_connection_may_be_seen_at_its_other_end():
    history = History()
    history.inject(5.0, 1, kind="drop")
    history.detect(5.5, 2, step=7, action="in place", signal="lost connection")
    history.close(5.5)
    history.open(5.52)
    history.repair(5.6, 7)
    assert only(history).phases["detect"] == pytest.approx(0.5)


def test_a_lost_node_is_traced_to_the_kill_of_the_node():
    history = History()
    history.say(5.0, events.FAULT_INJECTED, node="n0", number=1, kind="kill", where="time")
    history.detect(6.0, 2, step=7)
    history.close(6.0)
    history.open(6.1, r2="n0.w8")
    history.repair(6.2, 7)
    assert only(history).phases["detect"] == pytest.approx(1.0)


def two_nodes() -> History:
    """A survivor reports a broken connection before the loss of node n1, which broke it, is seen."""
    history = History()
    for rank in (2, 3):
        history.seats[str(rank)] = f"n1.w{rank - 2}"
    history.join(0.1, "n0", "gpu0136")
    history.join(0.2, "n1", "gpu0137")
    history.detect(5.0, 1, step=20, action="in place", signal="connection")
    history.close(5.0)
    history.lose_node(7.7, "n1", 2, 3, named="n1 (gpu0137)")
    history.open(7.8, r2="n0.w4", r3="n0.w5")
    history.repair(7.9, 20)
    return history


def test_the_gravest_fault_of_a_recovery_is_named_first_and_nodes_by_their_hosts():
    recovery = only(two_nodes())
    assert (recovery.signal, recovery.category) == ("node lost", "host fault")
    assert recovery.headline == "node n1 (gpu0137) is lost: nothing was heard of its agent for 3.7 s"
    assert recovery.detected_at == recovery.began.wall == START + 5.0, "phases count from the first fault"
    lines = recovery_block(two_nodes().events).splitlines()
    assert lines[1].split(maxsplit=1)[1].startswith("node n1 (gpu0137) is lost, with logical ranks 2-3; worker n0.w1")
    assert lines[2].split(maxsplit=1)[1].startswith("host fault -> replace: node n1 (gpu0137) is lost: nothing was")


def test_a_worker_is_named_with_the_host_of_its_node_in_runs_of_several_nodes():
    one, two = replaced(), History()
    for rank, node in enumerate(("n0", "n1")):
        two.join(0.1, node, f"gpu{rank}")
    two.replacement(5.0, rank=3, by="n0.w4", step=20)
    one.join(0.1, "n0", "gpu0")
    assert "worker n0.w3 (logical rank 3, node n0): SIGKILL" in recovery_block(one.events)
    assert "worker n0.w3 (logical rank 3, node n0 (gpu0)): SIGKILL" in recovery_block(two.events)
    assert only(two).headline == "n0.w3 on n0 (gpu0): the process was ended by SIGKILL"


def test_faults_are_ranked_by_gravity():
    ordered = [
        *(verdict.of_suspicion("16", "closed"), verdict.of_standstill("dp", 9, 8), verdict.of_lateness("idle", 3)),
        *(verdict.of_stall("dp", 9, 8), verdict.of_silence(9, "R"), verdict.of_error(["RuntimeError"], "no")),
        *(verdict.of_exit(-9), verdict.of_lost_agent("n1", "silent"), verdict.of_exit(2)),
    ]
    grades = [verdict.gravity(one.action, one.signal) for one in ordered]
    assert grades == sorted(set(grades))
    assert verdict.gravity(verdict.RESTART, "exit 1") == verdict.gravity(verdict.REPLACE, "SIGSEGV")


def test_a_step_that_some_had_committed_is_redone_and_counted_once():
    history = History()
    history.detect(5.0, 3, step=21)
    history.close(5.0)
    history.open(5.1, r3="n0.w4")
    history.repair(5.2, 20)
    assert only(history).steps_redone == 1


def test_a_redone_step_that_differs_belongs_to_its_recovery():
    history = replaced()
    for rank, step in ((2, 22), (0, 21), (1, 21)):
        history.say(6.0, events.STEP_DIFFERS, rank=rank, epoch=1, step=step, differences=[f"of {step}", "more"])
    recovery = only(history)
    assert what_differs(recovery) == "step 21 differs from its first try, on 2 ranks: of 21; more"
    assert what_differs(only(replaced())) == ""


def test_seats_that_name_more_than_a_worker():
    history = replaced()
    for event in history.events:
        if event.name == events.EPOCH_OPENED:
            seats = event.detail["seats"]
            event.detail["seats"] = {rank: {"worker": worker, "node": "n0"} for rank, worker in seats.items()}
    assert only(history).seats == [SeatChange(3, "n0.w3", "n0.w4")]


def test_the_block_says_it_all_in_few_aligned_lines():
    lines = recovery_block(replaced().events).splitlines()
    assert 8 <= len(lines) <= 12
    text = "\n".join(lines)
    for words in (
        *(
            "recovery 1",
            "replaced in 400 ms",
            "worker n0.w3 (logical rank 3, node n0): SIGKILL",
            "host fault -> replace",
        ),
        *("rank 3: n0.w3 -> n0.w4", "committed step 20", "1 step redone", "9 of 54 groups rebuilt"),
    ):
        assert words in text
    bars = [line for line in lines if "|" in line]
    assert [line.split()[0] for line in bars] == list(kinds.PHASES)
    assert len({(line.index("|"), line.rindex("|")) for line in bars}) == 1
    assert max(map(len, lines)) <= 100
    assert text.isascii()


def test_the_block_is_about_the_last_recovery():
    history = replaced()
    history.replacement(8.0, rank=0, by="n0.w5", step=50)
    assert "recovery 2" in recovery_block(history.events)


def test_the_block_shortens_what_is_long():
    history = History(16)
    for rank in range(8):
        history.detect(5.0, rank, step=3, signal="a long story " * 20)
    history.close(5.0)
    history.open(5.1, **{f"r{rank}": f"n0.w{rank + 20}" for rank in range(8)})
    history.repair(5.2, 3)
    lines = recovery_block(history.events).splitlines()
    assert max(map(len, lines)) <= 100
    assert "and 5 more" in "\n".join(lines)


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
