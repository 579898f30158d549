"""The laboratory itself: hosts that reach each other, and every way in which their network can fail."""

import os
import subprocess
import sys
import time
from pathlib import Path

import nodes
import pytest
import start_up
from nodes import Lab, why_not
from waiting import eventually

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

# Echoes every line.
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
while True:
    connection, _ = server.accept()
    with connection, connection.makefile("rwb") as stream:
        for line in stream:
            stream.write(line)
            stream.flush()
"""
ASK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2]))
connection.settimeout(float(sys.argv[2]))
stream = connection.makefile("rwb")
stream.write(b"x\\n")
stream.flush()
assert stream.readline()
"""

CONNECT = """
import sys
from ft.job.control import channel
try:
    channel.AgentChannel(sys.argv[1], "n1", "token", 0.5)
except ConnectionError as error:
    print("lost:", error)
"""


@pytest.fixture
def lab():
    with Lab(3, seed=1) as made:
        yield made


@pytest.mark.parametrize("out, into", [(True, True), (True, False), (False, True)])
def test_a_cut_stops_conversations_until_it_is_repaired_and_leaves_the_others(lab, out, into):
    one, two, three = lab.hosts
    serve(two)
    serve(three)
    two.cut(out=out, into=into)
    assert not is_answered(one, two)
    eventually(lambda: is_answered(one, three))
    two.repair()
    eventually(lambda: is_answered(one, two))
    lab.part([three])
    assert not is_answered(three, two)
    eventually(lambda: is_answered(one, two))


def test_power_loss_leaves_no_process_and_no_goodbye(lab):
    one, two, _ = lab.hosts
    serve(two)
    listen = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).recv(1)"
    waits = one.start([sys.executable, "-c", listen, two.address])
    time.sleep(0.5)
    two.lose_power()
    assert two.processes() == []
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(0.5)


def test_a_host_ends_with_whoever_made_it(tmp_path):
    note = tmp_path / "pid"
    script = (
        "import sys, time; from nodes import Lab; host = Lab(1).hosts[0]; "
        f"print(host.start(['sleep', '60']).pid, file=open({str(note)!r}, 'w'), flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=Path(nodes.__file__).parent.parent)
    eventually(lambda: note.exists() and note.read_text().endswith("\n"))
    pid = int(note.read_text())
    owner.kill()
    owner.wait()
    eventually(lambda: not os.path.exists(f"/proc/{pid}") or _state(pid) == "Z")


def test_a_control_plane_behind_a_broken_network_is_a_lost_connection(lab):
    """What an agent's uplink tries again after; anything else ends it for good."""
    one, two, _ = lab.hosts
    command = (sys.executable, "-c", CONNECT, f"tcp://{two.address}:29400")
    one.cut()
    assert "lost: " in one.run(*command, timeout_s=20.0 + start_up.limit_s())
    one.interface(up=False)
    assert "lost: " in one.run(*command, timeout_s=20.0 + start_up.limit_s())


def serve(host) -> None:
    server = host.start([sys.executable, "-c", ECHO, host.address], stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"up\n"
    server.stdout.close()


def is_answered(host, other, patience_s: float = 0.5) -> bool:
    try:
        host.run(sys.executable, "-c", ASK, other.address, str(patience_s), timeout_s=60)
    except subprocess.CalledProcessError:
        return False
    return True


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
