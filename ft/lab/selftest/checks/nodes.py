"""Checks of the nodes: versions and settings, the run folder, and what lies between nodes: ports and clocks.

Of versions and settings, it is said what is installed, and whether all nodes agree. The run folder has to take durable
writes, and the files through which leaders are elected.
"""

import errno
import importlib.metadata
import json
import os
import platform as machine
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from ft.base import bounded_json
from ft.job.agent.environment import defaults
from ft.job.control.timeouts import Timeouts
from ft.lab.selftest.table import Context, Failed, Measured, Skipped
from ft.platform import election, network
from ft.show.text import count, seconds

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex", "flash-attn", "triton", "numpy", "mpi4py")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "NVTE_", "GLOO_")
_NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF")
_OWN = ("NCCL_HOSTID", "CUDA_VISIBLE_DEVICES")
"""Settings that may differ between nodes."""
_DRIVER_S = 20.0
_QUEUES, _BLACKWELL = "CUDA_DEVICE_MAX_CONNECTIONS", (10, 0)
_SPLIT = ["--tensor-model-parallel-size", "2"]
"""A flag of a script for which ``ft run`` chooses the number of the device's queues."""


def versions(context: Context) -> tuple[str, Measured]:
    """Collect the versions of the installed packages and the settings of the environment.

    Raises:
        Failed: torch or megatron-core is not installed, or this node differs from node 0.
        UserError: this project's patches do not fit the installed megatron-core.
    """
    found = _packages()
    if context.planted:
        del found["megatron-core"]
    if "torch" not in found:
        raise Failed(
            "torch is not installed here", "install this project with pip in the environment of training", found
        )
    if "megatron-core" not in found:
        raise Failed("megatron-core is not installed here", "pip install megatron-core, as setup.py names it", found)
    settings = _settings()
    from ft.state.groups.backends import prepare_nccl  # imports torch, which may be missing

    replaced: list[str] = []
    prepare_nccl(Timeouts().launch_s, replaced.append)
    import torch

    from megatron import patches

    patches.apply()
    here = patches.platform()
    found.update(python=machine.python_version(), platform=here.name, **_of_devices(torch, here.name))
    _compare(context, {**found, **settings})
    gpus = (
        f"{found['gpus']} x {found['gpu']}, driver {found['driver']}, NCCL {found['nccl']}"
        if found["gpus"]
        else "no GPU"
    )
    extras = [f"{name} {found[name]}" for name in ("transformer-engine", "apex", "flash-attn") if name in found]
    said = ", ".join([f"torch {found['torch']}, core {found['megatron-core']}", *extras, gpus])
    told = [*replaced, *queues(settings.get(_QUEUES), found.get("capability"))]
    return "; ".join([said, *told]), {**found, "settings": settings}


def queues(given: str | None, capability: Sequence[int] | None) -> list[str]:
    """Return a sentence if the site has set a number of CUDA's queues with which communication is not hidden.

    Args:
        given: the variable CUDA_DEVICE_MAX_CONNECTIONS, None if it is not set: ``ft run`` then chooses it.
        capability: CUDA's compute capability of the GPU, None without one.
    """
    wanted = defaults({}, _SPLIT)[_QUEUES]
    if given in (None, wanted) or capability is None or tuple(capability) >= _BLACKWELL:
        return []
    return [f"{_QUEUES}={given}: with tensor or context parallelism this GPU hides communication only with {wanted}"]


def _packages() -> Measured:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _settings() -> dict[str, str]:
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES) or name in _NAMES)
    return {name: os.environ[name] for name in names}


