"""What the digest must see: every flip of bits, in every dtype; and what the proof says about it, on small cases."""

import itertools
import random

import pytest
import torch
from dmr_tensors import DTYPES, anything
from hypothesis import given, settings
from hypothesis import strategies as st

from ft.systems.dmr.digest import digest, digest_many, same
from ft.systems.dmr.digest.definition import WORDS


def flipped(tensor: torch.Tensor, places: list[tuple[int, int]]) -> torch.Tensor:
    """A copy with the given (byte, bit) places flipped."""
    other = tensor.clone()
    octets = other.view(torch.uint8)
    for byte, bit in places:
        octets[byte] ^= 1 << bit
    return other


def test_every_single_bit_of_a_block_and_a_half_is_seen():
    tensor = anything(WORDS + WORDS // 2, torch.float32, 1)
    mine = digest(tensor, 77)
    octets = tensor.view(torch.uint8)
    for byte in range(0, octets.numel(), 7):
        octets[byte] ^= 1 << byte % 8
        assert (digest(tensor, 77) != mine).all(), byte
        octets[byte] ^= 1 << byte % 8
    assert torch.equal(digest(tensor, 77), mine)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_digest_differs_exactly_where_the_bits_do(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    length = data.draw(st.sampled_from([1, 2, 9, 100, WORDS - 1, WORDS, 2 * WORDS + 1]))
    tensor = anything(length, dtype, data.draw(st.integers(0, 99)))
    byte = st.integers(0, length * dtype.itemsize - 1)
    places = data.draw(st.lists(st.tuples(byte, st.integers(0, 0 if dtype == torch.bool else 7)), max_size=64))
    other = flipped(tensor, places)
    seed = data.draw(st.integers(0, 3) | st.just(2**127))
    alike = all(places.count(place) % 2 == 0 for place in places)
    assert same(tensor, other) == alike
    assert bool((digest(tensor, seed) == digest(other, seed)).any()) == alike
    assert bool((digest(tensor, seed) == digest(other, seed)).all()) == alike


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_equal_flips_at_two_places_do_not_cancel(dtype):
    """What an XOR of all words misses."""
    tensor = anything(3 * WORDS, dtype, 2)
    mine, width = digest(tensor, 1), dtype.itemsize
    chance = random.Random(3)
    for _ in range(1000):
        first, second = chance.sample(range(3 * WORDS), 2)
        inside, bit = chance.randrange(width), chance.randrange(8)
        other = flipped(tensor, [(first * width + inside, bit), (second * width + inside, bit)])
        assert (digest(other, 1) != mine).all(), (first, second, inside, bit)


@pytest.mark.parametrize("unit", [1, 2, 64, WORDS], ids="words moved: {}".format)
def test_swapped_elements_and_blocks_are_seen(unit):
    """What a sum of all words misses, and within a block what a sum of block digests would miss."""
    tensor = anything(8 * WORDS, torch.int32, 4)
    mine = digest(tensor, 1)
    chance = random.Random(5)
    for _ in range(200 if unit < WORDS else 28):
        first, second = chance.sample(range(8 * WORDS // unit), 2)
        other = tensor.clone().view(-1, unit)
        other[[first, second]] = other[[second, first]]
        assert (digest(other.view(-1), 1) != mine).all(), (first, second)


def test_plus_and_minus_the_same_at_two_places_is_seen():
    tensor = anything(2 * WORDS, torch.int32, 6)
    mine = digest(tensor, 1)
    for distance, amount in itertools.product((1, 2, 4, 1024, WORDS - 1, WORDS), (1, 2**16, 2**30)):
        other = tensor.clone()
        other[0] += amount
        other[distance] -= amount
        assert (digest(other, 1) != mine).all(), (distance, amount)


def test_constant_tensors_of_all_values_have_digests_of_their_own():
    rows = digest_many([torch.full((n,), value, dtype=torch.int8) for n in (1, 3, 9) for value in range(-128, 128)], 0)
    for column in (0, 1):
        assert rows[:, column].unique().numel() == 3 * 256


def test_of_many_tensors_no_half_of_a_column_is_skewed():
    """Mean of every bit over 2,000 tensors and over 100 seeds, within six standard deviations of a half."""
    for numbers in (
        digest_many([anything(5, torch.int32, i) for i in range(2000)], 1),
        torch.cat([digest(anything(5, torch.int32, 0) | 1, seed).view(1, 2) for seed in range(100)]),
    ):
        bits = (numbers.unsqueeze(-1) >> torch.arange(64)) & 1
        off = (bits.double().mean(0) - 0.5).abs().max().item()
        assert off < 6 * 0.5 / len(numbers) ** 0.5


def test_the_worst_difference_of_the_proof_still_leaves_33_bits_of_a_column():
    """A flip of the highest bit changes a column by 2^31 times a key: always, and only above bit 31."""
    tensor = anything(100, torch.int32, 8)
    changes = set()
    for seed in range(100):
        other = tensor.clone()
        other[50] ^= -(2**31)
        change = (digest(tensor, seed) - digest(other, seed))[0].item() % 2**64
        assert change % 2**31 == 0
        changes.add(change >> 31)
    assert len(changes) == 100
    assert 0 not in changes
