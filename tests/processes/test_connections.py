"""The round trips that the kernel measures for TCP connections: of real connections, between simulated hosts."""

import contextlib
import socket
import subprocess
import sys

import pytest
from nodes import Lab, why_not

from ft.platform import network

PORT, DELAY_S = 7000, 0.05
PROGRAM = f"""
import socket, sys
from ft.platform.network import round_trip_s

hosts, *others = sys.argv[1:]
server = socket.create_server(("", {PORT}))
print("listens", flush=True)
sys.stdin.readline()
connected = [socket.create_connection((other, {PORT}), timeout=5) for other in others]
accepted = [server.accept()[0] for _ in range(int(hosts) - 1 - len(others))]
for _ in range(20):  # what the kernel has measured becomes smooth
    for one in connected + accepted:
        one.sendall(b"x")
    assert all(one.recv(1) == b"x" for one in connected + accepted)
print("connected", flush=True)
sys.stdin.readline()
print(round_trip_s(), flush=True)
sys.stdin.readline()
"""


def test_connections_within_this_host_do_not_count_but_are_seen():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(b"x")
        found = [rtt_s for here, there, rtt_s in network._connections(socket.AF_INET) if here == there]
        assert found and all(0 < rtt_s < 5 for rtt_s in found)
    rtt_s = network.round_trip_s()
    assert rtt_s is None or rtt_s > 0


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("slow", [0, 2])
def test_the_host_with_a_slow_connection_is_far_from_all_others(slow):
    with Lab(3) as lab, contextlib.ExitStack() as stack:
        lab.hosts[slow].degrade(delay_s=DELAY_S)
        addresses = [host.address for host in lab.hosts]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started = [
            host.start([sys.executable, "-c", PROGRAM, "3", *addresses[: host.index]], **pipes) for host in lab.hosts
        ]
        for process in started:
            stack.enter_context(process)
            stack.callback(process.kill)
        for expected in ("listens", "connected"):
            for process in started:
                assert process.stdout.readline().strip() == expected
            for process in started:
                process.stdin.write("\n")
                process.stdin.flush()
        found = [float(process.stdout.readline()) for process in started]
    assert found.index(max(found)) == slow and found[slow] >= DELAY_S, found
    assert sorted(found)[1] < found[slow] / 3, found
