"""Measure what SPARe adds to a step of FT-HSDP without failures, and what it costs to keep gradients.

    python tools/bench/spare_step.py

Prints one JSON line. Blocks of steps of the two sides alternate in the same processes of one run, with the same
computation: "spare" divides the shard types and keeps the gradients that it exchanges; "plain" is FT-HSDP's own stream
of samples. `added` is the median over pairs of blocks of (spare - plain) / plain; the goal is 0.02. `added_cpu` is the
same for the CPU time of the first group's process, which depends less on other load of the machine.

The trainer keeps one copy of the gradients that a group adds to the sum, reduced inside the group (`owner`), and one
copy more for each type that another group adds (`apart`: with one such type). For both, the output has `bytes` of a
rank and `ms` of the copies in every step. `patch_ms` is the time that a patch compute takes: a forward and backward
pass of one shard.
"""

import argparse
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import in_ranks
from hsdp_step import WARM_UP, flags_of, gloo_group

RANKS = 1
COPIES = 20


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--redundancy", type=int, default=2)
    in_ranks.add_flags_of_replicas(parser, blocks=40)
    arguments = parser.parse_args(argv)
    arguments.replicas, arguments.ranks, arguments.no_overlap = arguments.groups, RANKS, False
    options = ["--ft-hsdp-replicas", str(arguments.groups), "--ft-spare-redundancy", str(arguments.redundancy)]
    start = partial(in_ranks.protected, options=options)
    return in_ranks.main(__file__, argv, arguments.groups * RANKS, lambda: measure(arguments), start=start)


# --- in a worker ------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> None:
    from ft.systems.hsdp.place import ReplicaContext
    from ft.systems.hsdp.work import Work
    from megatron.patches.manifest import WITH_REPLICAS

    session, job, stack = in_ranks.protected_job(flags_of(arguments), RANKS, WITH_REPLICAS)
    place, guard, job.protection = ReplicaContext.from_environment(), stack.layers[0], stack
    cross = gloo_group(in_ranks.folder(), place, session.rank)
    sides = {"spare": guard._parts.work, "plain": Work(place)}
    times = {name: [] for name in sides}
    found = guard.run_with_recovery(lambda: alternate(arguments, job, guard, session, cross, sides, times))
    if place.replica == 0:
        in_ranks.publish(found)
    session.close()


def alternate(arguments, job, guard, session, cross, sides: dict, times: dict) -> dict:
    """Run pairs of blocks, the first ones to warm up. ``times``: name -> [wall, CPU] seconds of a step, by block."""
    from megatron.ft_trainer.loop import train_step

    for number in range(arguments.blocks + WARM_UP):
        for name in ("spare", "plain") if number % 2 else ("plain", "spare"):
            guard._parts.work = guard._rank._work = sides[name]
            with session.progress.at("aside", "the benchmark"):
                cross.barrier().wait()
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(arguments.block_steps):
                train_step(job)
                job.exits.answer(job.state.step)
                guard.committed()
            if number >= WARM_UP:
                took = time.perf_counter() - began, time.process_time() - cpu
                times[name].append([seconds / arguments.block_steps for seconds in took])
    guard._parts.work = guard._rank._work = sides["spare"]
    return result(arguments, job, times)


def result(arguments: argparse.Namespace, job, times: dict) -> dict:
    from megatron.ft_trainer.logging.runlog import count_parameters
    from megatron.patches import replicas

    pairs = list(zip(times["spare"], times["plain"], strict=True))
    added, added_cpu = ([(spare[i] - plain[i]) / plain[i] for spare, plain in pairs] for i in range(2))
    shard = [part for group in replicas.groups_of(job.trainee.chunks) for part in replicas._parts(group, False)]
    median = {name: statistics.median(wall for wall, _ in each) for name, each in times.items()}
    return {
        "bench": "spare_step",
        "added": round(statistics.median(added), 4),
        "added_quartiles": in_ranks.quartiles(added),
        "added_cpu": round(statistics.median(added_cpu), 4),
        "added_cpu_quartiles": in_ranks.quartiles(added_cpu),
        "goal": 0.02,
        "spare_ms": round(1e3 * median["spare"], 3),
        "plain_ms": round(1e3 * median["plain"], 3),
        "owner": {"bytes": _bytes(shard), "ms": _copy_ms(shard), "patch_ms": round(1e3 * median["plain"], 1)},
        "apart": {"bytes": 2 * _bytes(shard), "ms": 2 * _copy_ms(shard)},
        "parameters": count_parameters(job.trainee.chunks),
        "pairs": len(added),
        "cores": os.cpu_count(),
        "load": [round(one, 1) for one in os.getloadavg()],
        **{name: value for name, value in vars(arguments).items() if name not in ("replicas", "ranks", "no_overlap")},
    }


def _bytes(tensors: list) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _copy_ms(tensors: list) -> float:
    """Return the median milliseconds of a copy of all tensors."""
    import torch

    copies = [torch.empty_like(each) for each in tensors]
    took = []
    for _ in range(COPIES):
        began = time.perf_counter()
        for mine, each in zip(copies, tensors, strict=True):
            mine.copy_(each)
        took.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(took[COPIES // 4 :]), 3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
