"""Stragglers: who is named among ranks with the same work, how soon, and what the control plane writes down of them.

Whom it replaces is in ``conversations/recovery/stragglers.txt``.
"""

import json
import random
from dataclasses import replace

import pytest
from control_world import World, kinds

from ft.base.events import observed
from ft.base.step_clock import BLOCK, COMPUTE, DATA, WARM_UP
from ft.faults.verdict import STRAGGLER
from ft.job import messages as m
from ft.job.control.journal import Journal, recall
from ft.job.control.stragglers import WINDOW, PaceBook, compare, is_punctual
from ft.observe.report import ranks, status
from ft.record import metrics
from ft.show import palette


def test_a_new_control_plane_knows_of_an_eviction_from_the_journal(tmp_path):
    world = World()
    world.journal = Journal(tmp_path / "journal.jsonl", world.options)
    world.run()
    world.say(m.Observed("layout", {"evict_stragglers": 1.5}))
    report = m.PaceJudged(world.worker(2), 0, 2, 50, True, 2.0, 0.2, 0.1, COMPUTE, WINDOW)
    assert m.decode(m.encode(report)) == report
    world.say(report)
    world.journal.close()
    known = recall(tmp_path / "journal.jsonl").state
    assert known.seats == world.state.seats and known.epoch == 1 and known.evicted_at == 50


def blocks(world: World, number: int, slow: dict[int, float], role=lambda rank: "stage 0", part: str = COMPUTE):
    """Return the reports of all ranks on block ``number``; ``slow``: rank -> seconds of more work in each step."""
    first, epoch = WARM_UP + 1 + BLOCK * number, world.state.epoch
    slowest = 0.1 + max(slow.values(), default=0.0)
    for rank, worker in world.state.seats.items():
        more = slow.get(rank, 0.0)
        own = [0.1 + more + 1e-4 * ((rank + step) % 3) for step in range(BLOCK)]
        steps = list(range(first, first + BLOCK))
        parts = {COMPUTE: BLOCK * 0.1, part: BLOCK * (more + 0.1 * (part == COMPUTE))}
        waits = {"tensor model parallel group": BLOCK * (slowest - 0.1 - more)}
        yield m.StepTimes(worker, epoch, rank, role(rank), steps, [slowest] * BLOCK, own, parts, waits)


def taken(world: World, book: PaceBook, slow, count: int = 5, **how) -> list[m.PaceJudged]:
    found = []
    for number in range(count):
        for report in blocks(world, number, slow, **how):
            found += book.take(world.state, [report], 1000.0 + number)
    return found


def test_the_book_names_who_works_longer_and_not_who_waits(tmp_path):
    world = World().run()
    book = PaceBook(tmp_path / metrics.STEP_TIMES)
    (found,) = taken(world, book, {2: 0.02}, count=4, part=DATA)
    assert (found.rank, found.worker, found.cause, found.is_late) == (2, "n0.w2", DATA, True)
    assert found.step <= WARM_UP + 50 and found.ratio == pytest.approx(1.2, abs=0.01)
    world.say(found)
    assert taken(world, book, {}, count=9)[-1].is_late is False


def test_ranks_of_different_stages_are_not_compared(tmp_path):
    world = World().run()
    book = PaceBook(tmp_path / metrics.STEP_TIMES)
    assert taken(world, book, {0: 0.05, 1: 0.05}, role=lambda rank: f"stage {rank // 2}") == []
    assert taken(world, PaceBook(tmp_path / "other"), {0: 0.05}, role=lambda rank: f"stage {rank}") == []


def test_a_straggler_is_reported_again_when_it_can_be_replaced(tmp_path):
    world = World(standbys=0).run()
    world.say(m.Observed("layout", {"evict_stragglers": 1.1}))
    book = PaceBook(tmp_path / metrics.STEP_TIMES)
    (found,) = taken(world, book, {2: 0.02}, count=4)
    assert world.say(found) == []
    assert taken(world, book, {2: 0.02}, count=5) == [], "there is no standby yet"
    world.ready(world.start_worker("n0"))
    (again,) = taken(world, book, {2: 0.02}, count=6)
    assert "Open" in kinds(world.say(again))


def test_reports_of_an_old_epoch_or_of_somebody_without_the_seat_count_for_nothing(tmp_path):
    world = World().run()
    book = PaceBook(tmp_path / metrics.STEP_TIMES)
    strange = [replace(report, worker="n9.w9") for report in blocks(world, 0, {})]
    strange += [replace(report, epoch=7) for report in blocks(world, 0, {})]
    assert book.take(world.state, strange, 1.0) == []
    book.close()
    assert not (tmp_path / metrics.STEP_TIMES).exists()


def test_the_file_stays_small_and_the_report_shows_it(tmp_path):
    world = World().run()
    book = PaceBook(tmp_path / metrics.STEP_TIMES)
    for number in range(3000):
        for report in blocks(world, number, {2: 0.03}):
            book.take(world.state, [report], 1000.0 + number)
    book.close()
    spans = metrics.read(tmp_path)
    assert 100 < len(spans) < 500 and spans[-1].last == WARM_UP + 3000 * BLOCK
    assert spans[9].own_ms[2] == pytest.approx(130.1, abs=0.1) and spans[9].step_ms == [130.0] * 4
    assert spans[9].waits == {"tensor model parallel group": [30.0, 30.0, 0.0, 30.0]}
    shown = ranks.panel(spans)
    assert shown.count("<rect") <= 4 * 120 and "rank 2, steps" in shown and "1.30 times" in shown
    assert "tensor model parallel group 30.0" in shown


