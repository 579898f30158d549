"""Compare the latency of FT-HSDP's quorum with that of the same round trip over the control plane's channel.

    python tools/bench/quorum.py

Prints one JSON line. `quorum_ms` and `channel_ms` are the median and the 99th percentile of the time from the first of
``--replicas`` reports to the last answer. `restart_ms`: a server is killed and another one is started at once; the time
until the requests made meanwhile are answered. `channel_start_ms`: time until clients can connect to a channel that a
new process hosts.
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from in_ranks import ROOT

from ft.base import token
from ft.job.quorum import QuorumClient, Report

LIMIT_S, WARM_UP = 60.0, 20
CHANNEL_HOST = """
import sys
from ft.job.control.channel import ChannelRecord, ControlChannel
from ft.job.messages import Observed
channel, replicas, heard = ControlChannel("tcp://127.0.0.1:0", "token"), int(sys.argv[1]), 0
channel.resume(ChannelRecord())
print(channel.where, flush=True)
while True:
    if channel.receive(60.0) is not None:
        heard += 1
        if heard % replicas == 0:
            channel.publish(Observed("quorum", {}))
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3, help="of the run")
    parser.add_argument("--rounds", type=int, default=400, help="that count")
    arguments = parser.parse_args(argv)
    figures = quorum(arguments.replicas, arguments.rounds) | over_channel(arguments.replicas, arguments.rounds)
    print(json.dumps({"bench": "quorum"} | figures | vars(arguments)))
    return 0


def quorum(replicas: int, rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        secret = token.make(Path(folder), {})
        server = serve(folder, replicas)
        clients = [QuorumClient(folder, replica, 0, secret) for replica in range(replicas)]
        for client in clients:
            client.hello([])
        seconds, state = [], (0, 0)
        for _ in range(WARM_UP + rounds):
            began = time.perf_counter()
            answers = [client.ask(Report(client.replica, 0, *state)) for client in clients]
            given = [answer.result(LIMIT_S) for answer in answers]
            seconds.append(time.perf_counter() - began)
            state = (given[0].step + 1, given[0].number)
        server.kill()
        server.wait()
        began = time.perf_counter()
        answers = [client.ask(Report(client.replica, 0, *state)) for client in clients]
        server = serve(folder, replicas)
        for answer in answers:
            answer.result(LIMIT_S)
        restart = time.perf_counter() - began
        for client in clients:
            client.close()
        server.kill()
        server.wait()
    return {"quorum_ms": summary(seconds[WARM_UP:]), "restart_ms": round(1e3 * restart, 1)}


def over_channel(replicas: int, rounds: int) -> dict:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its client logs a page for each connection that ends
    from ft.job.control.channel import AgentChannel
    from ft.job.messages import Observed

    began = time.perf_counter()
    host = subprocess.Popen(
        [sys.executable, "-c", CHANNEL_HOST, str(replicas)], stdout=subprocess.PIPE, env=environment()
    )
    where = host.stdout.readline().decode().strip()
    ends = [AgentChannel(where, f"n{number}", "token", LIMIT_S) for number in range(replicas)]
    started = time.perf_counter() - began
    came = [queue.Queue() for _ in ends]
    for end, inbox in zip(ends, came, strict=True):
        threading.Thread(target=follow, args=(end, inbox), daemon=True).start()
    seconds = []
    for number in range(1, WARM_UP + rounds + 1):
        began = time.perf_counter()
        for end in ends:
            end.post(number, Observed("report", {}))
        for inbox in came:
            inbox.get(timeout=LIMIT_S)
        seconds.append(time.perf_counter() - began)
    for end in ends:
        end.close()
    host.kill()
    host.wait()
    return {"channel_ms": summary(seconds[WARM_UP:]), "channel_start_ms": round(1e3 * started, 1)}


def follow(end, inbox: queue.Queue) -> None:
    try:
        end.follow(lambda number, order: inbox.put(number), 0)
    except ConnectionError:  # the end of the measurement
        return


def serve(folder: str, replicas: int) -> subprocess.Popen:
    options = json.dumps({"replicas": replicas})
    command = [sys.executable, "-m", "ft.job.quorum", "--run-dir", folder, "--options", options]
    return subprocess.Popen(command, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1e3 * value for value in seconds)
    return {"p50": round(statistics.median(ordered), 3), "p99": round(ordered[int(0.99 * len(ordered))], 3)}


if __name__ == "__main__":
    sys.stdout.flush()
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads may be inside torch's store: an orderly exit of the interpreter would abort the process