def _of_devices(torch, platform: str) -> Measured:
    if platform != "cuda":
        return {"gpus": 0, "cuda_build": torch.version.cuda or "none"}
    return {
        "gpus": torch.cuda.device_count(),
        "gpu": torch.cuda.get_device_name(0),
        "capability": list(torch.cuda.get_device_capability(0)),
        "cuda_build": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": _driver(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"


def _compare(context: Context, mine: Measured) -> None:
    """Compare with node 0.

    Raises:
        Failed: something differs.
    """
    store = context.store_of_all_nodes()
    if store is None:
        return
    mine = {**mine, "ft": sys.modules["ft"].__file__, "executable": sys.executable}
    if context.node == 0:
        store.set("versions", json.dumps(mine))
        return
    store.wait(["versions"], timedelta(seconds=context.limit_s))
    theirs = bounded_json.loads(store.get("versions"), non_finite=True)
    names = sorted((mine.keys() | theirs.keys()) - set(_OWN))
    other = [f"{name} {mine.get(name, 'missing')} here, {theirs.get(name, 'missing')} on node 0" for name in names]
    other = [text for name, text in zip(names, other, strict=True) if mine.get(name) != theirs.get(name)]
    if other:
        raise Failed("; ".join(other[:3]), "use the same image, environment and settings on all nodes", mine)


_ROUNDS, _BLOCK, _FILE = 20, 4096, 32 << 20
_POLL_S = 0.005
_FIX = "give --run-dir (and ft run --run-dir) a folder that all nodes can write, on a file system with less latency"


def storage(context: Context) -> tuple[str, Measured]:
    """Measure writes, renames and leases in the run folder, and on several nodes how late they see a renewal."""
    folder = Path(context.run_dir) / f"storage-{context.node}"
    if context.planted:
        (context.scratch / "file").touch()
        folder = context.scratch / "file" / "below"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        measured = _measure(folder)
    except OSError as error:
        raise Failed(f"{folder} cannot be written: {error.strerror}", _FIX) from error
    measured.update(_seen(context))
    timeouts = Timeouts()
    longest = timeouts.lease_s - timeouts.lease_beat_s
    for name, what in (
        ("lease_longest_s", "renewing a lease took up to"),
        ("seen_s", "another node saw a renewal after"),
    ):
        if measured.get(name, 0.0) > longest:
            problem = f"{what} {seconds(measured[name])}: leases expire after {seconds(timeouts.lease_s)}"
            raise Failed(problem, _FIX, measured)
    parts = [f"fsync {seconds(measured['fsync_s'])}", f"rename {seconds(measured['rename_s'])}"]
    parts += [f"lease {seconds(measured['lease_s'])}, at most {seconds(measured['lease_longest_s'])}"]
    parts += [f"{measured['write_mb_s']:.0f} MB/s"]
    parts += [f"seen by other nodes in {seconds(measured['seen_s'])}"] if "seen_s" in measured else []
    return ", ".join(parts), measured


def _measure(folder: Path) -> Measured:
    block = os.urandom(_BLOCK)
    path, other = folder / "block", folder / "renamed"

    def durable() -> None:
        with open(path, "wb") as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())

    def renamed() -> None:
        path.touch()
        path.replace(other)

    standing = election.LeaseRecord(election.claim_next(folder, "selftest"), 0, "", "selftest", os.getpid())

    def lease() -> None:
        election.renew(folder, standing)
        if election.read(folder) != standing:
            raise OSError(5, "a lease that was just written reads otherwise")

    leases = _times(lease)
    measured = {
        "fsync_s": statistics.median(_times(durable)),
        "rename_s": statistics.median(_times(renamed)),
        "lease_s": statistics.median(leases),
        "lease_longest_s": max(leases),
    }
    began = time.monotonic()
    with open(path, "wb") as file:
        for _ in range(_FILE >> 20):
            file.write(block * ((1 << 20) // _BLOCK))
        file.flush()
        os.fsync(file.fileno())
    measured["write_mb_s"] = _FILE / 1e6 / (time.monotonic() - began)
    for left in (path, other):
        left.unlink(missing_ok=True)
    return measured


def _times(act: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(_ROUNDS):
        began = time.monotonic()
        act()
        times.append(time.monotonic() - began)
    return times


def _seen(context: Context) -> Measured:
    """Return how many seconds after node 0 has renewed a lease the other nodes see it; nothing with one node."""
    store = context.store_of_all_nodes()
    if store is None:
        return {}
    folder, limit = Path(context.run_dir) / "storage-0", timedelta(seconds=context.limit_s)
    last = context.nnodes - 1
    if context.node == 0:
        store.set("first", json.dumps(election.newest(folder)))
        store.wait([f"watches/{node}" for node in range(1, last + 1)], limit)
        election.renew(folder, election.LeaseRecord(election.newest(folder), 0, "", "seen", os.getpid(), 1))
        store.set("renewed", "")
        store.wait([f"seen/{node}" for node in range(1, last + 1)], limit)
        return {"seen_s": max(float(store.get(f"seen/{node}")) for node in range(1, last + 1))}
    store.wait(["first"], limit)
    election.read(folder)  # the node's caches now hold the old file
    store.set(f"watches/{context.node}", "")
    store.wait(["renewed"], limit)
    began, deadline = time.monotonic(), time.monotonic() + context.limit_s / 2
    while ((found := election.read(folder)) is None or found.node != "seen") and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    took = time.monotonic() - began
    store.set(f"seen/{context.node}", str(took))
    if found is None or found.node != "seen":
        raise Failed(
            f"a lease that node 0 wrote to {folder} is not seen here", "give --run-dir a folder that all nodes share"
        )
    return {"seen_s": took}


_ONE_NODE = "this is one node: nothing to compare it with"
_CONNECT_S, _PLANTED_S = 5.0, 10.0
_LARGEST_SKEW_S = 0.5
"""Reports compare the times of events on several nodes; recoveries take from tenths of a second on."""
_PORTS_FIX = (
    "let the nodes of a job reach each other at all TCP ports (firewall, security group), or name the right network: "
    "--local-addr of ft run, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
)
_BULK_FIX = "name an interface that leads to all nodes: --data-interface of ft run, NCCL_SOCKET_IFNAME"
_STREAMS, _SENDS_S = 4, 1.0
"""Connections that send at the same time: one alone does not fill a fast network."""
_CLOCK_FIX = (
    "synchronise the nodes' clocks (chrony or NTP); recovery works without, but reports mix up the order of events"
)


def ports(context: Context) -> tuple[str, Measured]:
    """Let every node listen at a port of its choice, connect from every node to all others, and send bulk data."""
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
    interface, gb_s = _rate(context, store)
    store.set(f"done/{context.node}", "")
    store.wait([f"done/{node}" for node in range(context.nnodes)], timedelta(seconds=context.limit_s / 2))
    if lost:
        raise Failed(f"{context.host} does not reach {', '.join(lost[:4])}", _PORTS_FIX, {"unreachable": len(lost)})
    if isinstance(gb_s, str):
        raise Failed(f"{context.host} cannot send bulk data over {interface}: {gb_s}", _BULK_FIX)
    measured = {"reached": len(others), "slowest_s": max(times), "interface": interface, "sends_gb_s": gb_s}
    reached = f"each reaches {count(len(others), 'other')}, slowest connection {seconds(max(times))}"
    return f"{reached}; {gb_s:.2f} GB/s over {interface} (ft check tells the bytes of a snapshot)", measured


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


def _rate(context: Context, store) -> tuple[str, float | str]:
    """Return (interface of bulk data, GB/s to the next node while all nodes send at once, or why nothing arrives)."""
    name, address = network.bulk_interface(os.environ)
    listener = socket.create_server((address or context.host, 0))
    threading.Thread(target=_count, args=(listener,), daemon=True).start()
    store.set(f"bulk/{context.node}", json.dumps(listener.getsockname()[:2]))
    store.wait([f"bulk/{node}" for node in range(context.nnodes)], timedelta(seconds=context.limit_s / 2))
    place = bounded_json.loads(store.get(f"bulk/{(context.node + 1) % context.nnodes}"), non_finite=True)
    name = name or "the interface of the control messages"
    try:
        with ThreadPoolExecutor(_STREAMS) as pool:
            return name, sum(pool.map(lambda _: _send(*place), range(_STREAMS))) / 1e9
    except OSError as error:
        return name, f"{place[0]}: {error.strerror or error}"


def _send(host: str, port: int) -> float:
    """Send for a second, and return the bytes per second that have arrived.

    Raises:
        OSError: there is no connection, or it has broken.
    """
    block, began = bytes(1 << 20), time.monotonic()
    with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
        while time.monotonic() < began + _SENDS_S:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        arrived = connection.recv(8, socket.MSG_WAITALL)
    if len(arrived) < 8:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
    return int.from_bytes(arrived) / (time.monotonic() - began)


def _count(listener: socket.socket) -> None:
    while True:
        threading.Thread(target=_counted, args=(listener.accept()[0],), daemon=True).start()


def _counted(client: socket.socket) -> None:
    """Read to the end of what a client sends, and answer with the number of bytes."""
    space, arrived = bytearray(1 << 20), 0
    with client:
        while got := client.recv_into(space):
            arrived += got
        client.sendall(arrived.to_bytes(8))


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
