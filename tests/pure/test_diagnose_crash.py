"""``ft diagnose crash``: folders of crashed runs, made by hand, and what the command says of them."""

import json

import pytest
from planted_crashes import GLOO, RESTART, SEGFAULT, STOP, USERS, CrashedRun

from ft import cli
from ft.base import events
from ft.job.agent.announcements import cause_of_crash

LOST = ["RuntimeError", "Exception", "BaseException"]
WRONG = ["ValueError", "Exception", "BaseException"]
CLOSED = "gloo/transport/tcp/pair.cc:553] Connection closed by peer"


@pytest.fixture
def run(tmp_path) -> CrashedRun:
    return CrashedRun(tmp_path / "run")


def diagnose(run: CrashedRun, capsys) -> tuple[int, dict]:
    code = cli.main(["diagnose", "crash", str(run.write()), "--json"])
    return code, json.loads(capsys.readouterr().out)[0]


def test_a_rank_that_ends_last_is_the_cause_if_the_others_only_lost_it(run, capsys):
    for rank in (0, 1, 3):
        run.log(rank, GLOO)
    run.log(2, USERS)
    run.exits(10.0, 1, 1, STOP)
    run.exits(10.1, 2, -9)
    run.stop(10.0)
    code, found = diagnose(run, capsys)
    assert code == 1 and found["state"] == "stopped with code 1"
    cause = found["first_cause"]
    assert (cause["error"], cause["ranks"]) == ("ValueError: sample 17 of step 3 has no tokens", [2])
    assert cause["trace"] == USERS.rstrip()
    assert [(one["class"], one["ranks"]) for one in found["consequences"]] == [("lost connection", [0, 1, 3])]


def test_the_text_has_the_stack_once_and_counts_the_rest(run, capsys):
    for rank in range(4):
        run.log(rank, USERS.replace("17", str(rank)))
        run.exits(10.0 + rank, rank, 1)
    run.stop(14.0)
    assert cli.main(["diagnose", "crash", str(run.write())]) == 1
    text = capsys.readouterr().out
    assert text.count("raise ValueError") == 1 and "logical ranks 0-3" in text
    assert "further error" not in text


def test_an_exception_that_a_worker_has_reported_counts_once(run, capsys):
    run.log(2, USERS)
    run.fails(10.0, 2, WRONG, "sample 17 of step 3 has no tokens", USERS, STOP)
    run.exits(10.5, 2, -9)
    run.exits(10.6, 0, -9)
    run.stop(10.0)
    _, found = diagnose(run, capsys)
    cause = found["first_cause"]
    assert (cause["count"], cause["epoch"], cause["step"], cause["class"]) == (1, 0, 2, "exception of the program")
    assert [(one["class"], one["ranks"]) for one in found["consequences"]] == [("ended by ft run", [0])]


def test_attempts_with_the_same_error_are_counted(run, capsys):
    run.fails(10.0, 2, WRONG, "sample 17", USERS, RESTART)
    run.say(20.0, events.RESUMED, epoch=1, step=2)
    run.fails(30.0, 2, WRONG, "sample 17", USERS, STOP)
    run.stop(30.0)
    _, found = diagnose(run, capsys)
    assert found["earlier_attempts"] == 1 and found["first_cause"]["count"] == 1


def test_a_signal_with_its_stack(run, capsys):
    run.log(2, SEGFAULT)
    run.log(1, GLOO)
    run.exits(10.0, 1, 1)
    run.exits(11.0, 2, -11, STOP)
    run.stop(11.0)
    _, found = diagnose(run, capsys)
    cause = found["first_cause"]
    assert (cause["class"], cause["error"], cause["ranks"]) == ("death by a signal", "killed by SIGSEGV", [2])
    assert "check_batch" in cause["trace"]


def test_sigkill_points_to_the_out_of_memory_killer_unless_it_was_planned(run, capsys):
    run.exits(10.0, 2, -9, STOP)
    run.stop(10.0)
    assert cli.main(["diagnose", "crash", str(run.write())]) == 1
    assert "out-of-memory killer" in capsys.readouterr().out


def test_a_planned_fault_is_named(run, capsys):
    run.inject(9.9, 2)
    run.exits(10.0, 2, -9, STOP)
    run.stop(10.0)
    assert cli.main(["diagnose", "crash", str(run.write())]) == 1
    text = capsys.readouterr().out
    assert "the planned fault kill" in text and "out-of-memory killer" not in text


def test_lost_connections_that_workers_suspect_are_counted(run, capsys):
    for rank in (0, 3):
        worker = run.seats[str(rank)]
        run.report(9.0, "WorkerSuspects", worker=worker, epoch=0, group="19", message=CLOSED)
    run.exits(10.0, 2, -11, STOP)
    run.stop(10.0)
    _, found = diagnose(run, capsys)
    assert found["first_cause"]["ranks"] == [2]
    assert [(one["class"], one["ranks"]) for one in found["consequences"]] == [("lost connection", [0, 3])]


