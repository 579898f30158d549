"""Schedules of CheckFree+: what they cost, that the check lets them through, and that it lets nothing else through."""

import queue
import random
import time
from dataclasses import replace

import pytest
from waiting import at_once

from ft.systems.schedule.check import ScheduleDeadlock, check, play, run
from ft.systems.schedule.choose import BEST, SWAPPING, Shape, best, compared, orders, plan, weaves
from ft.systems.schedule.kinds import half_swapped, insert_messages
from ft.systems.schedule.program import Program, Routes, Unit, swapped


@pytest.fixture
def rng(seed) -> random.Random:
    return random.Random(seed)


def broken(program: Program, **more) -> set[str]:
    """The rules that do not hold."""
    return {finding.rule for finding in check(program, **more) if finding.faults}


def length(unit: Unit) -> float:
    return 2.0 if unit.backward else 1.0


@pytest.mark.parametrize("stages", range(4, 11))
def test_half_half_costs_one_microbatch_s_time_more_than_1f1b_and_holds_no_more(stages):
    found = plan("half-half", Shape(stages, 24))
    assert found.valid and found.ran.end <= 3 * (24 + stages - 1) + 3
    ahead = [stages - min(stage, swapped(stages)[stage].stage) for stage in range(stages)]
    assert all(held <= most for held, most in zip(found.in_flight, ahead, strict=True))
    for microbatches in (2, 3, 7, 24):
        assert plan(BEST, Shape(stages, microbatches, most_in_flight=min(stages, microbatches))).valid


def test_every_schedule_of_any_shape_may_run(rng):
    for _ in range(8):
        f, b = rng.choice(((1, 2), (1, 1), (1, 3), (2, 1), (rng.uniform(0.5, 2), rng.uniform(0.5, 5))))
        shape = Shape(rng.randint(4, 8), rng.randint(2, 24), f, b, rng.choice((0, 0, 0.1)))
        planned = compared(shape)
        for found in planned:
            assert found.valid, (shape, found.kind, found.findings)
            ways = found.program.routes.ways
            assert ways.count(swapped(shape.stages)) == shape.microbatches // 2
            least = (shape.microbatches + shape.stages - 2) * (f + b)
            assert found.ran.end >= least - 1e-9
        assert best(planned).ran.end == pytest.approx(min(found.ran.end for found in planned if found.valid))


def test_no_way_of_timing_deadlocks_a_schedule_or_lets_messages_cross(rng):
    for _ in range(10):
        found = plan(rng.choice(SWAPPING), Shape(rng.randint(4, 8), rng.randint(2, 16)))
        times = {
            unit: rng.expovariate(1) for units in map(found.program.order, range(found.shape.stages)) for unit in units
        }
        ran = run(found.program, times.__getitem__, rng.random())
        assert not ran.stuck and len(ran.times) == len(times)
        for unit, (start, _) in ran.times.items():
            source = found.program.routes.needs(unit)
            assert source is None or ran.times[source][1] <= start


def test_batches_exist_for_any_order_that_has_a_way_through(rng):
    """Random orders, drawn by running random units that are ready, get programs that pass the check."""
    for _ in range(20):
        stages, microbatches = rng.randint(4, 7), rng.randint(2, 8)
        routes = Routes.of(stages, [rng.choice(("normal", "swapped")) for _ in range(microbatches)])
        order, done = [[] for _ in range(stages)], set()
        left = [unit for microbatch in range(microbatches) for unit in routes.units(microbatch)]
        while left:
            ready = [unit for unit in left if (source := routes.needs(unit)) is None or source in done]
            unit = rng.choice(ready)
            order[unit.stage].append(unit)
            done.add(unit)
            left.remove(unit)
        program, end = insert_messages(routes, order, length)
        assert not broken(program)
        assert run(program, length).end == pytest.approx(end)
        assert [program.order(stage) for stage in range(stages)] == order


def test_orders_that_wait_for_each_other_get_no_batches():
    routes = Routes.of(4, ["normal", "swapped"])
    order = [[unit for m in (0, 1) for unit in routes.units(m) if unit.stage == stage] for stage in range(4)]
    order[0].sort(key=lambda unit: not unit.backward)
    for played in (lambda: insert_messages(routes, order, length), lambda: play(order, routes.needs, length)):
        with pytest.raises(ScheduleDeadlock, match="wait for each other"):
            played()


def changed(program: Program, stage: int, steps) -> Program:
    return replace(program, stages=tuple(tuple(steps) if i == stage else old for i, old in enumerate(program.stages)))


