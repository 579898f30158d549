"""Pipeline schedules played through: the order of units is megatron-core's, and idle times are what theory says."""

import random

import pytest

from ft.systems.dmr.plan.predict import idle, simulate
from ft.systems.schedule.kinds import Pipeline, orders
from ft.systems.schedule.program import Unit
from megatron.core.pipeline_parallel.schedules import get_schedule_table

SHAPES = [(1, 1, 1), (1, 5, 1), (2, 4, 1), (4, 8, 1), (4, 2, 1), (2, 4, 3), (4, 8, 2), (3, 3, 2), (4, 10, 2)]
SHAPES = [shape for shape in SHAPES if shape[2] == 1 or shape[1] % shape[0] == 0]


def idle_us(timeline, stage: int) -> float:
    return sum(each.end_us - each.start_us for each in idle(timeline) if each.stage == stage)


@pytest.mark.parametrize("stages, microbatches, chunks", SHAPES)
def test_every_unit_runs_once_after_what_it_needs(stages, microbatches, chunks):
    pipeline = Pipeline(stages, microbatches, chunks, comm_us=0.5)
    timeline = simulate(pipeline, lambda unit: 1.0 + unit.backward)
    assert len(timeline.times) == 2 * stages * microbatches * chunks == sum(map(len, orders(pipeline)))
    for unit, (start, _) in timeline.times.items():
        source = pipeline.routes.needs(unit)
        if source is not None:
            assert start >= timeline.times[source][1] + 0.5 * (source.stage != unit.stage) - 1e-9
    for units in timeline.order:
        starts = [timeline.times[unit][0] for unit in units]
        assert starts == sorted(starts)


def test_interleaved_forwards_come_in_the_order_of_core_s_table():
    for stages, microbatches, chunks in ((2, 4, 3), (4, 8, 2), (3, 3, 2)):
        for units in orders(Pipeline(stages, microbatches, chunks)):
            table = get_schedule_table(microbatches, chunks, stages)
            assert [(unit.microbatch, unit.chunk) for unit in units if not unit.backward] == table
            turned = [(microbatch, chunks - 1 - chunk) for microbatch, chunk in table]
            assert [(unit.microbatch, unit.chunk) for unit in units if unit.backward] == turned


def test_idle_times_and_work_fill_the_iteration_and_do_not_overlap(seed):
    rng = random.Random(seed)
    for _ in range(40):
        stages, chunks = rng.randint(1, 5), rng.choice((1, 1, 2, 3))
        chunks = chunks if stages > 1 else 1
        microbatches = rng.randint(1, 3) * (stages if chunks > 1 else rng.randint(1, 4))
        pipeline = Pipeline(stages, microbatches, chunks, rng.choice((0.0, 0.7)), rng.random() < 0.5)
        lengths = {unit: rng.uniform(0.1, 5) for units in orders(pipeline) for unit in units}
        timeline = simulate(pipeline, lengths.__getitem__)
        gaps = idle(timeline)
        for stage in range(stages):
            work = sum(length for unit, length in lengths.items() if unit.stage == stage)
            assert work + idle_us(timeline, stage) == pytest.approx(timeline.end_us)
            spans = [(gap.start_us, gap.end_us) for gap in gaps if gap.stage == stage]
            spans += [span for unit, span in timeline.times.items() if unit.stage == stage]
            spans.sort()
            assert all(spans[i][1] <= spans[i + 1][0] + 1e-9 for i in range(len(spans) - 1))


def test_work_behind_a_unit_costs_only_what_does_not_fit_the_gap_after_it():
    pipeline = Pipeline(2, 2)
    plain = simulate(pipeline, lambda unit: 10.0)
    last_forward, first_backward = Unit(0, 1, 0, False), Unit(0, 0, 0, True)
    room = plain.times[first_backward][0] - plain.times[last_forward][1]
    assert room > 0
    for work, more in ((room, 0.0), (room + 3, 3.0)):
        with_work = simulate(pipeline, lambda unit: 10.0, lambda unit, work=work: work * (unit == last_forward))
        assert with_work.times[first_backward][0] == pytest.approx(plain.times[first_backward][0] + more)


def messages(timeline) -> dict:
    """Return (sending stage, receiving stage) -> units whose results are sent, in the order in which they are sent."""
    found: dict = {}
    for units in timeline.order:
        for unit in units:
            target = timeline.pipeline.routes.receiver(unit)
            if target is not None and target.stage != unit.stage:
                found.setdefault((unit.stage, target.stage), []).append(unit)
    return found


@pytest.mark.parametrize("stages, microbatches, chunks", SHAPES)
def test_messages_of_a_pair_are_received_in_the_order_in_which_they_are_sent(stages, microbatches, chunks):
    pipeline = Pipeline(stages, microbatches, chunks)
    timeline = simulate(pipeline, lambda unit: 1.0 + unit.backward)
    for (source, target), sent in messages(timeline).items():
        for backward in (False, True):
            wanted = [
                (need.microbatch, need.chunk)
                for unit in timeline.order[target]
                if unit.backward == backward
                and (need := pipeline.routes.needs(unit)) is not None
                and need.stage == source != target
            ]
            ours = [(unit.microbatch, unit.chunk) for unit in sent if unit.backward == backward]
            assert ours == wanted
        times = [timeline.times[unit][1] for unit in sent]
        assert times == sorted(times)
