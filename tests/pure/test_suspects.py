"""Devices that computed wrongly in one run are avoided by the next: the file of suspects, and what a node does with it.

Which devices get into the file is shown in ``conversations/record/silent.txt``; files that are refused are in
``conversations/values/files.txt``.
"""

import socket
from dataclasses import replace

import pytest
from control_world import LIMITS, World, kinds
from waiting import at_once

from ft.base.errors import UserError
from ft.base.flags import Parser
from ft.commands import arguments
from ft.job import messages as m
from ft.job.agent.devices import Devices, LeftOut
from ft.job.agent.options import resolve
from ft.job.replicas import member
from ft.platform import devices, suspects
from ft.platform.suspects import Counts, Suspect

HERE = socket.gethostname()
TWICE, ONCE, EVICTED = Counts(2, 4, 0), Counts(1, 1, 0), Counts(1, 3, 1)


def suspect(device, host=HERE, **runs):
    return Suspect(host, device, "cpu" if device is None else f"cuda:{device} (A)", runs or {"/runs/a": TWICE})


def options(line: str, environment: dict | None = None):
    parser = Parser(allow_abbrev=False, is_launcher=True)
    arguments.add_flags(parser)
    return resolve(parser.parse_args(line.split()), environment or {})


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import json\n")
    return "train.py"


@pytest.fixture
def listed(tmp_path):
    """Return a function that writes a file of suspects and returns its path."""

    def write(*entries):
        path = tmp_path / "suspects.json"
        path.unlink(missing_ok=True)
        suspects.add(path, entries)
        return path

    return write


# ------------------------------------------------------------------------------------------ the file


def test_a_run_that_is_read_again_is_not_counted_twice_and_another_one_is_added(tmp_path):
    path = tmp_path / "suspects.json"
    suspects.add(path, [suspect(3, a=ONCE), suspect(None, "n2", a=EVICTED)])
    suspects.add(path, [suspect(3, a=ONCE)])
    found = {(one.host, one.device): one for one in suspects.read(path)}
    assert found[HERE, 3].advice == suspects.WATCH and found["n2", None].advice == suspects.PULL
    assert found["n2", None].why == "wrong in 1 step of 1 run, evicted 1 time"
    suspects.add(path, [suspect(3, b=ONCE)])
    one = next(one for one in suspects.read(path) if one.device == 3)
    assert one.advice == suspects.PULL and one.why == "wrong in 2 steps of 2 runs", "wrong in one step of each run"
    assert [path.name for path in tmp_path.iterdir()] == ["suspects.json"], "a temporary file is left"


def test_what_several_processes_add_at_once_is_all_there(tmp_path):
    path = tmp_path / "suspects.json"
    at_once(lambda device: suspects.add(path, [suspect(device)]), range(8))
    assert [one.device for one in suspects.read(path)] == list(range(8))


@pytest.mark.parametrize("text", ["{", '{"format": "ft suspects", "version": 2}'])
def test_a_wrong_file_is_refused_and_left_as_it_is(text, tmp_path, script):
    (path := tmp_path / "suspects.json").write_text(text)
    for use in (lambda: options(f"--suspects {path} {script}"), lambda: suspects.add(path, [suspect(1)])):
        with pytest.raises(UserError, match=str(path)):
            use()
    assert path.read_text() == text


# ------------------------------------------------------------------------------------------ a node


def test_a_host_that_computed_wrongly_on_its_cpu_is_refused(listed, script):
    line = f"--suspects {listed(suspect(None))} --nproc-per-node 2"
    with pytest.raises(UserError) as error:
        options(f"{line} {script}")
    assert f"this host, {HERE}, is not used" in str(error.value) and "suspects.json" in str(error.value)
    assert "wrong in 2 steps of 1 run" in str(error.value)
    standby = f"{line} --nnodes 2 --node-rank 1 --standby-nodes 1 --rdzv-endpoint h:1 --run-dir r {script}"
    assert options(standby).left_out.node and options(standby).standbys_here == 0


def test_other_hosts_and_devices_that_are_only_watched_are_used(listed, script):
    path = listed(suspect(None, "elsewhere"), suspect(None, HERE, a=ONCE))
    assert options(f"--suspects {path} --standby 1 {script}").left_out == LeftOut()


def test_a_gpu_that_computed_wrongly_is_left_out_if_the_others_are_enough(listed, script):
    line = f"--suspects {listed(suspect(1))} --nproc-per-node 2 --devices-per-node"
    assert list(options(f"{line} 3 {script}").left_out.devices) == ["1"]
    with pytest.raises(UserError, match=r"too few devices left for 2 worker\(s\): device 1: .*suspects.json"):
        options(f"{line} 2 {script}")
    with pytest.raises(UserError, match=r"because of its cuda:1 \(A\)"):  # workers share GPUs, or use none
        options(f"{line} 1 {script}")


def test_the_index_is_that_among_all_devices_of_the_host(listed, script):
    path = listed(suspect(5))
    flags = f"--suspects {path} --nproc-per-node 1 --devices-per-node 2 {script}"
    found = options(flags, {"CUDA_VISIBLE_DEVICES": "4,5"}).left_out
    assert list(found.seen(2, {"CUDA_VISIBLE_DEVICES": "4,5"})) == [1]
    assert not found.seen(2, {"CUDA_VISIBLE_DEVICES": "6,7"})
    assert [devices.on_node(n, {"CUDA_VISIBLE_DEVICES": "4, 5"}) for n in range(3)] == [4, 5, 2]
    assert devices.on_node(1, {}) == 1


def test_what_a_replica_leaves_out_reaches_its_agent(listed, script):
    given = options(f"--suspects {listed(suspect(1))} --devices-per-node 3 {script}")
    assert member.unpack(member.pack(given, [], None))[0] == given


# ------------------------------------------------------------------------------------------ its agent


def described(count: int, workers: int, left_out: LeftOut) -> dict:
    found = Devices(lambda: count, workers, lambda: None, environment={}, left_out=left_out)
    found.start()
    return found.described()


def test_the_agent_reports_devices_that_are_left_out_as_unusable():
    assert described(3, 2, LeftOut(devices={"1": "why"})) == {"devices": 3, "unusable": {1: "why"}}
    assert described(0, 2, LeftOut("why")) == {"devices": 1, "unusable": {0: "why"}}
    assert described(2, 2, LeftOut("why")) == {"devices": 2, "unusable": {0: "why", 1: "why"}}


def test_the_control_plane_puts_no_worker_on_a_standby_node_that_is_left_out():
    def orders(standbys: int, left_out: LeftOut) -> list[str]:
        """Return the orders after a standby node has joined and another node is lost."""
        world = World(4, 2, 0, devices=2).run()
        joined = m.AgentJoined("n2", 2, "host2", 0, standbys, "host2:1", {})
        made = world.say(replace(joined, **described(0, 2, left_out)))
        return kinds(made + world.wait(LIMITS.agent_lost_s + 1, beats=["n0", "n2"]))

    assert "Spawn" in (found := orders(2, LeftOut())) and "Stop" not in found
    assert "Spawn" not in (found := orders(0, LeftOut("why"))) and found[-1] == "Stop"
