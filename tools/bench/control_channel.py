"""Measure the latency of messages between agents and the control plane.

    python tools/bench/control_channel.py

Prints one JSON line. ``report_ms`` is the median time from ``post`` in an agent until ``receive`` returns the report in
the control plane. ``order_ms`` is the median time from ``publish`` until a follower has received the order.
``*_p99_ms`` is the 99th percentile. One message is sent at a time, and all ends are in one process on this machine.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from ft.job.control.channel import AgentChannel, ControlChannel, Record  # noqa: E402
from ft.job.messages import Close, WorkerStarted  # noqa: E402

TOKEN = "bench"
LIMIT_S = 30.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=500, help="of each direction")
    given = parser.parse_args(argv)
    print(json.dumps({"bench": "control_channel", "messages": given.messages, "tcp": measure(given.messages)}))
    return 0


def measure(messages: int) -> dict[str, float]:
    control = ControlChannel("tcp://127.0.0.1:0", TOKEN)
    control.resume(Record())
    agent = AgentChannel(control.where, "n0", TOKEN, LIMIT_S)
    came: SimpleQueue = SimpleQueue()
    threading.Thread(target=receive, args=(control, came, messages), daemon=True).start()
    reports = timed(lambda i: agent.post(i, WorkerStarted("n0.w0", "n0", i, 0)), came, range(1, messages + 1))
    threading.Thread(target=follow, args=(agent, came), daemon=True).start()
    orders = timed(lambda i: control.publish(Close(i, "bench")), came, range(messages))
    agent.close()
    control.close()
    return {**figures("report", reports), **figures("order", orders)}


def receive(control: ControlChannel, came: SimpleQueue, messages: int) -> None:
    for _ in range(messages):
        control.receive(LIMIT_S)
        came.put(time.perf_counter())


def follow(agent: AgentChannel, came: SimpleQueue) -> None:
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
