"""Compare snapshots over TCP with snapshots over MPI: bandwidth and cost per step, in the same two processes.

    python tools/bench/transport.py

Two workers hold copies for each other, like data-parallel neighbours. Each has a node and a relay of its own
(`mpirun -n 2` on this machine). Prints one JSON line. `send` is the MB/s of each worker while both send and do nothing
else. `fetch` is the MB/s of a worker that gets a snapshot from the other, as in a recovery. `step` is the time of a
step that computes for `step_off_ms` while the snapshot is sent, divided by the time of a step that only computes
(median over rounds).
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

KINDS = ("tcp", "mpi")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of each worker's snapshot")
    parser.add_argument("--rounds", type=int, default=10, help="rounds that count; each measures everything once")
    parser.add_argument("--compute", type=int, default=150, help="matrix products in a step")
    arguments = parser.parse_args(argv)
    from networks import Networks, Relays

    relays = Relays(2)
    try:
        texts = {
            "tcp": [Networks().text(rank) for rank in range(2)],
            "mpi": [Networks(relays).text(r) for r in range(2)],
        }
        context = multiprocessing.get_context("fork")
        barrier, addresses, found = context.Barrier(2, timeout=120), context.Manager().dict(), context.SimpleQueue()
        workers = [
            context.Process(target=work, args=(rank, texts, arguments, barrier, addresses, found)) for rank in range(2)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(400)
        if any(worker.exitcode for worker in workers):
            raise SystemExit("a worker has failed")
        print(json.dumps(summary(found.get(), arguments)))
    finally:
        relays.close()
    return 0


def work(rank: int, texts: dict, arguments, barrier, addresses, found) -> None:
    """Run one worker; rank 0 reports its times."""
    import torch
    from networks import from_text
    from snapshot_crew import set_to, state

    from ft.job.messages import Source
    from ft.state.snapshot import Snapshots, SnapshotServer

    torch.set_num_threads(1)
    snaps = {}
    for kind in KINDS:
        server = SnapshotServer(from_text(texts[kind][rank]))
        snaps[kind] = Snapshots(server, rank=rank, peers=[1 - rank])
        addresses[kind, rank] = server.address
    barrier.wait()
    for kind in KINDS:
        snaps[kind].place({r: addresses[kind, r] for r in range(2)})
    live, matrix = state(0, mib=arguments.mib), torch.randn(512, 512)
    times = {(what, kind): [] for what in ("send", "fetch", "step") for kind in ("off", *KINDS)}
    step = 0
    for number in range(arguments.rounds + 2):
        for kind in KINDS if number % 2 else reversed(KINDS):
            step += 1
            one = {("send", kind): timed(barrier, lambda s=snaps[kind], n=step: (s.take(live, n, 0), s.wait()))}
            other = Source(1 - rank, 1 - rank)

            def fetch(kind=kind, step=step, other=other):
                if rank == 0:  # as a new worker, which holds no snapshot
                    snaps[kind]._stock.own.close()
                    snaps[kind].restore(live, step, other, epoch=0)

            one["fetch", kind] = timed(barrier, fetch)
            for each in ("off", kind):
                step += 1
                one["step", each] = timed(
                    barrier,
                    lambda s=snaps[kind], n=step, on=each != "off": compute(matrix, arguments.compute, s, live, n, on),
                )
            if number >= 2:
                for key, seconds in one.items():
                    times[key].append(seconds)
    set_to(live, step)
    if rank == 0:
        found.put(times)
    barrier.wait()
    for each in snaps.values():
        each.close()
        each._transport.close()


def compute(matrix, products: int, snaps, live, step: int, on: bool) -> None:
    if on:
        snaps.take(live, step, 0)
    for _ in range(products):
        matrix @ matrix
    if on:
        snaps.wait()


def timed(barrier, action) -> float:
    """Return the seconds until both workers have run ``action``."""
    barrier.wait()
    began = time.perf_counter()
    action()
    barrier.wait()
    return time.perf_counter() - began


def summary(times: dict, arguments) -> dict:
    median = {key: statistics.median(values) for key, values in times.items() if values}
    size = arguments.mib * (1 << 20)
    result = {"bench": "transport"}
    for what in ("send", "fetch"):
        result[f"{what}_MB_s"] = {kind: round(size / median[what, kind] / 1e6) for kind in KINDS}
    result["step_off_ms"] = round(median["step", "off"] * 1e3, 1)
    result["step_ms"] = {kind: round(median["step", kind] * 1e3, 1) for kind in KINDS}
    result["step"] = {kind: round(median["step", kind] / median["step", "off"], 3) for kind in KINDS}
    result["mpi_against_tcp"] = {
        what: round(median[what, "tcp"] / median[what, "mpi"], 3) for what in ("send", "fetch", "step")
    }
    return {**result, **vars(arguments)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
