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
stream, began = connection.makefile("rwb"), time.monotonic()
for number in range(int(sys.argv[3])):
    stream.write(b"x" * int(sys.argv[4]) + b"\\n")
    stream.flush()
    assert stream.readline()
print(time.monotonic() - began)
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


def test_hosts_have_names_and_addresses_and_reach_each_other_only(lab):
    one, two, _ = lab.hosts
    assert one.run("hostname").strip() == "host0"
    assert one.address in one.run("ip", "-br", "address", "show", "eth0")
    serve(two)
    assert ask(one, two) < 5
    with pytest.raises(subprocess.CalledProcessError, match="1"):
        one.run(sys.executable, "-c", "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)")


@pytest.mark.parametrize("out, into", [(True, True), (True, False), (False, True)])
def test_a_cut_stops_conversations_until_it_is_repaired_and_leaves_the_others(lab, out, into):
    one, two, three = lab.hosts
    serve(two)
    serve(three)
    two.cut(out=out, into=into)
    assert ask(one, two) is None and ask(one, three) is not None
    two.repair()
    assert ask(one, two) is not None
    lab.part([three])
    assert ask(one, two) is not None and ask(three, two) is None


def test_an_interface_that_is_down_is_known_to_its_own_host(lab):
    one, two, _ = lab.hosts
    serve(two)
    one.interface(up=False)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        one.run(sys.executable, "-c", ASK, two.address, "5", "1", "1")
    assert "unreachable" in caught.value.output
    one.interface(up=True)
    assert ask(one, two) is not None


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


def ask(host, other, count: int = 1, size: int = 10, patience_s: float = 0.5) -> float | None:
    """Seconds that `count` questions to `other` took; None: no answer."""
    try:
        return float(
            host.run(sys.executable, "-c", ASK, other.address, str(patience_s), str(count), str(size), timeout_s=60)
        )
    except subprocess.CalledProcessError:
        return None


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
