"""Measure the cost of executing every operator twice: off, naive, piggyback and by plan, alternating in one process.

    python tools/bench/dmr.py                              # one rank, without windows
    python tools/bench/dmr.py --plan auto                  # the same with a plan, after a profile
    python tools/bench/dmr.py --pp 2 --plan auto --memory-budget +30MB     # windows, bubbles, and little memory
    python tools/bench/dmr.py --tp 2 --hidden-size 2048 --layers 1         # what the checks of collectives cost
    python tools/bench/dmr.py --dp 2 --hidden-size 2048 --layers 1         # the same of the distributed optimizer's

Prints one JSON line. The sides alternate step by step, so that a slow machine slows all of them down. `over` is the
median over rounds of (side - off) / off. "off" is the trainer with DMR's patches and without a listener. The model is
recomputed in full, so that the second execution of the forward takes place anyway; only the backward and the optimizer
are executed additionally. The goals are 0.60 for full coverage without windows, less with windows, and never more
memory than the budget. `kept_bytes` is the largest memory of operators that wait for windows; training still uses much
of it. `peak_bytes` is the peak memory with deferred verifications, as the plan predicts it. `measured_peak_bytes` is
the most memory that tensors and operators allocated in a step after the measured ones, on the stage with the most.

`rollback_ms` is the time to restore the state from before a step that was computed wrongly, `verdict_ms` that from the
end of a step to the ranks' agreement on whether it was: with the part of the step that follows the wrong operator, the
time in which a wrong result is found. `communication` is the time that rank 0 spends in the checks of what collectives
bring with "piggyback", as a share of the step without DMR: the goal is 0.02. `floor` is the time that "piggyback"
spends in second executions alone, as the same share: less is impossible where nothing hides them. The rest of `over`
are comparisons, digests and the work of intercepting operators.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import in_ranks

WARM_UP = 2


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages, a process each")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, with sequence parallelism")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks, with the distributed optimizer")
    parser.add_argument("--plan", metavar="FILE", help="a plan for this very model, or auto: profile and plan first")
    budget = "of the plan that auto makes; +SIZE: beyond what training alone needs"
    parser.add_argument("--memory-budget", default="4GB", metavar="[+]SIZE", help=budget)
    parser.add_argument("--rounds", type=int, default=8, help="steps of each side that count")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args(argv)

    def prepare(folder: Path) -> list[str]:
        return ["--plan", str(_plan(arguments, folder))] if arguments.plan == "auto" else []

    ranks = arguments.pp * arguments.tp * arguments.dp
    return in_ranks.main(__file__, argv, ranks, lambda: measure(arguments), prepare)


def _plan(arguments: argparse.Namespace, folder: Path) -> Path:
    profile, plan = folder / "profile.json", folder / "plan.json"
    ft = [sys.executable, "-m", "ft", "dmr"]
    launch = in_ranks.launcher(arguments.pp)
    trainer = [
        *launch,
        str(in_ranks.ROOT / "pretrain_gpt.py"),
        "--reference-trainer",
        *flags(arguments, folder).split(),
    ]
    in_ranks.run([*ft, "profile", "--out", str(profile), "--", *trainer], folder)
    budget = ["--memory-budget", _budget(arguments.memory_budget, profile)]
    in_ranks.run([*ft, "plan", str(profile), *budget, "--out", str(plan)], folder)
    return plan


def _budget(asked: str, profile: Path) -> str:
    if not asked.startswith("+"):
        return asked
    from ft.base.quantities import size
    from ft.systems.dmr.plan.file import read_trace

    trace = read_trace(profile)
    return f"{max(map(trace.memory.peak, trace.stages)) + size(asked[1:]):.0f}"


def flags(arguments: argparse.Namespace, folder: Path) -> str:
    """Return the trainer's flags."""
    import small_runs as runs

    return (
        f"{runs.BASE} --hidden-size {arguments.hidden_size} --num-layers {arguments.layers} --num-attention-heads 8 "
        f"--seq-length {arguments.seq_length} --micro-batch-size {arguments.micro_batch_size} "
        f"--global-batch-size {arguments.micro_batch_size * arguments.microbatches * arguments.dp} "
        f"--data-path {folder}/corpus "
        f"--pipeline-model-parallel-size {arguments.pp} --train-iters 10000 --recompute-granularity full "
        f"--recompute-method uniform --recompute-num-layers 1 {'--bf16' if arguments.bf16 else ''}"
        + (f" --tensor-model-parallel-size {arguments.tp} --sequence-parallel" if arguments.tp > 1 else "")
        + (" --use-distributed-optimizer" if arguments.dp > 1 else "")
    )


