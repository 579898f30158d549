"""Measure the cost of hot-swap: step time with and without it, alternating in the processes of one run.

    python tools/bench/protection.py

Prints one JSON line. `ratio` is the median over pairs of blocks of (on / off). The blocks alternate, so that a slow
machine slows both down. "off" is the same trainer without snapshots, peer copies and the barrier that commits a step.
Both sides use the interruptible process groups.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import in_ranks


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes, all data-parallel")
    parser.add_argument("--blocks", type=int, default=8, help="pairs of blocks that count")
    parser.add_argument("--block-steps", type=int, default=2, help="steps in a block")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--global-batch-size", type=int, default=16)
    parser.add_argument("--peers", type=int, default=1, help="copies of each optimizer shard")
    arguments = parser.parse_args(argv)
    return in_ranks.main(__file__, argv, arguments.ranks, lambda: measure(arguments), start=in_ranks.protected)


def measure(arguments: argparse.Namespace) -> None:
    """Measure the steps with and without hot-swap on this worker; rank 0 writes the result."""
    from megatron.ft_trainer.logging.runlog import count_parameters
    from megatron.ft_trainer.loop import train_step

    session, job, stack = in_ranks.protected_job(flags_of(arguments), arguments.ranks)
    (guard,) = stack.layers
    optimizer, times, stats = job.trainee.optimizer, {}, []
    protected_step = optimizer.step

    def block(side: str) -> None:
        if side == "off":
            optimizer.__dict__.pop("step", None)
        else:
            optimizer.step = protected_step
        for _ in range(arguments.block_steps):
            train_step(job)
            job.exits.answer(job.state.step)
            if side == "on":
                guard.committed()
                stats.append(guard.snapshots.stats)
        guard.snapshots.wait()

    guard.run_with_recovery(lambda: times.update(in_ranks.alternate(["on", "off"], arguments.blocks, block)))
    if session.rank == 0:
        found = result(arguments, times, stats, count_parameters(job.trainee.chunks), guard)
        in_ranks.publish(found)
    session.close()


def flags_of(arguments: argparse.Namespace) -> str:
    return (
        f"--hidden-size {arguments.hidden_size} --num-layers {arguments.layers} --num-attention-heads 8 "
        f"--seq-length {arguments.seq_length} --global-batch-size {arguments.global_batch_size} --train-iters 10000 "
        f"--use-distributed-optimizer --ft-hot-swap --ft-snapshot-peers {arguments.peers}"
    )


def result(arguments: argparse.Namespace, times: dict, stats: list, parameters: int, guard) -> dict:
    """Return the values of the JSON line.

    Args:
        arguments: the command line.
        times: side -> seconds of each block.
        stats: the statistics of all snapshots.
        parameters: number of parameters of the model.
        guard: the hot-swap layer of rank 0.
    """
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    whole = [s for s in stats if s.wait_s is not None and s.transfer_s is not None][2:]
    return {
        "bench": "protection",
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": in_ranks.quartiles(ratios),
        "on_s": round(statistics.median(times["on"]) / arguments.block_steps, 4),
        "off_s": round(statistics.median(times["off"]) / arguments.block_steps, 4),
        "parameters": parameters,
        "d2h_bytes_per_step": whole[-1].bytes_d2h,
        "h2h_bytes_per_step": whole[-1].bytes_h2h,
        "exposed_wait_ms": round(statistics.median(s.wait_s for s in whole) * 1e3, 3),
        "copy_ms": round(statistics.median(s.copy_s for s in whole) * 1e3, 3),
        "transfer_ms": round(statistics.median(s.transfer_s for s in whole) * 1e3, 3),
        "host_memory_bytes": guard.snapshots.nbytes,
        "pairs": len(ratios),
        **vars(arguments),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
