"""Measure the cost of measuring: step time with and without the clock that tells a step's parts apart.

    python tools/bench/step_clock.py

Prints one JSON line. `ratio` is the median over pairs of blocks of (on / off). The blocks alternate in the processes of
one run with hot-swap, so that a slow machine slows both down. That ratio is noisier than what it is about, so the cost
is also measured directly: `calls_per_step` is how often the training thread tells the clock that it begins something
else, `call_ns` what one such call takes, `report_us` what the report on ten steps takes, and `share` all of
it as a part of a step.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import in_ranks

_CALLS = 100_000


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes: a tensor-parallel group")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of blocks that count")
    parser.add_argument("--block-steps", type=int, default=1, help="steps in a block")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args(argv)
    return in_ranks.main(__file__, argv, arguments.ranks, lambda: measure(arguments), start=in_ranks.protected)


def measure(arguments: argparse.Namespace) -> None:
    """Measure the steps with and without the clock on this worker; rank 0 writes the result."""
    from ft.base.step_clock import CLOCK
    from megatron.ft_trainer.loop import train_step

    flags = (
        f"--hidden-size {arguments.hidden_size} --num-layers {arguments.layers} --train-iters 100000 "
        f"--use-distributed-optimizer --tensor-model-parallel-size {arguments.ranks} --ft-hot-swap"
    )
    session, job, stack = in_ranks.protected_job(flags, arguments.ranks)
    job.protection = stack
    measured: list = []

    def block(side: str) -> None:
        CLOCK.is_running = side == "on"
        for _ in range(arguments.block_steps):
            train_step(job)
            job.exits.answer(job.state.step)
            job.protection.committed()

    def work() -> None:
        measured.append(in_ranks.alternate(["on", "off"], arguments.pairs, block))
        measured.append(calls_of(CLOCK, lambda: block("on")) / arguments.block_steps)

    job.protection.run_with_recovery(work)
    if session.rank == 0:
        in_ranks.publish(result(arguments, *measured, cost_of_a_call(), cost_of_a_report()))
    session.close()


def calls_of(clock, work) -> int:
    """Return how often ``work`` reads the time of ``clock``."""
    read, count = clock._clock, 0

    def counted() -> float:
        nonlocal count
        count += 1
        return read()

    clock._clock = counted
    try:
        work()
    finally:
        clock._clock = read
    return count


def cost_of_a_call() -> float:
    """Return the median seconds of one call of a clock that runs."""
    from ft.base.step_clock import COMPUTE, StepClock

    clock, found = StepClock(), []
    clock.start()
    for _ in range(9):
        began = time.perf_counter()
        for _ in range(_CALLS):
            clock.switch(COMPUTE)
        found.append((time.perf_counter() - began) / _CALLS)
    clock.stop()
    return statistics.median(found)


def cost_of_a_report() -> float:
    """Return the median seconds that it takes to encode the report on one block of steps."""
    from ft.base.step_clock import BLOCK, OWN
    from ft.job.messages import StepTimes, encode

    waits = {f"group number {number}": 0.123456 for number in range(6)}
    numbers, seconds = list(range(1000, 1000 + BLOCK)), [0.123456] * BLOCK
    report, found = StepTimes("n0.w0", 1, 0, "stage 0", numbers, seconds, seconds, dict.fromkeys(OWN, 0.1), waits), []
    for _ in range(200):
        began = time.perf_counter()
        encode(report)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def result(arguments: argparse.Namespace, times: dict, calls: float, call_s: float, report_s: float) -> dict:
    """Return the values of the JSON line.

    Args:
        arguments: the command line.
        times: side -> seconds of each block.
        calls: calls of the clock in a step.
        call_s: seconds of one call.
        report_s: seconds of one report on ten steps.
    """
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    on_s, off_s = (statistics.median(times[side]) / arguments.block_steps for side in ("on", "off"))
    return {
        "bench": "step_clock",
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": in_ranks.quartiles(ratios),
        "on_s": round(on_s, 5),
        "off_s": round(off_s, 5),
        "calls_per_step": round(calls, 1),
        "call_ns": round(call_s * 1e9),
        "report_us": round(report_s * 1e6, 1),
        "share": round((calls * call_s + report_s / 10) / off_s, 6),
        **vars(arguments),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
