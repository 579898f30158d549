"""Sums of blocks of elements, by which the sums of communication libraries are verified."""

import math
import random

import pytest
import torch

from ft.systems.dmr.digest import native
from ft.systems.dmr.runtime.collectives import block_of, block_sums


def exactly(values: torch.Tensor, pieces: int) -> tuple[list, list]:
    """The sums and the sums of magnitudes, rounded once."""
    sums, magnitudes = [], []
    for row in values.reshape(pieces, -1).tolist():
        blocks = [row[i : i + block_of(values)] for i in range(0, len(row), block_of(values))]
        sums.append([math.fsum(block) for block in blocks])
        magnitudes.append([math.fsum(map(abs, block)) for block in blocks])
    return sums, magnitudes


@pytest.fixture(params=["library", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("the C library was not built (there is no C compiler)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_they_are_those_of_the_definition(way, dtype):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = torch.Generator().manual_seed(seed)
    for pieces, length in ((1, 1), (1, 1024), (1, 5000), (2, 128), (3, 1025), (4, 2048), (2, 15)):
        values = torch.randn(pieces, length, generator=draw).to(dtype)
        found = block_sums(values, pieces)
        expected = torch.tensor(exactly(values, pieces), dtype=torch.float64)
        assert found.shape == expected.shape and found.dtype == torch.float64
        assert ((found - expected).abs() <= 1e-12 * expected[1]).all(), (pieces, length)


def test_what_is_not_finite_stays_so(way):
    values = torch.ones(3, 1024)
    values[0, 5], values[1, 7], values[2, 9] = math.inf, -math.inf, math.nan
    sums, magnitudes = block_sums(values, 3)
    assert sums[:2, 0].tolist() == [math.inf, -math.inf] and sums[2].isnan().all()
    assert magnitudes[:2, 0].tolist() == [math.inf] * 2 and magnitudes[2].isnan().all()


def test_strided_values_are_summed_in_their_order(way):
    values = torch.arange(4096.0).reshape(64, 64).t()
    assert torch.equal(block_sums(values, 2), block_sums(values.contiguous(), 2))