# --- in a rank --------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> None:
    from megatron import patches
    from megatron.patches.manifest import WITH_DMR

    patches.apply(WITH_DMR)
    import torch.distributed as dist

    from megatron.ft_trainer.arguments import check, parse
    from megatron.ft_trainer.initialize import destroy, init_model_parallel, init_process_group
    from megatron.ft_trainer.launcher import launch_from
    from megatron.ft_trainer.pretrain import assemble

    place = launch_from(os.environ)
    options = parse(f"{flags(arguments, in_ranks.folder())} --ft-dmr piggyback")
    layout = check(options, place.world_size, has_te=False)
    init_process_group(options.core, place)
    init_model_parallel(options.core, layout)
    job = assemble(options, layout, time.monotonic())
    sides = {"off": None, **protections(arguments, job)}
    spent = timed_checks(sides["piggyback"][1])
    times = alternate(arguments, job, sides)
    shares = [a / b for a, b in zip(spent.of_steps[-arguments.rounds :], times["off"], strict=True)]
    kept = {name: side[1].queue.most_bytes for name, side in sides.items() if side is not None}
    found = {"kept_bytes": kept, "measured_peak_bytes": peaks(job, sides)}
    answer = times_of_answer(job, sides["piggyback"], arguments.rounds)
    again = second_executions(job, sides["piggyback"], arguments.rounds)
    floor = [a / statistics.median(times["off"]) for a in again]
    by_rank = [None] * place.world_size
    dist.all_gather_object(by_rank, found)
    if place.rank == 0:
        most = {what: {name: max(one[what][name] for one in by_rank) for name in found[what]} for what in found}
        in_ranks.publish(
            {**result(arguments, times, most), **spread("communication", shares), **spread("floor", floor), **answer}
        )
    destroy()


def protections(arguments: argparse.Namespace, job) -> dict:
    """Return side -> (the layer that executes operators twice, its engine)."""
    from types import SimpleNamespace

    from ft.protection.contract import Asked
    from ft.protection.stack import Stack
    from ft.systems.dmr.layer import DoubleExecution
    from megatron.ft_trainer.trainer import JobTrainer

    asked = {"naive": ("naive", None), "piggyback": ("piggyback", None)}
    if arguments.plan is not None:
        asked["plan"] = (None, arguments.plan)
    trainer, found = JobTrainer(job), {}
    for name, (way, plan) in asked.items():
        others = {"ft_dmr_unstable": None, "ft_dmr_retries": 2, "ft_dmr_inject": []}
        flags = SimpleNamespace(ft_dmr=way, ft_dmr_plan=plan, **others)
        made = DoubleExecution(Asked(flags, {})).layer(trainer, ())
        stack = Stack([made])
        stack.protect(trainer.optimizer)
        found[name] = (stack, made.engine)
    return found


def alternate(arguments: argparse.Namespace, job, sides: dict) -> dict:
    """Return side -> seconds of each measured step."""
    from megatron.ft_trainer.loop import train_step

    def step(side: str) -> None:
        take_side(job, sides[side])
        train_step(job)

    return in_ranks.alternate(list(sides), arguments.rounds, step, WARM_UP)


def times_of_answer(job, side, rounds: int) -> dict:
    """Return the times of the agreement at the end of a step and of a rollback, in milliseconds."""
    from megatron.ft_trainer.loop import train_step

    take_side(job, side)
    verifier, verdicts, rollbacks = side[0].layers[0], Spent(), []
    agree, verifier._agree = verifier._agree, verdicts.timed(verifier._agree)
    for _ in range(rounds):
        train_step(job)
        verdicts.of_steps.append(1e3 * verdicts.now)
        verdicts.now = 0.0
        began = time.perf_counter()
        verifier.undo.roll_back()
        rollbacks.append(1e3 * (time.perf_counter() - began))
    verifier._agree = agree
    return {**spread("verdict_ms", verdicts.of_steps), **spread("rollback_ms", rollbacks)}


