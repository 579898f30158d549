"""Compare FTAR with gloo's all-reduce in one run: bandwidth by number of processes, size and type.

    python tools/bench/ftar.py

Prints one JSON line. Each entry of `cells` is one combination (processes, MiB, type) with the medians `ftar_ms` and
`gloo_ms`, and `ratio`, gloo's time divided by FTAR's. FTAR sends the sums of bf16 in fp32 and rounds once,
where gloo rounds every sum. The least ratios are `at_64_and_more` MiB and `at_1` for fp32, and `wide_at_64_and_more`
for bf16. `busy` is the same at 64 MiB while the caller's thread computes matrix products: the time until both are
done.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from ft.systems.hsdp.ring import Ring, RingOptions  # noqa: E402

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS, WARM = 5, 2
MATRIX, BUSY_MIB = 512, 64


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--types", nargs="+", choices=sorted(TYPES), default=sorted(TYPES))
    parser.add_argument("--chunk-kib", type=int, default=RingOptions.chunk_bytes >> 10)
    parser.add_argument("--chunks", type=int, default=RingOptions.chunks)
    parser.add_argument("--streams", type=int, default=RingOptions.streams)
    arguments = parser.parse_args(argv)
    cells, busy = [], []
    for processes in arguments.processes:
        with tempfile.TemporaryDirectory() as folder:
            mine = in_processes(processes, Path(folder), arguments)
        cells += mine["cells"]
        busy += mine["busy"]
    alike = [cell for cell in cells if cell["type"] == "fp32"]
    wide = [cell for cell in cells if cell["type"] == "bf16"]
    result = {"bench": "ftar", "at_64_and_more": least(alike, 64, 1 << 20), "at_1": least(alike, 1, 1)}
    result["wide_at_64_and_more"] = least(wide, 64, 1 << 20)
    print(json.dumps(result | {"cells": cells, "busy": busy} | vars(arguments)))
    return 0


def least(cells: list[dict], low: int, high: int) -> float | None:
    return min((cell["ratio"] for cell in cells if low <= cell["mib"] <= high), default=None)


def in_processes(count: int, folder: Path, arguments: argparse.Namespace) -> dict:
    """Return what rank 0 of ``count`` forked ranks has measured."""
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                found = measure(rank, count, folder, arguments)
                if rank == 0:
                    (folder / "result").write_text(json.dumps(found))
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    if any(os.waitpid(pid, 0)[1] for pid in pids):
        raise SystemExit(f"a rank of {count} failed")
    return json.loads((folder / "result").read_text())


def measure(rank: int, count: int, folder: Path, arguments: argparse.Namespace) -> dict:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count, timeout=timedelta(seconds=120)
    )
    ring = ring_of(rank, count, arguments)
    cells = [cell(ring, count, mib, kind) for kind in arguments.types for mib in arguments.mib]
    busy = [cell(ring, count, BUSY_MIB, kind, Computing()) for kind in arguments.types]
    dist.barrier()
    ring.close()
    dist.destroy_process_group()
    return {"cells": cells, "busy": busy}


def ring_of(rank: int, count: int, arguments: argparse.Namespace) -> Ring:
    """Return this rank's ring, over all ranks."""
    options = RingOptions(arguments.chunk_kib << 10, arguments.chunks, arguments.streams)
    ring = Ring("127.0.0.1", "bench", options)
    addresses: list[str] = [""] * count
    dist.all_gather_object(addresses, ring.address)
    ring.reconfigure(1, addresses, rank)
    return ring


class Computing:
    """Work for the caller's thread that takes about as long as the all-reduce that runs meanwhile."""

    def __init__(self):
        self._matrix = torch.randn(MATRIX, MATRIX)

    def __call__(self) -> None:
        for _ in range(10):
            torch.mm(self._matrix, self._matrix)


def cell(ring: Ring, count: int, mib: int, name: str, beside: Callable[[], None] = lambda: None) -> dict:
    """Measure one size and type, alternating FTAR and gloo, so that both see the same load of the machine."""
    tensor = torch.empty((mib << 20) // TYPES[name].itemsize, dtype=TYPES[name])
    turns = max(1, min(30, 64 // mib))

    def ftar() -> None:
        pending = ring.all_reduce(tensor)
        beside()
        outcome = pending.wait()
        if not outcome.ok:
            raise SystemExit(outcome.reason)

    def gloo() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        beside()
        work.wait()

    times: dict[str, list[float]] = {"ftar": [], "gloo": []}
    for turn in range(ROUNDS + 1):
        for which, reduce in (("gloo", gloo), ("ftar", ftar)):
            for _ in range(turns if turn else WARM):
                seconds = timed(tensor, reduce, count)
                if turn:
                    times[which].append(seconds)
    ftar_ms, gloo_ms = (1e3 * statistics.median(times[which]) for which in ("ftar", "gloo"))
    found = {"processes": count, "mib": mib, "type": name, "ftar_ms": round(ftar_ms, 3), "gloo_ms": round(gloo_ms, 3)}
    return found | {"ratio": round(gloo_ms / ftar_ms, 2)}


def timed(tensor: torch.Tensor, reduce: Callable[[], None], count: int) -> float:
    tensor.fill_(1.0)
    dist.barrier()
    begun = time.perf_counter()
    reduce()
    seconds = time.perf_counter() - begun
    if tensor[0] != count or tensor[-1] != count:
        raise SystemExit(f"{tensor[0]} is not the sum of {count} ones")
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
