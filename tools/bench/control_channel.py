"""Measure the latency of messages between agents and the control plane, over TCPStore and over etcd.

    python tools/bench/control_channel.py

Prints one JSON line. ``report_ms`` is the median time from ``post`` in an agent until ``receive`` returns the report in
the control plane. ``order_ms`` is the median time from ``publish`` until a follower has received the order.
``*_p99_ms`` is the 99th percentile. One message is sent at a time, and all ends are in one process on this machine.
``etcd3`` is a cluster of three servers, which have to agree; all servers write to disk as they do by default.
"""

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from ft.base.errors import UserError  # noqa: E402
from ft.job.control import channel as channels  # noqa: E402
from ft.job.control.channel import Record  # noqa: E402
from ft.job.messages import Close, WorkerStarted  # noqa: E402

TOKEN = "bench"
LIMIT_S = 30.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=500, help="of each direction")
    given = parser.parse_args(argv)
    if shutil.which("etcd") is None:
        raise UserError("etcd is not installed", "apt install etcd-server")
    found = {
        "bench": "control_channel",
        "messages": given.messages,
        "tcp": measure("tcp://127.0.0.1:0", given.messages),
    }
    for members in (1, 3):
        with tempfile.TemporaryDirectory() as folder:
            found[f"etcd{members}"] = on_etcd(Path(folder), members, given.messages)
    print(json.dumps(found))
    return 0


def on_etcd(folder: Path, members: int, messages: int) -> dict[str, float]:
    ports = free_ports(2 * members)
    peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
    cluster = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
    servers = []
    for i, peer in enumerate(peers):
        client = f"http://127.0.0.1:{ports[i]}"
        command = ["etcd", "--name", f"m{i}", "--data-dir", str(folder / f"m{i}"), "--initial-cluster", cluster]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        with open(folder / f"m{i}.log", "w") as log:
            servers.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=folder))
    try:
        return measure("etcd://" + ",".join(f"127.0.0.1:{port}" for port in ports[:members]), messages)
    finally:
        for server in servers:
            server.kill()
            server.wait()


def measure(where: str, messages: int) -> dict[str, float]:
    control = channels.host(where, "bench", TOKEN)
    control.resume(Record())
    agent = channels.connect(control.where, "n0", TOKEN, LIMIT_S)
    came: SimpleQueue = SimpleQueue()
    threading.Thread(target=receive, args=(control, came, messages), daemon=True).start()
    reports = timed(lambda i: agent.post(i, WorkerStarted("n0.w0", "n0", i, 0)), came, range(1, messages + 1))
    threading.Thread(target=follow, args=(agent, came), daemon=True).start()
    orders = timed(lambda i: control.publish(Close(i, "bench")), came, range(messages))
    agent.close()
    control.close()
    return {**figures("report", reports), **figures("order", orders)}


def receive(control: channels.ControlChannel, came: SimpleQueue, messages: int) -> None:
    for _ in range(messages):
        control.receive(LIMIT_S)
        came.put(time.perf_counter())


def follow(agent: channels.AgentChannel, came: SimpleQueue) -> None:
    try:
        agent.follow(lambda number, order: came.put(time.perf_counter()), 0)
    except ConnectionError:
        return  # the channel was closed


def timed(send, came: SimpleQueue, numbers: range) -> list[float]:
    """Return the seconds from the call of ``send`` until a message has arrived, for each number."""
    found = []
    for number in numbers:
        began = time.perf_counter()
        send(number)
        found.append(came.get(timeout=LIMIT_S) - began)
    return found


def figures(name: str, seconds: list[float]) -> dict[str, float]:
    p99 = statistics.quantiles(seconds, n=100)[98]
    return {f"{name}_ms": round(statistics.median(seconds) * 1e3, 3), f"{name}_p99_ms": round(p99 * 1e3, 3)}


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