def test_a_hang_and_a_lost_node_come_from_the_events(run, capsys):
    for rank in (2, 3):
        worker = run.seats[str(rank)]
        place = {"node": "n1", "worker": worker, "rank": rank, "epoch": 0, "step": 2}
        told = {
            "category": "host fault",
            "action": "replace",
            "reason": "node n1 is lost: silent",
            "signal": "node lost",
        }
        run.say(10.0, events.FAULT_DETECTED, **place, **told)
    run.detect(9.0, 0, 2, signal="hang")
    run.stop(11.0)
    _, found = diagnose(run, capsys)
    assert (found["first_cause"]["class"], found["first_cause"]["count"]) == ("lost node", 1)
    assert [one["class"] for one in found["other_causes"]] == ["hang"]


def test_nodes_are_named_with_their_hosts(run, capsys):
    for rank, node in enumerate(("n0", "n1")):
        run.join(0.5, node, f"gpu{rank}")
    run.exits(10.0, 2, -11, STOP)
    run.stop(10.0)
    _, found = diagnose(run, capsys)
    assert (found["first_cause"]["node"], found["first_cause"]["host"]) == ("n0", "gpu0")
    assert cli.main(["diagnose", "crash", str(run.folder)]) == 1
    assert "(n0.w2 on n0 (gpu0))" in capsys.readouterr().out


def test_a_traceback_that_the_program_has_survived_is_no_cause(run, capsys):
    run.log(0, USERS + "step 3 goes on\n")
    run.exits(10.0, 2, -11, STOP)
    run.exits(10.1, 0, -9)
    run.stop(10.0)
    _, found = diagnose(run, capsys)
    assert found["first_cause"]["ranks"] == [2] and not found["other_causes"]


def test_without_a_journal_the_events_tell(run, capsys):
    run.detect(10.0, 2, 2, signal="SIGSEGV")
    run.stop(10.0)
    _, found = diagnose(run, capsys)
    assert found["first_cause"]["error"] == "killed by SIGSEGV"


def test_an_agent_that_was_told_to_end_explains_the_rest(run, capsys):
    run.report(10.0, "AgentLeaving", STOP, node="n0", signum=15)
    run.exits(10.2, 1, -9)
    run.stop(10.0, code=143)
    _, found = diagnose(run, capsys)
    assert found["first_cause"]["error"] == "the agent of n0 was told to end by SIGTERM"


def test_a_finished_run_has_no_crash_but_its_faults(run, capsys):
    run.exits(5.0, 2, -9)
    run.say(8.0, events.RESUMED, epoch=1, step=3)
    run.say(20.0, events.FINISHED, step=10)
    assert cli.main(["diagnose", "crash", str(run.write())]) == 0
    assert "no crash; 1 fault(s) were recovered from" in capsys.readouterr().out


def test_a_run_that_never_began_is_left_to_the_other_command(tmp_path, capsys):
    run = CrashedRun(tmp_path / "run")
    run.events = [event for event in run.events if event.name == events.RUN_STARTED]
    run.stop(600.0, message="1 of 2 agents came within 600 s: n0")
    assert cli.main(["diagnose", "crash", str(run.write())]) == 1
    text = capsys.readouterr().out
    assert "1 of 2 agents came" in text and "ft diagnose start" in text


def test_replicas_are_read_one_by_one(tmp_path, capsys):
    for number in range(2):
        run = CrashedRun(tmp_path / "runs" / f"replica-{number}")
        run.exits(10.0, number, -11)
        run.stop(11.0)
        run.write()
    assert cli.main(["diagnose", "crash", str(tmp_path / "runs"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["first_cause"]["ranks"] for one in found] == [[0], [1]]


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert cli.main(["diagnose", "crash", str(tmp_path)]) == 2
    assert "contains no run" in capsys.readouterr().err


def test_damaged_lines_do_no_harm(run, capsys):
    run.exits(10.0, 2, -11, STOP)
    run.stop(10.0)
    folder = run.write()
    with open(folder / "journal.jsonl", "a") as file:
        file.write('{"report": {"kind": "WorkerExited"\n[1, "Stop"]\n')
    assert cli.main(["diagnose", "crash", str(folder)]) == 1


# --- the end of ft run -----------------------------------------------------------------------------------------------


def test_the_end_of_ft_run_is_silent_if_the_terminal_says_everything(run):
    run.log(2, USERS)
    run.exits(10.0, 2, 1, STOP)
    run.exits(10.1, 0, -9)
    run.stop(10.0)
    folder = run.write()
    assert cause_of_crash(folder, {"n0.w2"}) == ""
    assert "raise ValueError" in cause_of_crash(folder, set())


def test_the_end_of_ft_run_names_another_rank_than_the_one_that_ended_first(run):
    run.log(2, USERS)
    run.log(1, GLOO)
    run.exits(10.0, 1, 1, STOP)
    run.exits(10.1, 2, -9)
    run.stop(10.0)
    text = cause_of_crash(run.write(), {"n0.w1"})
    assert text.startswith("first cause: ValueError: sample 17") and "1 x lost connection (logical rank 1)" in text


def test_the_end_of_ft_run_does_not_print_a_stack_twice(run):
    run.log(2, USERS)
    run.log(1, GLOO)
    run.exits(10.0, 2, 1, STOP)
    run.stop(10.0)
    text = cause_of_crash(run.write(), {"n0.w2"})
    assert "its stack is above" in text and "raise ValueError" not in text


def test_a_folder_that_is_gone_does_not_disturb_the_end(tmp_path):
    assert cause_of_crash(tmp_path / "gone", set()) == ""
