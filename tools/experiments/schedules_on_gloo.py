"""Run planned pipeline schedules on real processes: each stage executes its steps, with messages over gloo.

A unit sleeps for its duration, so that the stages of a pipeline run in parallel even on few cores. It then appends the
number of its stage to the value that it received, so that the last value of a microbatch shows whether it has passed
all stages in order. Prints planned and measured times.

    python tools/experiments/schedules_on_gloo.py --pp 6 --microbatches 24 --forward-ms 40 --repeats 3
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from ft.show.text import percent, seconds, table
from ft.systems.schedule.choose import Planned, Shape, plan
from ft.systems.schedule.program import Batch, Program, Unit

_KINDS = ("1f1b", "two-pass", "half-half", "woven")
_NUMBERS = 4096


def main() -> None:
    given = _arguments()
    f = given.forward_ms / 1e3
    planned = [plan(kind, Shape(given.pp, given.microbatches, f, 2 * f)) for kind in _KINDS]
    took: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for _ in range(given.repeats):
        for each in planned:  # alternate, so that other load on the machine affects all kinds
            took[each.kind].append(_measure(each))
    rows = []
    for each in planned:
        median = statistics.median(took[each.kind])
        share = 1 - given.microbatches * 3 * f / median
        rows.append((each.kind, seconds(each.ran.end), percent(each.bubble), seconds(median), percent(share)))
    print(table(("kind", "planned", "bubbles", "measured", "bubbles"), rows, right=(1, 2, 3, 4)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=24)
    parser.add_argument("--forward-ms", type=float, default=40.0)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def _measure(planned: Planned) -> float:
    """Return the seconds from the start of the first stage to the end of the last one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    spans = fork.SimpleQueue()
    stages = [fork.Process(target=_stage, args=(planned, rank, port, spans)) for rank in range(planned.shape.stages)]
    for stage in stages:
        stage.start()
    for stage in stages:
        stage.join()
    if any(stage.exitcode for stage in stages):
        raise SystemExit(f"{planned.kind}: stages ended with {[stage.exitcode for stage in stages]}")
    begun, ended = zip(*(spans.get() for _ in stages), strict=True)
    return max(ended) - min(begun)


def _stage(planned: Planned, rank: int, port: int, spans) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=planned.shape.stages, timeout=timedelta(seconds=60))
    dist.barrier()
    begun = time.monotonic()
    _follow(planned.program, rank, planned.shape)
    spans.put((begun, time.monotonic()))
    dist.barrier()


def _follow(program: Program, rank: int, shape: Shape) -> None:
    """Run one stage's steps. A value is stored under the unit that computed it until it is used or sent."""
    values: dict[Unit, torch.Tensor] = {}
    for step in program.stages[rank]:
        if isinstance(step, Unit):
            _compute(program, step, values, shape)
        elif step:
            _transfer(step, rank, values)
        else:
            dist.barrier()
    if values:
        raise RuntimeError(f"stage {rank} has values left: {sorted(values)}")


def _compute(program: Program, unit: Unit, values: dict[Unit, torch.Tensor], shape: Shape) -> None:
    """Run one unit: sleep, compute its value from that of the unit before, and check the last value of a pass."""
    time.sleep(shape.b if unit.backward else shape.f)
    source = program.routes.needs(unit)
    begins = source is None or source.backward != unit.backward
    before = torch.full((_NUMBERS,), unit.microbatch, dtype=torch.float64) if begins else values.pop(source)
    value = before * shape.stages + unit.stage
    target = program.routes.receiver(unit)
    if target is not None and target.backward == unit.backward:
        values[unit] = value
        return
    wanted = unit.microbatch
    way = program.routes.ways[unit.microbatch]
    for place in reversed(way) if unit.backward else way:
        wanted = wanted * shape.stages + place.stage
    if not bool((value == wanted).all()):
        raise RuntimeError(f"{unit} ends with {value[0]:.0f}, not {wanted}")


def _transfer(batch: Batch, rank: int, values: dict[Unit, torch.Tensor]) -> None:
    operations = []
    for source, target, unit in batch:
        if source == rank:
            operations.append(dist.P2POp(dist.isend, values.pop(unit), target))
        else:
            values[unit] = torch.empty(_NUMBERS, dtype=torch.float64)
            operations.append(dist.P2POp(dist.irecv, values[unit], source))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


if __name__ == "__main__":
    main()
