"""The checks at the start of a run: what the control plane refuses, and what an agent says about its node."""

import os
import socket
import time

import pytest
from control_world import World

from ft.base import events, token
from ft.base.errors import UserError
from ft.job import messages as m
from ft.job.agent import first_contact, membership
from ft.job.control.start_checks import NOTICE_S
from ft.job.control.state import ENDED, GATHERING
from ft.platform import election, network

ABOUT = {"torch": "2.13.0", "python": "3.11.7", "--nnodes": "2"}
NICS = {"lo": "127.0.0.1", "eth0": "10.0.0.2", "eth1": "192.168.9.2"}


def joined(index: int, **values) -> m.AgentJoined:
    how = {"about": ABOUT, "interfaces": NICS, "machine": f"host{index}", "rendezvous_address": f"10.0.0.{index}:4000"}
    return m.AgentJoined(f"n{index}", index, f"10.0.0.{index}", 2, 0, **{**how, **values})


def world(nodes: int = 2) -> World:
    return World(world_size=2 * nodes, nodes=nodes, standbys=0)


def stop_of(orders) -> m.Stop:
    (stop,) = [order for order in orders if isinstance(order, m.Stop)]
    return stop


def test_nodes_that_are_alike_are_told_to_connect_in_a_ring():
    run = world(3)
    assert not run.say(joined(0), joined(1))
    (order,) = run.say(joined(2))
    assert order.peers == {"n0": "n1", "n1": "n2", "n2": "n0"}
    assert order.addresses["n1"] == "10.0.0.1:4000" and run.state.phase == GATHERING
    assert [values["node"] for values in run.events(events.AGENT_JOINED)] == ["n0", "n1", "n2"]


def test_a_single_node_connects_to_nobody():
    assert world(1).say(joined(0)) == []


@pytest.mark.parametrize(("name", "fix"), [("torch", "install the same"), ("--nnodes", "give every ft run the same")])
def test_settings_that_differ_end_the_run_at_once(name, fix):
    run = world()
    run.say(joined(0))
    stop = stop_of(run.say(joined(1, about={**ABOUT, name: "9"})))
    assert stop.code == 2 and f"{name} is 9 on n1 (host1) and {ABOUT[name]} on n0 (host0)" in stop.message
    assert fix in stop.message and run.state.phase == ENDED
    assert run.events(events.START_REFUSED)[0]["problems"]


def test_an_input_that_one_node_lacks_ends_the_run_whichever_node_it_is():
    for first, second, has, lacks in (("there", "missing", "n0", "n1"), ("missing", "there", "n1", "n0")):
        run = world()
        run.say(joined(0, paths={"--load /ckpt": first}))
        message = stop_of(run.say(joined(1, paths={"--load /ckpt": second}))).message
        assert f"--load /ckpt is on {has}" in message and f"mount on {lacks} what {has} has there" in message


def test_a_folder_that_the_run_makes_may_come_to_be_between_two_looks():
    name = "folder of --save /ckpt/run"
    run = world()
    run.say(joined(0, paths={name: "missing"}))
    assert isinstance(run.say(joined(1, paths={name: "there"}))[0], m.Reach)
    run = world()
    run.say(joined(0, paths={name: "there"}))
    assert "folder of --save /ckpt/run is on n0" in stop_of(run.say(joined(1, paths={name: "missing"}))).message


def test_a_path_that_nobody_has_is_left_to_the_program():
    run = world()
    run.say(joined(0, paths={"--load /ckpt": "missing"}))
    assert isinstance(run.say(joined(1, paths={"--load /ckpt": "missing"}))[0], m.Reach)


def test_a_node_that_joins_later_is_not_compared():
    run = world()
    run.say(joined(0), joined(1))
    late = m.AgentJoined("n5", 5, "10.0.0.5", 0, 2, "10.0.0.5:1", about={**ABOUT, "torch": "9"})
    assert run.say(late) == [] and run.state.phase == GATHERING
    assert run.say(m.NodeRefused("node 7", "cannot")) == []


def test_an_address_that_a_node_cannot_reach_ends_the_run_with_both_names_and_the_flag():
    run = world()
    run.say(joined(0), joined(1, rendezvous_address="192.168.9.2:4000"))
    stop = stop_of(run.say(m.PeerUnreached("n0", "n1", "192.168.9.2:4000", "no answer within 3 s")))
    assert "n0 (host0) cannot connect to n1 (host1) at 192.168.9.2:4000" in stop.message
    assert "the address of its interface eth1: no answer within 3 s" in stop.message
    assert "start ft run on n1 with --local-addr ADDRESS, one of" in stop.message and "10.0.0.2 (eth0)" in stop.message


