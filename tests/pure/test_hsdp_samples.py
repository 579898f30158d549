"""FT-HSDP: every sample once, whatever happens to the replicas; and what replicas find who compare their digests."""

import random

import numpy
import pytest
import torch

from ft.systems.hsdp.exchange import compare, table
from ft.systems.hsdp.samples import SampleAssignment, SampleStream

SEEDS = range(40)


def samples_of(ranges) -> list[int]:
    return [sample for first, end in ranges.tolist() for sample in range(first, end)]


def run_of(seed: int) -> tuple[SampleAssignment, dict[int, int], list[int], int, random.Random]:
    """A run with several changes of replicas and block; returns what it took, sample by sample, and its steps."""
    rng = random.Random(seed)
    assignment, taken, step = SampleAssignment(rng.randint(1, 5), rng.randint(1, 6)), [], 0
    positions = dict.fromkeys(range(assignment.replicas), 0)
    for _ in range(rng.randint(1, 5)):
        for _ in range(rng.randint(0, 12)):
            step += 1
            batch = rng.choice([1, assignment.block, 3 * assignment.block])
            for replica in rng.sample(range(assignment.replicas), rng.randint(1, assignment.replicas)):
                stream, at = assignment.stream(replica), positions[replica]
                taken += [stream.index(at + i) for i in range(batch)]
                positions[replica] = at + batch
        assignment, positions = assignment.after(positions, step, rng.randint(1, 6), rng.randint(1, 6))
    return assignment, positions, taken, step, rng


def test_the_streams_of_all_replicas_are_every_sample_once():
    for replicas, block in [(1, 1), (2, 3), (5, 4), (12, 7)]:
        streams = [SampleStream(replica, replicas, block) for replica in range(replicas)]
        samples = numpy.concatenate([stream.index(numpy.arange(block * 9)) for stream in streams])
        assert sorted(samples.tolist()) == list(range(replicas * block * 9))


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_twice_and_nothing_left_out_through_changes_of_replicas_and_block(seed):
    assignment, positions, taken, _, rng = run_of(seed)
    assert len(set(taken)) == len(taken), f"seed {seed}: a sample was taken twice"
    assert samples_of(assignment.taken(positions)) == sorted(taken), f"seed {seed}"
    # What is taken from here on fills all holes, in order.
    far = max(taken, default=-1) + 1 + rng.randint(0, 50)
    ahead = [
        stream.index(numpy.arange(positions[stream.replica], stream.within(far))) for stream in assignment.streams()
    ]
    rest = numpy.concatenate(ahead).tolist()
    assert sorted(rest + taken) == list(range(far)), f"seed {seed}"
    assert all(stream.index(stream.within(far)) >= far for stream in assignment.streams())


@pytest.mark.parametrize("seed", SEEDS)
def test_one_position_many_and_a_stretch_agree(seed):
    assignment, _, _, _, rng = run_of(seed)
    for stream in assignment.streams():
        begin = rng.randint(0, 40)
        end = begin + rng.randint(0, 60)
        one_by_one = [stream.index(p) for p in range(begin, end)]
        assert stream.index(numpy.arange(begin, end)).tolist() == one_by_one
        assert samples_of(stream.ranges(begin, end)) == one_by_one
        assert one_by_one == sorted(one_by_one)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_assignment_comes_back_from_its_values(seed):
    assignment, positions, *_ = run_of(seed)
    again = SampleAssignment.from_values(assignment.as_values())
    assert again == assignment
    assert again.taken(positions).tolist() == assignment.taken(positions).tolist()


@pytest.mark.parametrize("seed", range(10))
def test_the_data_reach_as_far_as_any_stream_can(seed):
    rng = random.Random(seed)
    assignment = SampleAssignment(rng.randint(1, 5), rng.randint(1, 4))
    batch, steps = assignment.block * rng.randint(1, 3), rng.randint(1, 20)
    assert assignment.needed(steps, batch) == steps * batch * assignment.replicas
    later, _ = assignment.after({0: 5 * batch}, 5, assignment.replicas + 1, assignment.block)
    needed = later.needed(steps + 5, batch)
    assert needed == max(stream.index(steps * batch - 1) for stream in later.streams()) + 1
    assert later.needed(5, batch) == 0


def test_streams_are_leveled_without_a_sample_lost_or_doubled():
    assignment, positions = SampleAssignment(3, 2), {0: 8, 1: 4, 2: 8}
    level, begin = assignment.leveled(positions, 4)
    assert begin == {0: 0, 1: 0, 2: 0} and assignment.leveled({0: 4, 1: 4, 2: 4}, 2) == (assignment, {0: 4, 1: 4, 2: 4})
    taken = [assignment.stream(replica).index(at) for replica, count in positions.items() for at in range(count)]
    to_come = [level.stream(replica).index(at) for replica in range(3) for at in range(12)]
    assert len({*taken, *to_come}) == len(taken) + len(to_come)
    assert set(range(20 + 3 * 8)) <= {*taken, *to_come}


# --- digests of models and sums ---------------------------------------------------------------------------------------


GOOD, BAD, WORSE = (
    torch.tensor([first, second]) for first, second in ((-(2**63), 2**63 - 1), (5, -1), (-(2**63), 2**63 - 2))
)


def summed(models, sums):
    count = len(models)
    return sum(table(count, place, model, total) for place, (model, total) in enumerate(zip(models, sums, strict=True)))


def verdicts(models, sums=None):
    rows = summed(models, sums or [GOOD] * len(models))
    return [compare(rows, place) for place in range(len(models))]


def test_equal_members_commit():
    assert not any(each.problem or each.is_stale for each in verdicts([GOOD] * 3))


def test_a_member_that_catches_up_has_no_model_to_compare():
    assert not any(each.problem for each in verdicts([GOOD, None, GOOD]))


@pytest.mark.parametrize(
    ("models", "stale"),
    [
        ([GOOD, BAD, GOOD], [1]),
        ([GOOD, WORSE, GOOD], [1]),  # one bit
        ([BAD, GOOD, None, GOOD], [0]),
        ([GOOD, BAD], [0, 1]),
        ([GOOD, BAD, WORSE], [0, 1, 2]),
        ([GOOD, GOOD, BAD, BAD], [0, 1, 2, 3]),
    ],
)
def test_members_whose_model_is_not_the_majoritys_are_stale(models, stale):
    found = verdicts(models)
    assert len({each.problem for each in found}) == 1 and found[0].problem
    assert [place for place, each in enumerate(found) if each.is_stale] == stale


def test_different_sums_are_no_members_fault():
    found = verdicts([GOOD] * 3, [GOOD, GOOD, BAD])
    assert all("different sums" in each.problem and not each.is_stale for each in found)
