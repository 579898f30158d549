"""Traces for tests of the DMR planner: random ones, and a small pipeline of transformer blocks."""

import random

from msgspec.structs import replace

from ft.systems.dmr.plan.predict import idle, simulate
from ft.systems.dmr.plan.trace import (
    BACKWARD,
    FINGERPRINT,
    FORWARD,
    OPTIMIZER,
    RECOMPUTE,
    MemoryInUse,
    Operator,
    Tensor,
    Trace,
    Window,
)
from ft.systems.schedule.kinds import Pipeline
from ft.systems.schedule.program import Unit

PRINT = dict.fromkeys(FINGERPRINT, "x")


def random_trace(seed: int, most: int = 30, dynamic: bool = False) -> Trace:
    """Return a trace of one stage with alternating operators and windows; some operators are recomputed, change
    tensors, draw random numbers, or are not reproducible."""
    rng = random.Random(seed)
    tensors = {"w": Tensor(64.0)}
    ops, windows, now, previous = [], [], 0.0, "w"
    for i in range(rng.randint(1, most)):
        if windows is not None and rng.random() < 0.4:
            kind = rng.choice(("p2p", "dp", "bubble", "tp", "ep"))
            length = rng.choice((0.0, rng.uniform(0, 60)))
            windows.append(Window(f"w{len(windows)}", now, length, kind, dynamic=dynamic and kind == "ep"))
            now += length
        phase = rng.choice((FORWARD, FORWARD, RECOMPUTE, BACKWARD, BACKWARD))
        segment = (None, False, False)
        if phase != BACKWARD and rng.random() < 0.5:
            segment = (f"s{i // 4}", i % 4 == 3, rng.random() < 0.3)
        length = rng.choice((0.0, 1.0, rng.uniform(0, 30)))
        out = f"t{i}"
        size = float(rng.randint(0, 40))
        tensors[out] = Tensor(size, rng.choice((None, now + length, now + rng.uniform(0, 90))))
        mutates = (rng.choice(list(tensors)),) if rng.random() < 0.1 else ()
        compare_us = rng.choice((0.0, 0.5))
        flags = dict(zip(("rng", "deterministic"), (rng.random() < 0.1, rng.random() < 0.95), strict=True))
        flags |= dict(zip(("ac_segment", "is_segment_last", "comm_tail"), segment, strict=True))
        reads = tuple(dict.fromkeys((previous, rng.choice(list(tensors)))))
        reads = tuple(each for each in reads if each != out)
        where = {"microbatch": rng.randint(0, 1), "layer": i // 6}
        costs = {"compare_us": compare_us, "mutates": mutates}
        ops.append(Operator(f"o{i}", "mm", phase, now, length, reads, (out,), **where, **costs, **flags))
        now, previous = now + length, out
    if rng.random() < 0.7:
        ops.append(Operator("adam", "adam", OPTIMIZER, now, 5.0, ("w",), mutates=("w",)))
    points = sorted((rng.uniform(0, now), float(rng.randint(0, 100))) for _ in range(rng.randint(0, 12)))
    return Trace(
        PRINT, tuple(ops), tensors, tuple(windows), MemoryInUse({0: tuple(points)}), early_stop=rng.random() < 0.5
    )


def pipeline_trace(
    pipeline: Pipeline, layers: int = 2, size: float = 100.0, tp_us: float = 4.0, moe: bool = False
) -> Trace:
    """Return the trace of a pipeline with recomputation and tensor-parallel windows. Each block has four operators of
    10, 20, 5 and 15 us; the backward pass takes twice as long."""
    times = (10.0, 20.0, 5.0, 15.0)
    once = sum(times)
    timeline = simulate(pipeline, lambda unit: layers * (3 * once + 2 * tp_us if unit.backward else once + tp_us))
    tensors, ops, windows = {"w": Tensor(1.0)}, [], []
    for unit, (now, end) in timeline.times.items():
        for step in range(layers):
            layer = layers - 1 - step if unit.backward else step
            for phase in (RECOMPUTE, BACKWARD) if unit.backward else (FORWARD,):
                now = _block(unit, layer, phase, now, end, size, times, tensors, ops)
                length = tp_us * (2 if phase == BACKWARD else 1) if phase != RECOMPUTE else 0.0
                if length:
                    windows.append(Window(f"tp{len(windows)}", now, length, "ep" if moe else "tp", unit.stage, moe))
                now += length
    for i, (stage, start, stop, kind, _) in enumerate(idle(timeline)):
        windows.append(Window(f"i{i}", start, stop - start, kind, stage))
    memory = MemoryInUse({stage: _in_use(timeline, stage, size) for stage in range(pipeline.stages)})
    ops.sort(key=lambda op: (op.stage, op.start_us))
    windows.sort(key=lambda one: (one.stage, one.start_us))
    units = tuple((unit, *times) for unit, times in timeline.times.items())
    return Trace(PRINT, tuple(ops), tensors, tuple(windows), memory, pipeline, units=units)


def _block(unit: Unit, layer: int, phase: str, now: float, end: float, size: float, times, tensors, ops) -> float:
    key = f"{unit.stage}.{unit.chunk}.{unit.microbatch}.{layer}"
    where = {"stage": unit.stage, "microbatch": unit.microbatch, "layer": layer, "chunk": unit.chunk}
    previous = f"{key}.in"
    tensors.setdefault(previous, Tensor(size, None))
    if phase == BACKWARD:
        previous = f"{key}.grad"
        tensors[previous] = Tensor(size, now)
    for i, time in enumerate(times):
        length = time * (2 if phase == BACKWARD else 1)
        out = f"{key}.{phase[0]}{i}"
        reads = ("w", previous)
        if phase == BACKWARD:
            reads += (f"{key}.r{3 - i}",)
        tensors[out] = Tensor(size, end if phase == RECOMPUTE else now + length)
        segment = {"ac_segment": key, "is_segment_last": i == 3} if phase != BACKWARD else {}
        ops.append(Operator(out, f"mm{i}", phase, now, length, reads, (out,), compare_us=0.1, **where, **segment))
        now, previous = now + length, out
    return now


def _in_use(timeline, stage: int, size: float) -> tuple[tuple[float, float], ...]:
    changes = []
    for unit, (start, end) in timeline.times.items():
        if unit.stage == stage:
            changes.append((end, -size) if unit.backward else (start, size))
    live, points = 10 * size, [(0.0, 10 * size)]
    for at, change in sorted(changes):
        live += change
        points.append((at, live))
    return tuple(points)


def wider(trace: Trace, rng: random.Random) -> Trace:
    """Return the trace with one window lengthened: everything after the window is later by the same time."""
    at = rng.randrange(len(trace.windows))
    begin, more = trace.windows[at].start_us, rng.uniform(0, 40)

    def later(when: float) -> float:
        return when + more if when > begin else when

    # What starts at the same time as the window comes after it, except itself: windows are listed before operators.
    ops = [
        replace(op, start_us=op.start_us + more if op.start_us >= begin and op.t_us else later(op.start_us))
        for op in trace.ops
    ]
    windows = [
        replace(one, start_us=one.start_us + more) if i > at else replace(one, dur_us=one.dur_us + more * (i == at))
        for i, one in enumerate(trace.windows)
    ]
    tensors = {
        name: one if one.free_us is None else replace(one, free_us=later(one.free_us))
        for name, one in trace.tensors.items()
    }
    timeline = tuple((later(at_us), live) for at_us, live in trace.memory.timeline[0])
    memory = replace(trace.memory, timeline={0: timeline})
    return replace(trace, ops=tuple(ops), windows=tuple(windows), tensors=tensors, memory=memory)