def second_executions(job, side, rounds: int) -> list[float]:
    """Return the seconds of each step in which operators are executed for the second time."""
    from ft.systems.dmr.runtime import mode
    from megatron.ft_trainer.loop import train_step

    take_side(job, side)
    names = ("execute_again", "check_in_place", "expected")
    spent, before = Spent(), {name: getattr(mode, name) for name in names}
    for name, call in before.items():
        setattr(mode, name, spent.timed(call))
    for _ in range(rounds):
        train_step(job)
        spent.of_steps.append(spent.now)
        spent.now = 0.0
    for name, call in before.items():
        setattr(mode, name, call)
    return spent.of_steps


class Spent:
    """The seconds that were spent in some calls, step by step."""

    def __init__(self):
        self.of_steps: list[float] = []
        self.now = 0.0

    def timed(self, call):
        def measured(*args, **kwargs):
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.now += time.perf_counter() - began

        return measured

    def ends_step(self, call):
        def measured(*args, **kwargs):
            self.of_steps.append(self.now)
            self.now = 0.0
            return call(*args, **kwargs)

        return measured


def timed_checks(engine) -> Spent:
    """Return the time that an engine spends in the checks of collectives from now on."""
    spent = Spent()
    for part, name in (
        *((engine, name) for name in ("communicates", "communicated", "completed")),
        (engine._collectives, "compare"),
    ):
        setattr(part, name, spent.timed(getattr(part, name)))
    engine.findings.flag = spent.ends_step(engine.findings.flag)
    return spent


def spread(name: str, values: list[float]) -> dict:
    """Return the median and the quartiles of ``values``."""
    quartiles = statistics.quantiles(values, n=4)
    return {name: round(quartiles[1], 4), f"{name}_quartiles": [round(one, 4) for one in quartiles]}


def take_side(job, side) -> None:
    from ft.protection.stack import Stack
    from megatron.patches import double_execution

    job.protection, engine = (Stack(), None) if side is None else side
    job.verified = side is not None
    double_execution.listen(engine)


def peaks(job, sides: dict) -> dict[str, int]:
    """Return side -> the most bytes in use during a step: lasting tensors, and allocations beyond these."""
    from ft.systems.dmr.profile.recorder import Storages
    from ft.systems.dmr.profile.session import lasting
    from megatron.ft_trainer.loop import train_step

    found = {}
    for name, side in sides.items():
        take_side(job, side)
        base = Storages(lasting(job.trainee.chunks, job.trainee.optimizer)).in_use()
        found[name] = base + most_allocated(lambda: train_step(job))
    return found


def most_allocated(work) -> int:
    """Return the most bytes that were allocated on the CPU at a time while ``work`` ran, beyond those before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    events = watched.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in changes), default=0)


def result(arguments: argparse.Namespace, times: dict, most: dict) -> dict:
    off = times["off"]
    over = {
        name: [(a - b) / b for a, b in zip(each, off, strict=True)] for name, each in times.items() if name != "off"
    }
    found = {
        "bench": "dmr",
        "over": {name: round(statistics.median(each), 4) for name, each in over.items()},
        "over_quartiles": {n: [round(q, 4) for q in statistics.quantiles(each, n=4)] for n, each in over.items()},
        "step_ms": {name: round(1e3 * statistics.median(each), 1) for name, each in times.items()},
        **most,
    }
    if arguments.plan is not None:
        from ft.systems.dmr.plan.file import read_plan

        plan = read_plan(Path(arguments.plan))
        found |= {"predicted_over": round(plan.predicted.overhead, 4), "peak_bytes": plan.predicted.peak_bytes}
        found["budget_bytes"] = plan.trace.memory.budget
    found |= {"cores": os.cpu_count(), "load": [round(one, 1) for one in os.getloadavg()], **vars(arguments)}
    return found if arguments.plan is None else {**found, "plan": Path(arguments.plan).name}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
