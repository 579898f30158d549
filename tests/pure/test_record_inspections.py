"""The stored inspections of a run: parts of several nodes, ranks that nobody speaks of, and files that cannot be
read."""

import json
import threading
from dataclasses import replace

import pytest
from control_world import World
from histories import History, write
from waiting import eventually

from ft import cli
from ft.base import events
from ft.base.errors import UserError
from ft.faults.hang.inspection import DEAD, Operation, Rank, Thread
from ft.job.agent.console import RecoveryNews
from ft.job.agent.inspections import Inspections
from ft.job.control.inspections import Answers
from ft.job.messages import Inspect, Inspected, InspectionAnswered
from ft.net.codec import to_json
from ft.record import block, inspections
from ft.record.block import recovery_block

SEATS = {0: "n0.w0", 1: "n0.w1", 2: "n1.w0"}
RANK = Rank(0, "n0.w0", "n0", counts={"dp": 3}, operations=(Operation("dp", "all_reduce", 3, sizes=("float32[4]",)),))


def part(run, node, *ranks, number=1, wall=1000.0, seats=SEATS):
    path = inspections.path(run, number, node)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"number": number, "why": "a stall", "wall": wall, "node": node, "seats": seats}
    path.write_text(json.dumps({**values, "groups": {"dp": [0, 1]}, "ranks": to_json(list(ranks))}))


def test_what_was_stored_is_read_and_ranks_that_no_node_speaks_of_are_dead(tmp_path):
    part(tmp_path, "n0", RANK, Rank(1, "n0.w1", "n0"))
    found = inspections.read(tmp_path, 1)
    assert found.ranks[0] == RANK and found.groups == {"dp": (0, 1)} and found.why == "a stall"
    assert (found.ranks[2].process, found.ranks[2].answers, found.ranks[2].node) == (DEAD, False, "n1")


def test_a_part_from_an_earlier_life_of_the_run_is_left_out(tmp_path):
    part(tmp_path, "n0", RANK)
    part(tmp_path, "n1", Rank(2, "n1.w0", "n1"), wall=10.0)
    assert inspections.read(tmp_path, 1).ranks[2].process == DEAD


def test_inspections_are_listed_in_order_and_other_files_are_not_inspections(tmp_path):
    assert inspections.numbers(tmp_path) == []
    for number in (12, 2):
        part(tmp_path, "n0", RANK, number=number)
    inspections.wanted(tmp_path).write_text("somebody")
    assert inspections.numbers(tmp_path) == [2, 12]


@pytest.mark.parametrize("text", ["", "{", "{}", '{"wall": 1, "why": "", "ranks": [3], "groups": {}, "seats": {}}'])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, text):
    part(tmp_path, "n0", RANK)
    inspections.path(tmp_path, 1, "n0").write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        inspections.read(tmp_path, 1)
    with pytest.raises(UserError, match="has no inspection 7"):
        inspections.read(tmp_path, 7)


def test_an_agent_stores_the_answers_and_what_the_system_says_of_who_does_not_answer(tmp_path):
    kept = Inspections(tmp_path, "n0")
    kept.begins(Inspect(1, "a stall", SEATS), {"n0.w0": None, "n0.w1": None, "n0.w5": 1})
    kept.heard(Inspected("n0.w0", 1, to_json(RANK), {"dp": [0, 1]}))
    kept.heard(Inspected("n0.w1", 9, to_json(RANK), {}))  # an answer to another inspection
    kept.close()
    found = inspections.read(tmp_path, 1)
    assert found.ranks[0] == RANK
    assert (found.ranks[1].process, found.ranks[1].answers) == (DEAD, False), "it has no process yet"


def test_the_control_plane_finds_the_cause_in_the_answers_of_all_nodes(tmp_path):
    state, posted, answers = World(nodes=2).run().state, [], Answers(tmp_path)
    threads = (Thread("MainThread", ("a.py:1 a",) * 50, trains=True), Thread("another", ("b.py:1 b",)))
    state.inspections = 1
    for node, other in (("n0", "n1"), ("n1", "n0")):
        kept = Inspections(tmp_path, node, posted.append)
        kept.begins(Inspect(1, "a stall", SEATS), {worker: None for worker in SEATS.values() if node in worker})
        kept.heard(Inspected("n0.w0", 1, to_json(replace(RANK, threads=threads)), {"dp": [0, 1]}))
        kept.close()
        assert not list(answers.found()), f"{other} has not answered"
        answers.take(state, posted[-1])
    (found,) = eventually(lambda: list(answers.found()))
    assert [(one.ranks, one.kind) for one in found.causes] == [([1], "dead")] and found.waiting == [0]
    sent = [thread for taken in posted for rank in taken.said["ranks"] for thread in rank["threads"]]
    assert {(thread["name"], *thread["frames"]) for thread in sent} == {("MainThread", *["a.py:1 a"] * 8)}