def test_once_training_runs_nothing_of_the_start_ends_it():
    run = World(world_size=4, nodes=2).run()
    assert "Stop" not in [type(order).__name__ for order in run.say(m.PeerUnreached("n0", "n1", "a:1", "refused"))]
    assert run.say(m.NodeRefused("node 1", "cannot")) == []


def test_a_node_that_cannot_take_part_ends_the_start():
    run = world()
    run.say(joined(0))
    assert "node 1 (host1): no way" in stop_of(run.say(m.NodeRefused("node 1 (host1)", "no way"))).message


def test_agents_that_do_not_come_are_named_once():
    run = world(3)
    run.say(joined(0), m.AgentJoined("n0-2", 0, "10.0.0.9", 0, 2, machine="host9"))
    run.now += NOTICE_S + 0.1
    orders = run.say(m.AgentBeat("n0"), m.AgentBeat("n0-2"), None)
    (notice,) = [order for order in orders if isinstance(order, m.Notice)]
    assert "no agent has come from node(s) 1, 2 of 3" in notice.message and "fix: " in notice.message
    assert "n0 (host0) and n0-2 (host9) both have --node-rank 0" in notice.message
    run.now += 1.0
    assert run.say(m.AgentBeat("n0"), m.AgentBeat("n0-2"), None) == []
    assert run.events(events.AGENTS_MISSING)[0]["missing"] == [1, 2]


# --- what an agent says ----------------------------------------------------------------------------------------------


def test_the_paths_of_a_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.bin").touch()
    (tmp_path / "ckpt").mkdir()
    words = "--data-path 0.3 a 0.7 b --load ckpt --save out/run --lr 1 --vocab-file=v.json --data-path"
    assert membership.paths(words.split()) == {
        "--data-path a": "there",
        "--data-path b": "missing",
        "--load ckpt": "there",
        "folder of --save out/run": "missing",
        "--vocab-file v.json": "missing",
    }


def test_a_checkpoint_folder_that_the_run_writes_itself_is_no_input():
    assert list(membership.paths(["--load", "x/y", "--save", "x/y"])) == ["folder of --save x/y"]


def test_the_process_that_listens_on_a_port_is_found():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert network.listener(port) == ""
        server.listen()
        assert network.listener(port).startswith(f"process {os.getpid()} (")
        assert network.cannot_connect("127.0.0.1", port, 1.0) == ""
    assert network.cannot_connect("127.0.0.1", port, 1.0) == "Connection refused"


def test_the_loopback_interface_is_among_the_interfaces():
    assert "127.0.0.1" in network.interfaces().values()


def test_a_token_that_is_there_is_found_at_once(tmp_path, monkeypatch):
    monkeypatch.delenv(token.VARIABLE, raising=False)
    secret = token.make(tmp_path)
    assert first_contact.find_token(tmp_path, "tcp://127.0.0.1:1", 1, 5.0) == secret


def test_a_directory_without_a_token_is_refused_only_if_the_control_plane_listens(tmp_path, monkeypatch):
    monkeypatch.delenv(token.VARIABLE, raising=False)
    monkeypatch.setattr(first_contact, "PROOF_S", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match="node 0 has not started"):
            first_contact.find_token(tmp_path, endpoint, 1, 1.5)
        server.listen()
        with pytest.raises(UserError, match="is not the directory of node 0"):
            first_contact.find_token(tmp_path, endpoint, 1, 30.0)
    assert not list(tmp_path.iterdir())


def test_a_control_plane_that_lives_and_cannot_be_reached_is_proven(tmp_path, monkeypatch):
    monkeypatch.setattr(first_contact, "PROOF_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    lease = election.LeaseRecord(0, 0, where, "n0", 1, count=5)
    election.renew(tmp_path, lease)
    watch = first_contact.ControlPlaneWatch(tmp_path)
    watch.failed(lease)
    time.sleep(0.3)
    watch.failed(lease)  # the lease was not renewed meanwhile: the control plane may have died
    election.renew(tmp_path, election.LeaseRecord(0, 0, where, "n0", 1, count=9))
    with pytest.raises(UserError, match="cannot connect to it at 127"):
        watch.failed(lease)


def test_a_message_in_the_directory_is_found_once(tmp_path):
    found = first_contact.Messages(tmp_path)
    assert list(found.new()) == []
    first_contact.leave_message(tmp_path, "node 1 (host1)", "no way")
    found._next = 0.0
    assert list(found.new()) == [("node 1 (host1)", "no way")]
    found._next = 0.0
    assert list(found.new()) == []
    assert list(first_contact.Messages(tmp_path).new()) == [], "it belongs to an earlier attempt"
