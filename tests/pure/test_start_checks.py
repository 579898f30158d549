"""The checks at the start of a run: what an agent says about its node.

What the control plane refuses is in ``conversations/recovery/start_checks.txt``.
"""

import os
import socket
import time

import pytest

from ft import cli
from ft.base import token
from ft.base.errors import UserError
from ft.job.agent import uplink
from ft.platform import election, network


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
    assert uplink.find_token(tmp_path, "tcp://127.0.0.1:1", 1, 5.0) == secret


def test_a_directory_without_a_token_is_refused_only_if_the_control_plane_listens(tmp_path, monkeypatch):
    monkeypatch.delenv(token.VARIABLE, raising=False)
    monkeypatch.setattr(uplink, "PROOF_S", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match="node 0 has not started"):
            uplink.find_token(tmp_path, endpoint, 1, 1.5)
        server.listen()
        with pytest.raises(UserError, match="is not the directory of node 0"):
            uplink.find_token(tmp_path, endpoint, 1, 30.0)
    assert not list(tmp_path.iterdir())


def test_a_control_plane_that_lives_and_cannot_be_reached_is_proven(tmp_path, monkeypatch):
    monkeypatch.setattr(uplink, "PROOF_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    lease = election.LeaseRecord(0, 0, where, "n0", 1, count=5)
    election.renew(tmp_path, lease)
    watch = uplink.ControlPlaneWatch(tmp_path)
    watch.failed(lease)
    time.sleep(0.3)
    watch.failed(lease)  # the lease was not renewed meanwhile: the control plane may have died
    election.renew(tmp_path, election.LeaseRecord(0, 0, where, "n0", 1, count=9))
    with pytest.raises(UserError, match="cannot connect to it at 127"):
        watch.failed(lease)


def test_a_message_in_the_directory_is_found_once(tmp_path):
    found = uplink.NewRefusals(tmp_path)
    assert list(found.new()) == []
    uplink.leave_message(tmp_path, "node 1 (host1)", "no way")
    found._next = 0.0
    assert list(found.new()) == [("node 1 (host1)", "no way")]
    found._next = 0.0
    assert list(found.new()) == []
    assert list(uplink.NewRefusals(tmp_path).new()) == [], "it belongs to an earlier attempt"


def test_ft_diagnose_start_names_the_process_that_holds_the_port(tmp_path, capsys):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        where = f"127.0.0.1:{server.getsockname()[1]}"
        assert cli.main(["diagnose", "start", str(tmp_path), "--rdzv-endpoint", where]) == 1
        assert f"the port of {where} is held by process {os.getpid()} (" in capsys.readouterr().out
    assert cli.main(["diagnose", "start", str(tmp_path), "--rdzv-endpoint", where]) == 1
    assert f"from this machine {where} cannot be reached: Connection refused" in capsys.readouterr().out
