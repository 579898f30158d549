"""``ft diagnose start``: folders of runs that never made a step, made by hand, and what the command says of them."""

import json
import os
import socket

import pytest
from histories import START, History

from ft import cli
from ft.base import events

NICS = {"lo": "127.0.0.1", "eth0": "10.0.0.2"}


class Unstarted(History):
    """A run whose agents join, and that makes no step."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.events = folder, self.events[:1]
        (folder / "nodes").mkdir(parents=True)
        (folder / "logs").mkdir()

    def claim(self, name: str) -> None:
        (self.folder / "nodes" / name).touch()

    def join(self, rank: int, name: str = "", late_s: float = 0.0, **values) -> None:
        name = name or f"n{rank}"
        self.claim(name)
        told = {"host": f"10.0.0.{rank}", "machine": f"host{rank}", "interfaces": NICS, "paths": {}}
        told |= {"about": {"--nnodes": "2", "torch": "2.13"}, "clock": START + 2.0 - late_s, **values}
        self.say(2.0, events.AGENT_JOINED, node=name, **told)

    def worker(self, rank: int, node: str) -> None:
        self.say(3.0, events.WORKER_STARTED, node=node, worker=f"{node}.w{rank}", rank=rank, pid=1)

    def diagnose(self, capsys, *flags: str) -> tuple[int, dict]:
        with events.EventLog(self.folder / "events.jsonl") as log:
            for event in self.events:
                log.write(event)
        code = cli.main(["diagnose", "start", str(self.folder), "--json", *flags])
        return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def run(tmp_path) -> Unstarted:
    return Unstarted(tmp_path / "run")


def problems(found: dict) -> str:
    return "\n".join(f"{one['problem']} | {one['fix']}" for one in found["findings"])


def test_nodes_that_have_not_come_are_named(run, capsys):
    run.join(0)
    code, found = run.diagnose(capsys)
    assert code == 1 and found["joined"] == ["n0"] and found["expected_nodes"] == 2
    assert "no agent of node(s) 1 of 2 has come to this folder | start ft run there" in problems(found)


def test_an_agent_that_never_reached_the_control_plane_is_named(run, capsys):
    run.join(0)
    run.claim("n1")
    _, found = run.diagnose(capsys)
    assert found["not_joined"] == ["n1"]
    assert "the agent of n1 has started" in problems(found) and "never reached the control plane" in problems(found)


def test_what_an_agent_has_left_as_a_message_is_told(run, capsys):
    run.join(0)
    (run.folder / "refused").mkdir()
    message = {"node": "node 1 (host1)", "reason": "cannot connect to 10.0.0.1:4\n  fix: open the firewall"}
    (run.folder / "refused" / "node 1.json").write_text(json.dumps(message))
    _, found = run.diagnose(capsys)
    assert "node 1 (host1): cannot connect to 10.0.0.1:4 | open the firewall" in problems(found)


def test_what_the_control_plane_has_refused_is_told_once(run, capsys):
    run.join(0)
    run.join(1, about={"--nnodes": "2", "torch": "9"})
    run.say(3.0, events.STOPPED, code=2, message="the nodes do not fit together: ...")
    run.say(3.0, events.START_REFUSED, problems=["torch is 9 on n1 and 2.13 on n0\n  fix: install the same"])
    code, found = run.diagnose(capsys)
    assert code == 1 and len(found["findings"]) == 1
    assert problems(found) == "torch is 9 on n1 and 2.13 on n0 | install the same"


def test_differences_are_found_although_nobody_has_refused_them(run, capsys):
    run.join(0, paths={"--load /ckpt": "there"})
    run.join(1, paths={"--load /ckpt": "missing"}, about={"--nnodes": "2", "torch": "9"})
    _, found = run.diagnose(capsys)
    assert "torch: 2.13 on n0 (host0); 9 on n1 (host1)" in problems(found)
    assert "--load /ckpt: there on n0 (host0); missing on n1 (host1)" in problems(found)


def test_two_agents_with_the_same_number_are_named(run, capsys):
    run.join(0)
    run.join(0, name="n0-2", machine="host7")
    _, found = run.diagnose(capsys)
    assert "n0 (host0) and n0-2 (host7) both have --node-rank 0" in problems(found)


def test_a_clock_that_differs_is_noted_and_is_no_cause(run, capsys):
    run.join(0)
    run.join(1, late_s=-40.0)
    _, found = run.diagnose(capsys)
    (clock,) = [one for one in found["findings"] if "clock" in one["problem"]]
    assert "the clock of n1 (host1) is about 40.0 s ahead" in clock["problem"] and not clock["is_cause"]


def test_workers_that_do_not_connect_are_named(run, capsys):
    run.join(0)
    run.join(1)
    for rank in (0, 1, 2):
        run.worker(rank, f"n{rank // 2}")
    ready = {"now": 1.0, "report": {"kind": "WorkerReady", "worker": "n0.w0"}}
    (run.folder / "journal.jsonl").write_text(json.dumps(ready) + "\n")
    _, found = run.diagnose(capsys)
    assert "the workers of logical rank 3 were never started" in problems(found)
    assert "the workers of logical ranks 1-2 were started and have not connected" in problems(found)


def test_the_first_error_of_the_workers_is_told(run, capsys):
    run.join(0, about={"--nnodes": "1"})
    run.worker(0, "n0")
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nImportError: no module named x\n'
    (run.folder / "logs" / "n0.w0.log").write_text(trace)
    _, found = run.diagnose(capsys)
    assert "first cause: ImportError: no module named x" in problems(found)


def test_the_process_that_holds_the_port_is_named(run, capsys):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        where = f"127.0.0.1:{server.getsockname()[1]}"
        _, found = run.diagnose(capsys, "--rdzv-endpoint", where)
        assert f"the port of {where} is held by process {os.getpid()} (" in problems(found)
    _, found = run.diagnose(capsys, "--rdzv-endpoint", where)
    assert f"from this machine {where} cannot be reached: Connection refused" in problems(found)


def test_an_endpoint_without_a_port_is_refused(run, capsys):
    assert cli.main(["diagnose", "start", str(run.folder), "--rdzv-endpoint", "host"]) == 2
    assert "names no port" in capsys.readouterr().err


def test_the_last_message_tells_if_nothing_else_does(run, capsys):
    run.join(0, about={"--nnodes": "1"})
    run.say(9.0, events.STOPPED, code=1, message="logical rank(s) 0 were not ready\n  fix: wait")
    code, found = run.diagnose(capsys)
    assert code == 1 and problems(found) == "logical rank(s) 0 were not ready | wait"


def test_a_run_that_made_its_first_step_has_nothing(run, capsys):
    run.join(0)
    run.say(5.0, events.RESUMED, epoch=0, step=0)
    code, found = run.diagnose(capsys)
    assert code == 0 and found["has_begun"] and found["findings"] == []


def test_the_text_names_addresses_and_what_to_do(run, capsys):
    run.join(0)
    with events.EventLog(run.folder / "events.jsonl") as log:
        for event in run.events:
            log.write(event)
    assert cli.main(["diagnose", "start", str(run.folder)]) == 1
    text = capsys.readouterr().out
    assert "1 of 2 agents joined" in text and "advertises 10.0.0.0; it has 127.0.0.1 (lo), 10.0.0.2 (eth0)" in text
    assert "\n  fix: start ft run there" in text


def test_a_folder_that_is_empty_or_missing(tmp_path, capsys):
    assert cli.main(["diagnose", "start", str(tmp_path)]) == 1
    assert "no control plane has ever answered" in capsys.readouterr().out
    assert cli.main(["diagnose", "start", str(tmp_path / "gone")]) == 2
