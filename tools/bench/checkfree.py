"""Measure the cost of CheckFree and CheckFree+ without failures, in alternating steps of each and of the plain trainer.

    python tools/bench/checkfree.py                     # four pipeline stages, one process each

Prints one JSON line. `over` is the median over rounds of (side - off) / off. A round has one step of each side, and the
order of the sides changes from round to round.

off   the trainer with CheckFree's patches and without a listener.
on    CheckFree records the gradient norm of every stage. The goal is at most 0.01. The norms in a snapshot's envelope,
      some 20 bytes for each stage, are not included.
plus  a second model in the same processes, with replicated embedding and head and the planned schedule. `planned` holds
      the bubbles of this schedule and of 1F1B if every stage has its own device. With fewer cores than stages there are
      no bubbles, and `plus` is the cost of the replicas.

`tools/bench/recovery.py --ranks 6 --kind stage` measures the duration of a recovery.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))

import in_ranks

WARM_UP = 3


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4, help="pipeline stages, a process each")
    parser.add_argument("--rounds", type=int, default=60, help="steps of each side that count")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=8)
    arguments = parser.parse_args(argv)
    return in_ranks.main(__file__, argv, arguments.pp, lambda: measure(arguments))


# --- in a rank --------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> None:
    from megatron import patches
    from megatron.patches.manifest import WITH_CHECKFREE, WITH_SWAPPED_ENDS

    patches.apply(WITH_CHECKFREE, WITH_SWAPPED_ENDS)
    import torch.distributed as dist

    from ft.protection.stack import Protections
    from ft.systems.checkfree.layer import settings_of
    from megatron.ft_trainer.initialize import destroy, init_model_parallel, init_process_group
    from megatron.ft_trainer.launcher import launch_from
    from megatron.ft_trainer.pretrain import assemble
    from megatron.ft_trainer.trainer import JobTrainer

    place = launch_from(os.environ)
    options, layout = options_of(arguments, "--ft-checkfree", place.world_size)
    init_process_group(options.core, place)
    init_model_parallel(options.core, layout, replicates_ends=True)  # has no effect for untied weights
    plain = assemble(options, layout, time.monotonic())
    kept = keeper(plain, settings_of(options.fault_tolerance, JobTrainer(plain)))
    swapped, _ = options_of(arguments, "--ft-checkfree-plus", place.world_size)
    plus = assemble(swapped, layout, time.monotonic(), Protections.of(swapped.fault_tolerance, {}))
    times = alternate(arguments, plain, plus, kept)
    if dist.get_rank() == 0:
        in_ranks.publish(result(arguments, times))
    destroy()


def options_of(arguments: argparse.Namespace, way: str, world_size: int):
    import small_runs as runs

    from megatron.ft_trainer.arguments import check, parse

    options = parse(
        f"{runs.BASE} --num-layers {2 * arguments.pp} --hidden-size {arguments.hidden_size} --seq-length 64 "
        f"--global-batch-size {2 * arguments.microbatches} --data-path {in_ranks.folder()}/corpus --train-iters 10000 "
        f"--pipeline-model-parallel-size {arguments.pp} --use-distributed-optimizer --ft-hot-swap {way}"
    )
    return options, check(options, world_size, has_te=False)


def keeper(job, settings):
    """Return the object that records the norms of ``job``, without a control plane."""
    import torch.distributed as dist

    from ft.protection.training_state import TrainingState
    from ft.systems.checkfree.rebuilder import CheckFreeRebuilder

    trainee = job.trainee
    session = SimpleNamespace(rank=dist.get_rank(), observe=lambda name, **detail: None)
    return CheckFreeRebuilder(session, TrainingState(trainee.chunks, trainee.optimizer, trainee.scheduler), settings)


def alternate(arguments: argparse.Namespace, plain, plus, kept) -> dict[str, list[float]]:
    """Return side -> seconds of each measured step."""
    import torch.distributed as dist

    from megatron.ft_trainer.step import train_step
    from megatron.patches import stage_norms, swapped_pipeline

    sides = {"off": plain, "on": plain, "plus": plus}
    times: dict[str, list[float]] = {name: [] for name in sides}
    listener, swapped = stage_norms.listener(), swapped_pipeline.used()
    for number in range(arguments.rounds + WARM_UP):
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            stage_norms.listen(listener if name == "on" else None)
            swapped_pipeline.use(*(swapped if name == "plus" else (None, None)))
            dist.barrier()
            began = time.perf_counter()
            train_step(sides[name])
            if name == "on":
                kept.committed(plain.state.step)
            dist.barrier()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - began)
    return times


def result(arguments: argparse.Namespace, times: dict[str, list[float]]) -> dict:
    from ft.systems.schedule.choose import BEST, Shape, plan

    sides = {name: [(a - b) / b for a, b in zip(times[name], times["off"], strict=True)] for name in ("on", "plus")}
    shape = Shape(arguments.pp, arguments.microbatches)
    return {
        "bench": "checkfree",
        "over": {name: round(statistics.median(over), 4) for name, over in sides.items()},
        "over_quartiles": {n: [round(q, 4) for q in statistics.quantiles(over, n=4)] for n, over in sides.items()},
        "planned": {kind: round(plan(kind, shape).bubble, 4) for kind in ("1f1b", BEST)},
        "step_ms": {name: round(1e3 * statistics.median(each), 2) for name, each in times.items()},
        "cores": os.cpu_count(),
        "load": [round(one, 1) for one in os.getloadavg()],
        **vars(arguments),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
