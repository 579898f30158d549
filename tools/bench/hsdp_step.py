"""Compare the step time of FT-HSDP with that of data parallelism over gloo, with the same training.

    python tools/bench/hsdp_step.py --replicas 2 --ranks 1

Prints one JSON line. Blocks of steps of the two sides alternate in the same processes of one run. "ours" is the step of
FT-HSDP as in a run: quorum, FTAR, vote, offer of the state, records. "gloo" is ordinary data parallelism of the same
ranks: the same model, data, batch and bucket groups, reduced inside the replica by core and then summed over the
replicas by a gloo all-reduce in a thread that overlaps with the backward; this side survives no fault. `added_ms` is
the median over pairs of blocks of the additional time of a step of "ours"; the goal is `goal_ms`, 1 ms + 1 %.
`parts_ms` is the mean time that the training thread spends in each part of a step; parts may contain each other.
"""

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import in_ranks

from ft.protection.contract import Layer
from ft.protection.stack import Stack

WARM_UP = 2


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of a replica, all data-parallel")
    in_ranks.add_flags_of_replicas(parser, blocks=20)
    parser.add_argument("--no-overlap", action="store_true", help="without --overlap-grad-reduce")
    arguments = parser.parse_args(argv)
    start = partial(in_ranks.protected, options=["--ft-hsdp-replicas", str(arguments.replicas)])
    ranks = arguments.replicas * arguments.ranks
    return in_ranks.main(__file__, argv, ranks, lambda: measure(arguments), start=start)


# --- in a worker ------------------------------------------------------------------------------------------------------


