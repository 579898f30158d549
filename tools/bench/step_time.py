"""Compare the step time of this project's trainer with that of a plain megatron-core loop with the same model and data.

    python tools/bench/step_time.py

Prints one JSON line. `ratio` is the median over pairs of blocks of (ours / plain). The blocks alternate in the same
processes, so that a slow machine slows both down. The side "ours" runs the whole training loop, including the metrics
file and the agreement on the exit.
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2, help="processes, all data-parallel")
    parser.add_argument("--blocks", type=int, default=24, help="pairs of blocks that count")
    parser.add_argument("--block-steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--seq-length", type=int, default=128)
    arguments = parser.parse_args(argv)
    if "RANK" in os.environ:
        measure(arguments)
        return 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(arguments.world_size)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_FOLDER": folder}
        return subprocess.run([*launcher, __file__, *argv], env=environment, check=False).returncode


def measure(arguments: argparse.Namespace) -> None:
    """Measure in one rank; rank 0 prints the result."""
    out, sys.stdout = sys.stdout, sys.stderr  # keep the trainers' output apart from the result
    from megatron.ft_trainer.logging.quiet import quieten

    quieten()
    from megatron import patches

    patches.apply()
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    import small_runs as runs

    corpus = str(Path(os.environ["BENCH_FOLDER"]) / "corpus")
    if rank == 0:
        runs.make_corpus(Path(corpus).parent)
    dist.barrier()
    sides = {"plain": plain_side(arguments, corpus), "ours": our_side(arguments, corpus)}
    times = {name: [] for name in sides}
    for block in range(arguments.blocks + 2):
        order = list(sides) if block % 2 else list(sides)[::-1]
        for name in order:
            dist.barrier()
            started = time.perf_counter()
            sides[name]()
            dist.barrier()
            if block >= 2:  # the first two blocks warm up
                times[name].append((time.perf_counter() - started) / arguments.block_steps)
    if rank == 0:
        print(json.dumps(result(arguments, times)), file=out)
    dist.destroy_process_group()


def plain_side(arguments: argparse.Namespace, corpus: str):
    """Return a function that runs one block of steps of the plain megatron-core loop."""
    import plain_loop

    trainer = plain_loop.PlainTrainer(
        plain_loop.Setting(
            corpus,
            steps=(arguments.blocks + 2) * arguments.block_steps,
            seq_length=arguments.seq_length,
            hidden_size=arguments.hidden_size,
            config={"attention_dropout": 0.0, "hidden_dropout": 0.0},
            ddp={"use_distributed_optimizer": True},
        )
    )

    def block():
        for _ in range(arguments.block_steps):
            trainer.step()

    return block


def our_side(arguments: argparse.Namespace, corpus: str):
    """Return a function that runs one block of steps of this project's training loop."""
    import small_runs as runs
    import torch.distributed as dist

    from megatron.ft_trainer.arguments import check, parse
    from megatron.ft_trainer.loop import train
    from megatron.ft_trainer.pretrain import assemble

    flags = (
        f"{runs.BASE} --hidden-size {arguments.hidden_size} --seq-length {arguments.seq_length} --data-path {corpus} "
        f"--train-iters {(arguments.blocks + 2) * arguments.block_steps} --exit-interval {arguments.block_steps} "
        f"--use-distributed-optimizer --metrics-file {corpus}.jsonl --num-workers 2"
    )
    options = parse(flags)
    job = assemble(options, check(options, dist.get_world_size(), has_te=False), time.monotonic())

    def block():
        job.ending = None  # reset the reason that ended the last block
        train(job)

    return block


def result(arguments: argparse.Namespace, times: dict[str, list[float]]) -> dict:
    ratios = [ours / plain for ours, plain in zip(times["ours"], times["plain"], strict=True)]
    return {
        "bench": "step_time",
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)],
        "ours_ms": round(statistics.median(times["ours"]) * 1e3, 3),
        "plain_ms": round(statistics.median(times["plain"]) * 1e3, 3),
        "pairs": len(ratios),
        **vars(arguments),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
