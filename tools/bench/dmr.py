"""What executing every operator twice costs: off, naive, piggyback and by plan, in turn, in the same processes.

    python tools/bench/dmr.py                              # one rank, nothing to hide behind
    python tools/bench/dmr.py --pp 2 --plan auto           # windows and bubbles: profiled and planned first

Prints one JSON line. Steps of all sides take turns, so that a machine that slows down slows all of them; `over` is the
median over rounds of (side - off) / off. Off is the trainer with DMR's patches in place and nobody listening. The model
is recomputed in full, so that a forward's second execution is there anyway: duplicated work alone is the backward's and
the optimizer's. Goal: 0.60 for full coverage with nothing hidden, and less with windows. `kept_bytes`: what waits for
windows, at most; `peak_bytes`: of training and what waits, by the plan's figures.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

WARM_UP = 2
_FOLDER = "BENCH_FOLDER"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages, a process each")
    parser.add_argument("--plan", metavar="FILE", help="a plan for this very model, or auto: profile and plan first")
    parser.add_argument("--memory-budget", default="4GB", help="of the plan that auto makes")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each side that count")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args(argv)
    if _FOLDER in os.environ:
        measure(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(in_ranks(arguments, argv, Path(folder)))
    return 0


def in_ranks(arguments: argparse.Namespace, argv: list[str], folder: Path) -> str:
    """The result of the processes that measure."""
    import small_runs as runs

    from megatron import patches

    patches.apply()
    runs.make_corpus(folder)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.pp), "--standalone"]
    if arguments.plan == "auto":
        argv = [*argv, "--plan", str(_plan(arguments, folder, launch))]
    _run([*launch, __file__, *argv], folder)
    return (folder / "result.json").read_text()


def _plan(arguments: argparse.Namespace, folder: Path, launch: list[str]) -> Path:
    profile, plan = folder / "profile.json", folder / "plan.json"
    ft = [sys.executable, "-m", "ft", "dmr"]
    trainer = [*launch, str(ROOT / "pretrain_gpt.py"), *flags(arguments, folder).split()]
    _run([*ft, "profile", "--out", str(profile), "--", *trainer], folder)
    _run([*ft, "plan", str(profile), "--memory-budget", arguments.memory_budget, "--out", str(plan)], folder)
    return plan


def _run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", _FOLDER: str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def flags(arguments: argparse.Namespace, folder: Path) -> str:
    """The trainer's."""
    import small_runs as runs

    return (
        f"{runs.BASE} --hidden-size {arguments.hidden_size} --num-layers {arguments.layers} --num-attention-heads 8 "
        f"--seq-length {arguments.seq_length} --micro-batch-size {arguments.micro_batch_size} "
        f"--global-batch-size {arguments.micro_batch_size * arguments.microbatches} --data-path {folder}/corpus "
        f"--pipeline-model-parallel-size {arguments.pp} --train-iters 10000 --recompute-granularity full "
        f"--recompute-method uniform --recompute-num-layers 1 {'--bf16' if arguments.bf16 else ''}"
    )


# --- in a rank --------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> None:
    from megatron import patches
    from megatron.patches.manifest import WITH_DMR

    patches.apply(WITH_DMR)
    import torch.distributed as dist

    from megatron.training.arguments import check, parse
    from megatron.training.initialize import destroy, init_model_parallel, init_process_group, launch_from
    from megatron.training.pretrain import assemble

    place = launch_from(os.environ)
    options = parse(f"{flags(arguments, Path(os.environ[_FOLDER]))} --ft-dmr piggyback")
    layout = check(options, place.world_size, has_te=False)
    init_process_group(options.parallel, place)
    init_model_parallel(options.parallel, layout)
    job = assemble(options, layout, time.monotonic())
    sides = {"off": None, **protections(arguments, job)}
    times = alternate(arguments, job, sides)
    kept = {name: side[0].engine.queue.most_bytes for name, side in sides.items() if side is not None}
    told = [None] * place.world_size
    dist.all_gather_object(told, kept)
    if place.rank == 0:
        found = result(arguments, times, {name: max(each[name] for each in told) for name in kept})
        (Path(os.environ[_FOLDER]) / "result.json").write_text(json.dumps(found))
    destroy()


def protections(arguments: argparse.Namespace, job) -> dict:
    """Side -> (what has its operators executed twice, its engine)."""
    from ft.dmr.runtime.install import install
    from ft.dmr.runtime.settings import Settings
    from megatron.training.double_execution import fingerprint
    from megatron.training.position import JobPosition

    asked = {"naive": Settings("naive"), "piggyback": Settings("piggyback")}
    if arguments.plan is not None:
        asked["plan"] = Settings(None, Path(arguments.plan))
    trainee = job.trainee
    found = {}
    for name, settings in asked.items():
        of = (trainee.chunks, trainee.optimizer, trainee.scheduler, JobPosition(job))
        made = install(settings, *of, fingerprint=fingerprint(job.options, job.layout))
        found[name] = (made, made.engine)
    return found


def alternate(arguments: argparse.Namespace, job, sides: dict) -> dict:
    """Side -> seconds of each step that counts."""
    import torch.distributed as dist

    from megatron.patches import double_execution
    from megatron.training.step import train_step

    times = {name: [] for name in sides}
    for number in range(arguments.rounds + WARM_UP):
        names = list(sides)
        for name in names if number % 2 else names[::-1]:
            job.dmr, engine = (None, None) if sides[name] is None else sides[name]
            double_execution.listen(engine)
            dist.barrier()
            began = time.perf_counter()
            train_step(job)
            dist.barrier()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - began)
    return times


def result(arguments: argparse.Namespace, times: dict, kept: dict) -> dict:
    off = times["off"]
    over = {
        name: [(a - b) / b for a, b in zip(each, off, strict=True)] for name, each in times.items() if name != "off"
    }
    found = {
        "bench": "dmr",
        "over": {name: round(statistics.median(each), 4) for name, each in over.items()},
        "over_quartiles": {n: [round(q, 4) for q in statistics.quantiles(each, n=4)] for n, each in over.items()},
        "step_ms": {name: round(1e3 * statistics.median(each), 1) for name, each in times.items()},
        "kept_bytes": kept,
    }
    if arguments.plan is not None:
        from ft.dmr.plan.file import read_plan

        plan = read_plan(Path(arguments.plan))
        found |= {"predicted_over": round(plan.predicted.overhead, 4), "peak_bytes": plan.predicted.peak_bytes}
        found["budget_bytes"] = plan.trace.memory.budget
    found |= {"cores": os.cpu_count(), "load": [round(one, 1) for one in os.getloadavg()], **vars(arguments)}
    return found if arguments.plan is None else {**found, "plan": Path(arguments.plan).name}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