class GlooExchange:
    """Exchange of gradients with the other replicas as in ordinary data parallelism, through gloo.

    See :class:`ft.systems.hsdp.exchange.Exchange`.
    """

    def __init__(self, group, replicas: int, groups: int):
        self._group, self._replicas, self._groups = group, replicas, groups
        self._thread = ThreadPoolExecutor(1, "gloo")
        self._pending, self._unfinished = [], groups

    def started(self, group, parts, reduced) -> None:
        self._pending.append(self._thread.submit(self._reduce, parts, reduced))

    def finished(self, group) -> None:
        self._unfinished -= 1
        if not self._unfinished:
            pending, self._pending, self._unfinished = self._pending, [], self._groups
            for one in pending:
                one.result()

    def add_up(self, tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def _reduce(self, parts, reduced) -> None:
        if reduced is not None:
            reduced()
        for work in [self._group.allreduce([part]) for part in parts]:
            work.wait()
        for part in parts:
            part.mul_(1.0 / self._replicas)


class PlainReplica(Layer):
    """Plain data parallelism over replicas, without fault tolerance."""

    def __init__(self, exchange: GlooExchange, replicas: int):
        self._exchange, self._replicas = exchange, replicas

    def share(self, samples: int) -> int:
        return samples // self._replicas

    def reduce(self, reported):
        import torch

        total = torch.stack(reported).sum(dim=0)
        self._exchange.add_up(total)
        return [total]


class Watch:
    """Measures how long calls take, by name."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)

    def over(self, name: str, owner: object, method: str) -> None:
        """Measure ``owner.method`` from now on."""
        original = getattr(owner, method)

        def timed(*args, **kwargs):
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - began

        setattr(owner, method, timed)


class Side:
    """The objects with which the blocks of one side run; ``enter`` puts them in place."""

    def __init__(self, job, guard, exchange, step):
        self._job, self._guard, self._exchange, self._step = job, guard, exchange, step

    def enter(self) -> None:
        from megatron.patches import replicas

        self._job.protection, self._job.trainee.optimizer.step = Stack([self._guard]), self._step
        replicas.exchange_through(self._job.trainee.chunks, self._exchange)

    def block(self, steps: int) -> None:
        from megatron.ft_trainer.loop import train_step

        for _ in range(steps):
            train_step(self._job)
            self._job.exits.answer(self._job.state.step)
            self._guard.committed()


def measure(arguments: argparse.Namespace) -> None:
    from ft.systems.hsdp.place import ReplicaContext
    from megatron.patches import replicas
    from megatron.patches.manifest import WITH_REPLICAS

    session, job, stack = in_ranks.protected_job(flags_of(arguments), arguments.ranks, WITH_REPLICAS)
    place, optimizer = ReplicaContext.from_environment(), job.trainee.optimizer
    (guard,), parts = stack.layers, stack.layers[0]._parts
    cross = gloo_group(in_ranks.folder(), place, session.rank)
    gloo = GlooExchange(cross, place.replicas, len(replicas.groups_of(job.trainee.chunks)))
    plain_step = type(optimizer).step.__get__(optimizer)
    sides = {
        "ours": Side(job, guard, parts.exchange, optimizer.step),
        "gloo": Side(job, PlainReplica(gloo, place.replicas), gloo, plain_step),
    }
    watch = watched(guard, parts, gloo)
    times = {name: [] for name in sides}
    guard.run_with_recovery(lambda: alternate(arguments, job, session, cross, sides, times, watch))
    if place.replica == 0 and session.rank == 0:
        in_ranks.publish(result(arguments, job, times, watch))
    session.close()


def flags_of(arguments: argparse.Namespace) -> str:
    overlap = "" if arguments.no_overlap else "--overlap-grad-reduce"
    return (
        f"--hidden-size {arguments.hidden_size} --num-layers {arguments.layers} --num-attention-heads 8 "
        f"--seq-length {arguments.seq_length} --micro-batch-size {arguments.rank_batch} "
        f"--global-batch-size {arguments.rank_batch * arguments.ranks * arguments.replicas} --train-iters 100000 "
        f"--lr 1e-4 --use-distributed-optimizer {overlap}"
    )


def gloo_group(folder: Path, place, rank: int):
    """Return a gloo group of this rank with the same rank of all replicas."""
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = dist.PrefixStore(f"rank{rank}", dist.FileStore(str(folder / f"meeting{rank}"), place.replicas))
    return dist.ProcessGroupGloo(store, place.replica, place.replicas, options)


def watched(guard, parts, gloo: GlooExchange) -> Watch:
    """Measure the parts of an FT-HSDP step other than the training itself."""
    watch = Watch()
    watch.over("begin", guard, "begins")
    watch.over("wait_for_ftar", parts.exchange, "_wait_for_all")
    watch.over("vote_and_withdraw", guard, "_vote")
    watch.over("withdraw", parts.server, "withdraw")
    watch.over("committed", guard, "committed")
    watch.over("offer", guard._rank, "offer")
    watch.over("records", parts.records, "committed")
    watch.over("gloo_wait", gloo, "finished")
    watch.over("gloo_loss", gloo, "add_up")
    ask = parts.agreement.ask

    def timed_ask(question, then):
        began = time.perf_counter()

        def agreed(question, answer):
            watch.seconds["until_quorum"] += time.perf_counter() - began
            then(question, answer)

        ask(question, agreed)

    parts.agreement.ask = timed_ask
    return watch


def alternate(arguments, job, session, cross, sides: dict, times: dict, watch: Watch) -> None:
    """Run pairs of blocks, the first ones to warm up. ``times``: name -> (wall, CPU) seconds of a step, by block."""
    import torch.distributed as dist

    steps = arguments.block_steps
    for number in range(arguments.blocks + WARM_UP):
        for name in ("ours", "gloo") if number % 2 else ("gloo", "ours"):
            if number == WARM_UP and not times["ours"] and not times["gloo"]:
                watch.seconds.clear()
            before = job.state.step, job.state.consumed_train_samples
            sides[name].enter()
            with session.progress.at("aside", "the benchmark"):
                cross.barrier().wait()
                dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            sides[name].block(steps)
            took, used = (time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps
            if name == "gloo":  # FT-HSDP did not see these steps: take them back
                job.state.step, job.state.consumed_train_samples = before
            if number >= WARM_UP:
                times[name].append((took, used))
    sides["ours"].enter()


def result(arguments: argparse.Namespace, job, times: dict, watch: Watch) -> dict:
    from megatron.ft_trainer.logging.runlog import count_parameters

    wall = {name: [one[0] for one in blocks] for name, blocks in times.items()}
    cpu = {name: statistics.median(one[1] for one in blocks) for name, blocks in times.items()}
    added = [1e3 * (ours - gloo) for ours, gloo in zip(wall["ours"], wall["gloo"], strict=True)]
    gloo_ms = 1e3 * statistics.median(wall["gloo"])
    counted = arguments.blocks * arguments.block_steps
    return {
        "bench": "hsdp_step",
        "added_ms": round(statistics.median(added), 3),
        "added_quartiles_ms": in_ranks.quartiles(added, 3),
        "goal_ms": round(1.0 + 0.01 * gloo_ms, 3),
        "ours_ms": round(1e3 * statistics.median(wall["ours"]), 3),
        "gloo_ms": round(gloo_ms, 3),
        "fastest_ms": {name: round(1e3 * min(each), 3) for name, each in wall.items()},
        "added_cpu_ms": round(1e3 * (cpu["ours"] - cpu["gloo"]), 3),
        "parts_ms": {name: round(1e3 * seconds / counted, 3) for name, seconds in sorted(watch.seconds.items())},
        "parameters": count_parameters(job.trainee.chunks),
        "pairs": len(added),
        "cores": os.cpu_count(),
        "load": [round(one, 1) for one in os.getloadavg()],
        **vars(arguments),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