def test_answers_to_an_earlier_inspection_and_answers_that_make_no_sense_are_no_evidence(tmp_path, capfd):
    state, answers = World().run().state, Answers(tmp_path)
    state.inspections = 2
    answers.take(state, InspectionAnswered("n0", 1, {}))
    answers.take(state, InspectionAnswered("n0", 2, {"wall": 1, "why": "", "ranks": [3], "groups": {}, "seats": {}}))
    for search in [thread for thread in threading.enumerate() if thread.name == "ft-hang"]:
        search.join(30.0)
    said = capfd.readouterr().out
    assert "inspection 2 is no evidence" in said and "inspection 1" not in said
    assert not list(answers.found())


def test_an_inspection_for_which_no_thread_can_be_started_is_no_evidence_and_ends_nobody(tmp_path, capfd, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    state, posted, answers = World().run().state, [], Answers(tmp_path)
    state.inspections, kept = 1, Inspections(tmp_path, "n0", posted.append)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    kept.begins(Inspect(1, "a stall", SEATS), dict.fromkeys(SEATS.values()))
    kept.close()
    answers.take(state, posted[-1])
    assert "inspection 1 is no evidence: can't start new thread" in capfd.readouterr().out
    assert not list(answers.found()) and not inspections.numbers(tmp_path)


def test_nothing_is_stored_where_no_rank_is(tmp_path):
    kept = Inspections(tmp_path, "n3")
    kept.begins(Inspect(1, "a stall", SEATS), {"n3.w0": 1})
    kept.close()
    assert inspections.numbers(tmp_path) == []


# --- the cause of a hang, at the terminal -----------------------------------------------------------------------------


def hung(at=5.0, inspected=4.5, epoch=0):
    """A run that makes inspection 1 before it replaces rank 1."""
    history = History()
    history.say(inspected, events.INSPECTED, epoch=epoch, number=1, reason="a stall")
    history.detect(at, 1, step=3, signal="stall")
    history.close(at)
    history.open(at + 0.1, r1="n0.w4")
    history.repair(at + 0.2, 3)
    return history.events


def test_a_recovery_from_a_hang_tells_its_cause(tmp_path):
    busy = Rank(1, "n0.w1", "n0", threads=(Thread("MainThread", ("train.py:9 sleep",), trains=True),))
    part(tmp_path, "n0", RANK, busy)
    said = recovery_block(hung(), tmp_path)
    assert "cause     busy: rank 1\n             user code (train.py:9 sleep)\n" in said
    assert f"ft diagnose hang {tmp_path} --inspection 1" in said and "dead" not in said


def test_the_cause_names_the_host_of_a_lost_node(tmp_path, capsys):
    seats = {"0": "n0.w0", "1": "n1.w0", "2": "n1.w1"}
    part(tmp_path, "n0", replace(RANK, counts={"dp": 3}), seats=seats)
    history = History()
    history.events = hung()
    for number, node in enumerate(("n0", "n1")):
        history.join(0.1, node, f"gpu{number}")
    assert "No process of node n1 (gpu1) is known to live." in recovery_block(history.events, tmp_path)
    assert cli.main(["diagnose", "hang", str(write(tmp_path, history)), "--stored"]) == 1
    assert "(n1 (gpu1))" in capsys.readouterr().out
    assert cli.main(["diagnose", "hang", str(tmp_path), "--stored", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["causes"][0]["host"] == "gpu1"


@pytest.mark.parametrize("when", [{"inspected": 4.5, "at": 60.0}, {"epoch": 3}])
def test_an_inspection_at_another_time_or_epoch_is_not_about_a_recovery(tmp_path, when):
    part(tmp_path, "n0", RANK, Rank(1, "n0.w1", "n0"))
    assert "cause" not in recovery_block(hung(**when), tmp_path)


def test_an_inspection_without_a_cause_or_that_cannot_be_read_is_left_out(tmp_path):
    assert "cause" not in recovery_block(hung(), tmp_path), "there is no file"
    part(tmp_path, "n0", Rank(0, "n0.w0", "n0"))
    assert "cause" not in recovery_block(hung(), tmp_path), "nobody waits"
    inspections.path(tmp_path, 1, "n0").write_text("{")
    assert "cause" not in recovery_block(hung(), tmp_path)


def test_the_agent_goes_on_while_the_cause_is_searched_for_and_prints_it_when_it_is_found(tmp_path, monkeypatch):
    begun, found, told = threading.Event(), threading.Event(), []

    def search(history, run):
        assert threading.current_thread() is not threading.main_thread(), "the agent's own thread searches"
        begun.set()
        assert found.wait(60)
        return f"the recovery after {len(history)} events"

    monkeypatch.setattr(block, "recovery_block", search)
    history = History()
    news = RecoveryNews(tmp_path / "events.jsonl", told.append)
    news.expect(1)
    history.events = hung()
    write(tmp_path, history)
    news.poll(hurry=True)
    assert begun.wait(60)
    news.poll(hurry=True)
    assert told == []
    found.set()
    news.finish()
    news.close()
    assert told == [f"the recovery after {len(history.events)} events"]
