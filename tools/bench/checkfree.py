"""What CheckFree costs while nothing fails: steps with every stage's norm kept and without, in turn, in one run.

    python tools/bench/checkfree.py                     # four pipeline stages, a process each

Prints one JSON line. `over` is the median over rounds of (on - off) / off, where a round is a step of each side and the
sides change their order from round to round. Off is the trainer with CheckFree's patches in place and nobody listening;
what a snapshot's envelope holds more, some 20 bytes for each stage, is not in it. Goal: 0.01 at most. What a recovery
takes, `ft report` says of a run with faults (tests/test_checkfree_run.py has such runs).
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
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

WARM_UP = 3
_FOLDER = "BENCH_FOLDER"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4, help="pipeline stages, a process each")
    parser.add_argument("--rounds", type=int, default=60, help="steps of each side that count")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=8)
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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", _FOLDER: str(folder), "PYTHONPATH": str(ROOT)}
    command = [*launch, __file__, *argv]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return (folder / "result.json").read_text()


# --- in a rank --------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> None:
    from megatron import patches
    from megatron.patches.manifest import WITH_CHECKFREE

    patches.apply(WITH_CHECKFREE)
    import small_runs as runs
    import torch.distributed as dist

    from megatron.training.arguments import check, parse
    from megatron.training.initialize import destroy, init_model_parallel, init_process_group, launch_from
    from megatron.training.pretrain import assemble, checkfree

    place, folder = launch_from(os.environ), Path(os.environ[_FOLDER])
    options = parse(
        f"{runs.BASE} --num-layers {2 * arguments.pp} --hidden-size {arguments.hidden_size} --seq-length 64 "
        f"--global-batch-size {2 * arguments.microbatches} --data-path {folder}/corpus --train-iters 10000 "
        f"--pipeline-model-parallel-size {arguments.pp} --use-distributed-optimizer --ft-hot-swap --ft-checkfree"
    )
    layout = check(options, place.world_size, has_te=False)
    init_process_group(options.parallel, place)
    init_model_parallel(options.parallel, layout)
    job = assemble(options, layout, time.monotonic())
    times = alternate(arguments, job, keeper(job, checkfree(options)))
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result(arguments, times)))
    destroy()


def keeper(job, settings):
    """What keeps the norms of ``job``, without a control plane to talk to."""
    import torch.distributed as dist

    from ft.checkfree.keeper import StageKeeper
    from ft.worker.subject import Subject

    trainee = job.trainee
    session = SimpleNamespace(rank=dist.get_rank(), observe=lambda name, **detail: None)
    return StageKeeper(session, Subject(trainee.chunks, trainee.optimizer, trainee.scheduler), settings)


def alternate(arguments: argparse.Namespace, job, kept) -> dict[str, list[float]]:
    """Side -> seconds of each step that counts."""
    import torch.distributed as dist

    from megatron.patches import stage_norms
    from megatron.training.step import train_step

    times = {"off": [], "on": []}
    listener = stage_norms.listener()
    for number in range(arguments.rounds + WARM_UP):
        for name in ("off", "on") if number % 2 else ("on", "off"):
            stage_norms.listen(listener if name == "on" else None)
            dist.barrier()
            began = time.perf_counter()
            train_step(job)
            if name == "on":
                kept.committed(job.state.step)
            dist.barrier()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - began)
    return times


def result(arguments: argparse.Namespace, times: dict[str, list[float]]) -> dict:
    over = [(on - off) / off for on, off in zip(times["on"], times["off"], strict=True)]
    return {
        "bench": "checkfree",
        "over": round(statistics.median(over), 4),
        "over_quartiles": [round(q, 4) for q in statistics.quantiles(over, n=4)],
        "step_ms": {name: round(1e3 * statistics.median(each), 2) for name, each in times.items()},
        "cores": os.cpu_count(),
        "load": [round(one, 1) for one in os.getloadavg()],
        **vars(arguments),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
