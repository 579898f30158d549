"""Compare the step time of this project's trainer with that of a plain megatron-core loop with the same model and data.

    python tools/bench/step_time.py

Prints one JSON line. `ratio` is the median over pairs of blocks of (ours / plain). The blocks alternate in the same
processes, so that a slow machine slows both down. The side "ours" runs the whole training loop, including the metrics
file and the agreement on the exit.
"""

import argparse
import statistics
import sys
import time

import in_ranks


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2, help="processes, all data-parallel")
    parser.add_argument("--blocks", type=int, default=24, help="pairs of blocks that count")
    parser.add_argument("--block-steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--seq-length", type=int, default=128)
    arguments = parser.parse_args(argv)
    return in_ranks.main(__file__, argv, arguments.world_size, lambda: measure(arguments))


def measure(arguments: argparse.Namespace) -> None:
    """Measure in one rank; rank 0 publishes the result."""
    from megatron.ft_trainer.logging.quiet import quieten

    quieten()
    from megatron import patches

    patches.apply()
    import torch.distributed as dist

    dist.init_process_group("gloo")
    corpus = str(in_ranks.folder() / "corpus")
    sides = {"plain": plain_side(arguments, corpus), "ours": our_side(arguments, corpus)}
    times = in_ranks.alternate(list(sides), arguments.blocks, lambda name: sides[name](), warm_up=2)
    if dist.get_rank() == 0:
        in_ranks.publish(result(arguments, times))
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
        f"--use-distributed-optimizer --metrics-file {corpus}.jsonl"
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
        "ratio_quartiles": in_ranks.quartiles(ratios),
        "ours_ms": round(statistics.median(times["ours"]) / arguments.block_steps * 1e3, 3),
        "plain_ms": round(statistics.median(times["plain"]) / arguments.block_steps * 1e3, 3),
        "pairs": len(ratios),
        **vars(arguments),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
