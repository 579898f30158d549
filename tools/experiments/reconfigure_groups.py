"""Measure gloo's own reconfiguration of a group beside the rebuild of this project, with small processes.

    python tools/experiments/reconfigure_groups.py > tools/experiments/results/reconfigure_groups.txt

It needs torch 2.14 (``ReconfigureOptions``). For each way, number of ranks and number of groups, which all have all
ranks, it prints the medians over the rounds of the wall time of the slowest rank and the CPU time of the busiest one.
The ways: "rebuild" (``Groups.rebuild``), "reconfigure" (a group after the other), "all at once" (all groups are begun
before the first is waited for).
"""

import multiprocessing
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from ft.net.store import StoreConnection, StoreServer  # noqa: E402
from ft.state.groups import Groups, Rendezvous  # noqa: E402

ROUNDS = 7
CASES = ((2, 6), (4, 6), (8, 6))
"""(ranks, groups)."""
WAYS = ("rebuild", "reconfigure", "all at once")
LIMIT = timedelta(seconds=60)


def main() -> int:
    print(f"torch {torch.__version__}, {multiprocessing.cpu_count()} cores, medians of {ROUNDS} rounds")
    for size, count in CASES:
        for way in WAYS:
            wall_s, cpu_s = measure(way, size, count)
            print(f"{size} ranks, {count} groups, {way:11}: {wall_s:.3f} s, CPU {cpu_s:.3f} s", flush=True)
    return 0


def measure(way: str, size: int, count: int) -> tuple[float, float]:
    """Return the medians in seconds: wall time of the slowest rank, CPU time of the busiest one."""
    token = secrets.token_hex(16)
    server, context = StoreServer("127.0.0.1", 0, token), multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    rendezvous = Rendezvous(server.address, token)
    processes = [
        context.Process(target=follow, args=(way, rank, size, count, rendezvous, told), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    rows = [told.get() for _ in range(ROUNDS * size)]
    for process in processes:
        process.kill()
        process.join()
    server.close()
    rounds = [[row[1:] for row in rows if row[0] == number] for number in range(ROUNDS)]
    slowest = [[max(row[part] for row in found) for found in rounds] for part in (0, 1)]
    return statistics.median(slowest[0]), statistics.median(slowest[1])


def follow(way: str, rank: int, size: int, count: int, rendezvous: Rendezvous, told) -> None:
    """Be a rank: rebuild its groups in each round, and use them."""
    store = rendezvous.connect()
    store.set_timeout(LIMIT)
    prepare, again, use = (ours if way == "rebuild" else theirs)(way, rank, size, count, rendezvous, store)
    for number in range(ROUNDS):
        prepare(number)
        meet(store, f"ready/{number}", rank, size)
        wall, cpu = time.monotonic(), time.process_time()
        again(number)
        row = number, time.monotonic() - wall, time.process_time() - cpu
        use()
        told.put(row)
        meet(store, f"done/{number}", rank, size)
    threading.Event().wait()  # until this process is killed: an exit would break the connections of the others


def meet(store: StoreConnection, place: str, rank: int, size: int) -> None:
    """Wait until all ranks have come to ``place``, which is used once."""
    store.set(f"{place}/{rank}", "")
    store.wait([f"{place}/{one}" for one in range(size)])


Parts = tuple[Callable[[int], object], Callable[[int], object], Callable[[], object]]
"""What a way does before a round, in it, and to use its groups."""


def ours(way: str, rank: int, size: int, count: int, rendezvous: Rendezvous, store: StoreConnection) -> Parts:
    groups = Groups.start(
        rendezvous=rendezvous,
        prefix="groups/0",
        rank=rank,
        world_size=size,
        device_backend="gloo",
        alone=False,
        on_failure=lambda name, error: None,
    )
    made = [dist.group.WORLD, *(dist.new_group(list(range(size))) for _ in range(count - 1))]
    names = [group.group_name for group in made]

    def prepare(number: int) -> None:
        for group in made:
            dist.all_reduce(torch.ones(4), group=group)
        groups.close(number, "measured")
        groups.drop()

    def again(number: int) -> None:
        groups.rebuild(names, [], f"groups/{number + 1}", number + 1)

    return prepare, again, lambda: groups.reopen(groups._state.epoch)


def theirs(way: str, rank: int, size: int, count: int, rendezvous: Rendezvous, store: StoreConnection) -> Parts:
    from torch._C._distributed_c10d import ReconfigureOptions

    backends = []
    for number in range(count):
        options = dist.ProcessGroupGloo._Options()
        options.enable_reconfigure, options._timeout = True, LIMIT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        backends.append(dist.ProcessGroupGloo(dist.PrefixStore(f"group/{number}", store), rank, size, options))

    def again(number: int) -> None:
        keys = [f"handle/{number}/{at}" for at in range(count)]
        store.multi_set([f"{key}/{rank}" for key in keys], [one.get_reconfigure_handle() for one in backends])
        begun = []
        for at, backend in enumerate(backends):
            options = ReconfigureOptions()
            found = store.multi_get([f"{keys[at]}/{one}" for one in range(size)])
            options.handles, options.timeout = [handle.decode() for handle in found], LIMIT
            options.uuid = 1 + number * count + at
            begun.append(backend.reconfigure(options))
            if way == "reconfigure":
                begun.pop().wait()
        for work in begun:
            work.wait()

    def use() -> None:
        for backend in backends:
            backend.allreduce([torch.ones(4)]).wait()

    return lambda number: None, again, use


if __name__ == "__main__":
    sys.exit(main())