def test_the_check_notices_every_kind_of_damage(rng):
    program = plan("woven", Shape(6, 8)).program
    for _ in range(30):
        stage = rng.randrange(6)
        steps = list(program.stages[stage])
        units = [i for i, step in enumerate(steps) if isinstance(step, Unit)]
        batches = [i for i, step in enumerate(steps) if not isinstance(step, Unit)]
        at = rng.choice(units)
        assert "every unit once, after what it needs" in broken(changed(program, stage, steps[:at] + steps[at + 1 :]))
        assert "every unit once, after what it needs" in broken(changed(program, stage, [*steps, steps[at]]))
        at = rng.choice(batches)
        lacking = broken(changed(program, stage, steps[:at] + steps[at + 1 :]))
        assert {"message order per pair", "no deadlock"} & lacking
        first, last = units[0], units[-1]
        turned = steps[:]
        turned[first], turned[last] = turned[last], turned[first]
        assert broken(changed(program, stage, turned))


def test_two_messages_in_the_other_order_at_one_end_are_noticed():
    program = plan("half-half", Shape(6, 8)).program
    steps = list(program.stages[3])
    sends = [i for i, step in enumerate(steps) if any(isinstance(m, tuple) and m[:2] == (3, 4) for m in step)]
    steps[sends[0]], steps[sends[1]] = steps[sends[1]], steps[sends[0]]
    assert "message order per pair" in broken(changed(program, 3, steps))


def test_two_stages_that_both_send_first_deadlock():
    routes = Routes.of(4, ["normal", "swapped"])
    order = [[unit for m in (0, 1) for unit in routes.units(m) if unit.stage == stage] for stage in range(4)]
    program, _ = insert_messages(routes, order, length)
    apart = [
        [
            part
            for step in steps
            for part in (
                [step] if isinstance(step, Unit) else [(m,) for m in sorted(step, key=lambda m: m.source != stage)]
            )
        ]
        for stage, steps in enumerate(program.stages)
    ]
    both = replace(program, stages=tuple(map(tuple, apart)))
    exchanged = any(len(step) > 1 for steps in program.stages for step in steps if not isinstance(step, Unit))
    assert ("no deadlock" in broken(both)) == exchanged


@pytest.mark.parametrize("stages", [4, 5, 6, 8, 10])
def test_no_stage_of_a_woven_schedule_waits_once_all_have_begun(stages):
    ran = plan("woven", Shape(stages, 40)).ran
    begin, end = 0.4 * ran.end, 0.6 * ran.end
    worked = [0.0] * stages
    for unit, (start, stop) in ran.times.items():
        worked[unit.stage] += max(0.0, min(stop, end) - max(start, begin))
    assert worked == pytest.approx([end - begin] * stages)


def test_weaves_of_more_stages_than_are_searched_grow_out_of_narrower_ones():
    for stages in (9, 10, 11):
        grown = weaves(stages, 1, 2)
        assert grown and all(len(weave.normal.forwards) == stages for weave in grown)
        assert not broken(insert_messages(half_swapped(stages, 9), orders(grown[-1], 9), length)[0])


def test_stages_on_threads_follow_a_program_and_every_result_is_right(rng):
    """Each thread follows its stage's steps with sends that wait; values show which stages they went through."""
    for kind in SWAPPING:
        found = plan(kind, Shape(6, 8))
        assert follow(found.program, rng) == {
            m: "".join(str(place.stage) for place in way) for m, way in enumerate(found.program.routes.ways)
        }


def follow(program: Program, rng: random.Random) -> dict[int, str]:
    """Runs a program on threads; by microbatch, the stages whose backwards ran, the last of them first in time."""
    channels = {(a, b): (queue.Queue(), queue.Queue()) for a in range(6) for b in range(6)}
    results: dict[int, str] = {}
    naps = [[rng.uniform(0, 5e-4) for _ in steps] for steps in program.stages]

    def work(stage: int) -> None:
        values: dict[Unit, str] = {}
        for step, nap in zip(program.stages[stage], naps[stage], strict=True):
            if isinstance(step, Unit):
                time.sleep(nap)
                source = program.routes.needs(step)
                before = "" if source is None or step.backward != source.backward else values[source]
                values[step] = str(stage) + before if step.backward else before + str(stage)
                if program.routes.receiver(step) is None:
                    results[step.microbatch] = values[step]
                continue
            for source, target, unit in step:
                if source == stage:
                    channels[source, target][0].put(values[unit])
                else:
                    channels[source, target][1].put(None)
            for source, target, unit in step:
                if source == stage:
                    channels[source, target][1].get(timeout=10)
                else:
                    values[unit] = channels[source, target][0].get(timeout=10)

    at_once(work, range(6))
    return results