def test_damaged_lines_are_skipped(tmp_path):
    good = {"wall": 1, "epoch": 0, "first": 1, "last": 2, "ranks": [0], "roles": ["a"], "steps": [2]}
    good |= {"step_ms": [1.0], "own_ms": [1.0]}
    lines = [json.dumps(good), "{", json.dumps({**good, "steps": []}), "[]", json.dumps({"wall": 1})]
    (tmp_path / metrics.STEP_TIMES).write_text("\n".join(lines))
    assert len(metrics.read(tmp_path)) == 1
    assert "rank 0" in ranks.panel(metrics.read(tmp_path))


def test_the_report_tells_what_became_of_a_straggler():
    def event(name, step, **values):
        return observed(name, {"node": "n0", "worker": "n0.w2", "rank": 2, "step": step, "epoch": 0, **values})

    detail = {"ratio": 1.2, "own_s": 0.12, "usual_s": 0.1, "cause": DATA, "steps": 40}
    history = [event("straggler_found", 50, **detail), event("straggler_gone", 90, ratio=1.0)]
    history += [event("straggler_found", 130, **detail), event("fault_detected", 140, category=STRAGGLER)]
    (first, second) = ranks.slow_rows(history)
    assert first[:2] == ("2", "n0.w2 on n0") and "120.0 ms" in first[3] and first[-1].endswith("after step 90")
    assert second[-1] == "replaced after step 140"
    (said,) = status._stragglers({"2": {"worker": "n0.w2", "ratio": 1.2, "cause": DATA, "step": 50}})
    assert said.startswith("rank 2 (n0.w2): its own work takes 1.20 times")


def test_the_slower_a_rank_is_the_darker_its_cells_are():
    def brightness(ratio: float) -> int:
        return sum(bytes.fromhex(ranks._colour(ratio).removeprefix("#")))

    shades = [brightness(ratio) for ratio in (1.04, 1.1, 1.2, 1.35, 1.5)]
    assert shades == sorted(shades, reverse=True) and len(set(shades)) == len(shades)
    assert ranks._colour(1.5) == ranks._colour(9.0) == palette.FAULT
    assert ranks._colour(1.0) == ranks._colour(0.7) == palette.FAINT


# --- who is named, how soon, and how often in vain --------------------------------------------------------------------


JITTER = 0.02


def simulated(seed: int, ranks: int, steps: int, slow: dict[int, float], since: int = 0, jitter: float = JITTER):
    """Return rank -> seconds of own work in each step: 0.1 s with normal jitter; ``slow``: rank -> factor."""
    draw = random.Random(seed)
    return {
        rank: [
            0.1 * (slow.get(rank, 1.0) if step >= since else 1.0) * max(0.1, draw.gauss(1.0, jitter))
            for step in range(steps)
        ]
        for rank in range(ranks)
    }


def late(times) -> list[int]:
    return [rank for rank, pace in compare(times).items() if pace.is_late]


def named_after(times, since: int) -> tuple[int | None, set[int]]:
    """Return (steps from ``since`` until somebody is named, who), if reports come after every ``BLOCK`` steps."""
    steps = len(next(iter(times.values())))
    for end in range(BLOCK, steps + 1, BLOCK):
        if found := late({rank: own[:end] for rank, own in times.items()}):
            return end - since, set(found)
    return None, set()


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_equal_ranks_are_never_named(ranks):
    """4 x 2500 runs of 40 to 80 steps with 2 % jitter, each judged up to five times: nobody is named in any of them."""
    named = sum(
        named_after(simulated(seed, ranks, WINDOW + 4 * BLOCK * (seed % 25 == 0), {}), 0)[0] is not None
        for seed in range(2500)
    )
    assert named == 0


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_rank_that_is_five_per_cent_slower_is_named_within_fifty_steps(ranks):
    found = []
    for seed in range(300):
        since = 60 + seed % BLOCK
        after, who = named_after(simulated(seed, ranks, since + 60, {1: 1.05}, since), since)
        found.append(after is not None and after <= 50 and who == {1})
    assert sum(found) >= 0.99 * len(found)


def test_who_is_slow_for_a_moment_is_not_named():
    times = simulated(1, 4, 100, {})
    times[2][70:82] = [0.3] * 12  # such as a save on a slow disk
    times[3][::10] = [0.2] * 10  # such as a garbage collection in every tenth step
    assert all(not late({rank: own[:end] for rank, own in times.items()}) for end in range(40, 101))


def test_large_noise_needs_a_large_difference():
    assert sum(bool(late(simulated(seed, 4, 40, {}, jitter=0.3))) for seed in range(500)) == 0
    assert all(late(simulated(seed, 4, 40, {2: 2.0}, jitter=0.15)) == [2] for seed in range(50))


def test_several_stragglers_are_named_as_long_as_most_ranks_are_none():
    assert late(simulated(3, 8, 40, {0: 1.2, 5: 1.1, 7: 1.5})) == [0, 5, 7]


def test_the_pace_says_how_slow_a_rank_is():
    pace = compare(simulated(4, 4, 60, {1: 1.2}))[1]
    assert pace.ratio == pytest.approx(1.2, abs=0.02)
    assert pace.own_s == pytest.approx(0.12, rel=0.02) and pace.usual_s == pytest.approx(0.1, rel=0.02)
    assert not is_punctual(pace) and is_punctual(compare(simulated(4, 4, 60, {}))[1])


def test_nothing_is_said_of_a_rank_alone_or_of_few_steps():
    assert compare(simulated(1, 1, 100, {0: 2.0})) == {}
    assert compare(simulated(1, 4, WINDOW - 1, {0: 2.0})) == {}
