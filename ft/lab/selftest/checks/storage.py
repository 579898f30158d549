"""Check of the run folder: durable writes, and the files through which leaders are elected."""

import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from ft.job.control.timeouts import Timeouts
from ft.lab.selftest.table import Context, Failed, Measured
from ft.platform import election
from ft.show.text import seconds

_ROUNDS, _BLOCK, _FILE = 20, 4096, 32 << 20
_LOOK_S = 0.005
_FIX = "give --run-dir (and ft run --run-dir) a folder that all nodes can write, on a file system with less latency"


def storage(context: Context) -> tuple[str, Measured]:
    """Measure writes, renames and leases in the run folder, and on several nodes how late they see a renewal."""
    folder = Path(context.run_dir) / f"storage-{context.node}"
    if context.planted:
        folder = _below_a_file(context.scratch)
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


def _below_a_file(scratch: Path) -> Path:
    (scratch / "file").touch()
    return scratch / "file" / "below"


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
        time.sleep(_LOOK_S)
    took = time.monotonic() - began
    store.set(f"seen/{context.node}", str(took))
    if found is None or found.node != "seen":
        raise Failed(
            f"a lease that node 0 wrote to {folder} is not seen here", "give --run-dir a folder that all nodes share"
        )
    return {"seen_s": took}
