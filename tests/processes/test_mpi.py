"""Snapshots over MPI: the relays' streams, and what the death or the silence of an MPI process leaves."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from networks import ROOT, Networks, Relays, need_mpi
from snapshot_crew import Crew, set_to
from test_snapshot_transport import take_alone
from waiting import eventually

from ft.net.mpi_relay import CREDIT, DATA, END, RESET, WINDOW, RelayStream, unpack


def test_an_agent_and_its_nodes_mpi_process_start_without_torch():
    code = "import sys, ft.commands.run, ft.net.mpi_relay; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=180)


class End:
    """A stream's end with its worker's socket in the test's hand; what it sends lies in ``sent``."""

    def __init__(self):
        theirs, self.worker = socket.socketpair()
        self.sent: list[tuple[int, bytes | bytearray]] = []
        self.stream = RelayStream(
            (0, 1, True), 7, theirs, lambda to, frame: self.sent.append((to, frame)), is_open=True
        )

    def kinds(self) -> list[int]:
        return [unpack(frame)[0] for _, frame in self.sent]

    def close(self) -> None:
        self.worker.close()
        self.stream.sock.close()


@pytest.fixture
def end():
    made = End()
    yield made
    made.close()


def test_a_stream_sends_no_more_than_its_window_ahead(end):
    payload, got = os.urandom(WINDOW + WINDOW // 2), bytearray()
    writer = threading.Thread(target=end.worker.sendall, args=(payload,))
    writer.start()
    deadline = time.monotonic() + 180
    while end.stream.reads:
        assert time.monotonic() < deadline
        end.stream.pull()
    assert sum(len(unpack(frame)[3]) for _, frame in end.sent) == WINDOW
    end.stream.take(CREDIT, WINDOW, memoryview(b""))
    while len(got) < len(payload):
        assert time.monotonic() < deadline
        end.stream.pull()
        got = b"".join(bytes(unpack(frame)[3]) for _, frame in end.sent)
    writer.join()
    assert got == payload
    assert {to for to, _ in end.sent} == {7}
    assert {unpack(frame)[1] for _, frame in end.sent} == {(0, 1, False)}


def test_a_worker_that_does_not_read_gets_no_credit_for_its_sender_and_everything_later(end):
    payload = os.urandom(WINDOW)
    end.stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    end.stream.take(DATA, 0, memoryview(payload))
    assert end.stream.out
    end.stream.take(END, 0, memoryview(b""))
    assert not end.stream.over
    got = bytearray()
    while len(got) < len(payload):
        got += end.worker.recv(1 << 20)
        end.stream.push()
    assert bytes(got) == payload
    assert end.stream.over
    assert sum(unpack(frame)[2] for _, frame in end.sent if unpack(frame)[0] == CREDIT) <= WINDOW


def test_a_worker_that_hangs_up_ends_the_stream_on_both_sides(end):
    end.worker.close()
    end.stream.take(DATA, 0, memoryview(b"x" * WINDOW))
    assert end.stream.over
    assert end.kinds() == [RESET]
    other = End()
    other.worker.close()
    other.stream.pull()
    assert other.stream.over
    assert other.kinds() == [END]
    other.close()


@pytest.fixture
def three(monkeypatch):
    """Three nodes of their own, who declare each other dead after six seconds."""
    need_mpi()
    monkeypatch.setenv("OMPI_MCA_mpi_ft_detector_period", "1")
    monkeypatch.setenv("OMPI_MCA_mpi_ft_detector_timeout", "6")
    relays = Relays(3)
    yield relays
    relays.close()


def test_a_dead_mpi_process_is_shrunk_away_and_a_standbys_node_takes_its_place(three):
    workers = Crew(Networks(three), 2, patience_s=20, timeout_s=20)
    spare = Crew(Networks(three), 3, copies=0)
    workers.step(1)
    three.signal(1, signal.SIGKILL)
    take_alone(workers.snaps[0], workers.live[0], 2)
    assert workers.snaps[0].holdings().own == [1, 2]
    workers.addresses[1] = spare.addresses[2]
    workers.snaps[0].place(workers.addresses)
    workers.snaps[0].take(set_to(workers.live[0], 3), 3, 1)
    workers.snaps[0].wait()
    assert spare.servers[2].stock.holdings().copies == {0: [3]}
    with pytest.raises(ConnectionError, match="node 1 is gone"):
        three.network(0).dial("mpi:1/w1-0", 5)
    workers.close()
    spare.close()


def refusal(network, address: str) -> str:
    """Return why a connection to this address is refused, "" where it is not."""
    try:
        network.dial(address, 1).close()
    except (TimeoutError, ConnectionError) as error:
        return str(error)
    return ""


def test_a_stopped_mpi_process_holds_up_nobody_and_is_declared_dead(three):
    workers, others = Crew(Networks(three), 2, patience_s=15, timeout_s=15), Crew(Networks(three), 3, copies=1)
    others.snaps[0].place({2: others.addresses[2]})
    others.snaps[0].peers = [2]
    workers.step(1)
    three.signal(1, signal.SIGSTOP)
    others.snaps[0].take(set_to(others.live[0], 1), 1, 0)
    others.snaps[0].wait()
    take_alone(workers.snaps[0], workers.live[0], 2)
    eventually(lambda: "node 1 is gone" in refusal(three.network(0), workers.addresses[1]))
    others.snaps[0].take(set_to(others.live[0], 2), 2, 0)
    others.snaps[0].wait()
    assert others.servers[2].stock.holdings().copies == {0: [1, 2]}
    three.signal(1, signal.SIGCONT)
    eventually(
        lambda: not Path(f"/proc/{three.pid(1)}/cmdline").exists(),
        "it goes on although the others have declared it dead",
    )
    workers.close()
    others.close()
