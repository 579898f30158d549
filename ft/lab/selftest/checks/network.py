"""Checks of what lies between nodes: ports that every node reaches, and clocks that agree."""

import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from ft.base import bounded_json
from ft.lab.selftest.table import Context, Failed, Measured, Skipped
from ft.show.text import count, seconds

_ONE_NODE = "this is one node: nothing to compare it with"
_CONNECT_S, _ROUNDS, _PLANTED_S = 5.0, 20, 10.0
_LARGEST_SKEW_S = 0.5
"""Reports compare the times of events on several nodes; recoveries take from tenths of a second on."""
_PORTS_FIX = (
    "let the nodes of a job reach each other at all TCP ports (firewall, security group), or name the right network: "
    "--local-addr of ft run, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
)
_CLOCK_FIX = (
    "synchronise the nodes' clocks (chrony or NTP); recovery works without, but reports mix up the order of events"
)


def ports(context: Context) -> tuple[str, Measured]:
    """Let every node listen at a port of its choice, and connect from every node to all others."""
    store = context.store_of_all_nodes()
    if store is None:
        raise Skipped(_ONE_NODE)
    listener = socket.create_server(("", 0), backlog=1024)
    port = listener.getsockname()[1]
    threading.Thread(target=_greet, args=(listener,), daemon=True).start()
    said = 1 if context.planted and context.node == 0 else port  # nothing listens at port 1
    store.set(f"at/{context.node}", json.dumps([context.host, said]))
    others = [node for node in range(context.nnodes) if node != context.node]
    store.wait([f"at/{node}" for node in others], timedelta(seconds=context.limit_s / 2))
    places = [bounded_json.loads(store.get(f"at/{node}"), non_finite=True) for node in others]
    with ThreadPoolExecutor(64) as pool:
        times = list(pool.map(lambda place: _reach(*place), places))
    lost = [
        f"{host}:{port} ({took})" for (host, port), took in zip(places, times, strict=True) if isinstance(took, str)
    ]
    store.set(f"done/{context.node}", "")
    store.wait([f"done/{node}" for node in range(context.nnodes)], timedelta(seconds=context.limit_s / 2))
    if lost:
        raise Failed(f"{context.host} does not reach {', '.join(lost[:4])}", _PORTS_FIX, {"unreachable": len(lost)})
    measured = {"reached": len(others), "slowest_s": max(times)}
    return f"each reaches {count(len(others), 'other')}, slowest connection {seconds(max(times))}", measured


def _greet(listener: socket.socket) -> None:
    while True:
        client, _ = listener.accept()
        with client:
            client.sendall(b"!")


def _reach(host: str, port: int) -> float | str:
    """Return the seconds until a byte has arrived from ``host:port``, or the reason why none has."""
    began = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
            if connection.recv(1) != b"!":
                return "closed without an answer"
    except OSError as error:
        return error.strerror or str(error)
    return time.monotonic() - began


def clocks(context: Context) -> tuple[str, Measured]:
    """Measure how far each node's clock is from that of node 0, as NTP does: by the fastest of several exchanges."""
    store = context.store_of_all_nodes()
    if store is None:
        raise Skipped(_ONE_NODE)
    limit = timedelta(seconds=context.limit_s / 2)
    if context.node == 0:
        listener = socket.create_server(("", 0), backlog=1024)
        threading.Thread(target=_tell_time, args=(listener, _PLANTED_S * context.planted), daemon=True).start()
        store.set("clock", json.dumps([context.host, listener.getsockname()[1]]))
        others = range(1, context.nnodes)
        store.wait([f"skew/{node}" for node in others], limit)
        skew = max((float(store.get(f"skew/{node}")) for node in others), key=abs)
        measured = {"largest_skew_s": skew}
        return f"the farthest of {context.nnodes} is {seconds(abs(skew))} off that of node 0", measured
    store.wait(["clock"], limit)
    try:
        skew, error = _skew(*bounded_json.loads(store.get("clock"), non_finite=True))
    except OSError as problem:
        store.set(f"skew/{context.node}", "0")
        raise Failed(f"node 0 does not tell the time: {problem}", _PORTS_FIX) from problem
    store.set(f"skew/{context.node}", str(skew))
    measured = {"skew_s": skew, "error_s": error}
    if abs(skew) - error > _LARGEST_SKEW_S:
        raise Failed(
            f"its clock is {seconds(abs(skew))} {'ahead of' if skew > 0 else 'behind'} that of node 0",
            _CLOCK_FIX,
            measured,
        )
    return f"its clock is {seconds(abs(skew))} off that of node 0", measured


def _tell_time(listener: socket.socket, ahead_s: float) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_answer, args=(client, ahead_s), daemon=True).start()


def _answer(client: socket.socket, ahead_s: float) -> None:
    with client:
        while client.recv(1):
            client.sendall(struct.pack("!d", time.time() + ahead_s))


def _skew(host: str, port: int) -> tuple[float, float]:
    """Return (seconds by which this clock is ahead of that at ``host:port``, largest error of that figure)."""
    found = []
    with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_ROUNDS):
            asked = time.time()
            connection.sendall(b"?")
            (theirs,) = struct.unpack("!d", connection.recv(8, socket.MSG_WAITALL))
            answered = time.time()
            found.append((answered - asked, (asked + answered) / 2 - theirs))
    took, skew = min(found)
    return skew, took / 2
