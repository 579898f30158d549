"""Verification of all-reduces: a rank whose result differs from that of the majority notes it, and results are gathered
only if some differ. And sums of blocks of elements, by which the sums of communication libraries are verified."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from ft.systems.dmr.digest import native
from ft.systems.dmr.runtime.collectives import block_of, block_sums, verdicts
from ft.systems.dmr.runtime.findings import DISPUTED, REDUCTION

ROWS = 4


def reduced(wrong: dict) -> dict:
    """Return what a rank notes of ROWS all-reduces over all ranks, in an attempt with wrong results and in a clean one.

    ``wrong``: rank -> numbers of the all-reduces whose results are falsified on it.
    """
    import torch
    import torch.distributed as dist

    from ft.systems.dmr.plan.trace import BACKWARD
    from ft.systems.dmr.runtime.collectives import ALL_REDUCE, Begun, Collectives
    from ft.systems.dmr.runtime.cursor import OperatorCall
    from ft.systems.dmr.runtime.findings import Findings

    gathers, gather = [], dist.all_gather
    dist.all_gather = lambda *args, **kwargs: (gathers.append(args), gather(*args, **kwargs))
    findings = Findings(torch.device("cpu"), 7)
    reductions, said = Collectives(findings), []
    for _attempt in range(2):
        findings.restart()
        reductions.restart()
        for row in range(ROWS):
            tensor = torch.full((5,), float(row + dist.get_rank()))
            dist.all_reduce(tensor)
            tensor[2] += row in wrong.get(dist.get_rank(), ())
            at = OperatorCall(ALL_REDUCE, BACKWARD, 0, row, 0, row)
            reductions.end(Begun(ALL_REDUCE, dist.group.WORLD, [tensor], tensor, at))
        reductions.compare()
        flag = bool(findings.flag().item())
        before = len(gathers)
        reductions.settle()
        said.append((flag, before, [(one.at.index, one.how) for one in findings.settle()]))
        wrong = {}
    return {"said": said, "gathers": len(gathers)}


@pytest.mark.parametrize(
    "world, wrong, noted",
    [
        (3, {1: [0, 2]}, {1: [(0, REDUCTION), (2, REDUCTION)]}),
        (3, {1: [0], 2: [3]}, {1: [(0, REDUCTION)], 2: [(3, REDUCTION)]}),
        (2, {1: [2]}, {0: [(2, DISPUTED)], 1: [(2, DISPUTED)]}),
    ],
)
def test_only_a_rank_that_differs_from_the_majority_notes_a_wrong_result(ranks, world, wrong, noted):
    for rank, found in enumerate(ranks(reduced, world, wrong)):
        (flag, gathers, said), clean = found["said"]
        assert flag and said == noted.get(rank, [])
        assert gathers == 0, "results are gathered only after the flag is up"
        assert clean == (False, 1, []) and found["gathers"] == 1, "and not those of a group that agrees"


digests = some.lists(some.tuples(some.integers(0, 2), some.just(0)), min_size=2, max_size=7)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(some.lists(digests, min_size=1, max_size=3))
def test_the_majority_of_a_group_is_never_found_wrong(rows):
    members = min(map(len, rows))
    results = [[list(row[member]) for row in rows] for member in range(members)]
    told = [verdicts(member, results) for member in range(members)]
    for row, of_row in enumerate(zip(*told, strict=True)):
        if DISPUTED in of_row:
            assert set(of_row) == {DISPUTED}
            continue
        right = [member for member in range(members) if of_row[member] is None]
        assert 2 * len(right) > members
        assert len({tuple(results[member][row]) for member in right}) == 1
        assert all(results[member][row] != results[right[0]][row] for member in range(members) if member not in right)


def exactly(values: torch.Tensor, pieces: int) -> tuple[list, list]:
    """The sums and the sums of magnitudes, rounded once."""
    sums, magnitudes = [], []
    for row in values.reshape(pieces, -1).tolist():
        blocks = [row[i : i + block_of(values)] for i in range(0, len(row), block_of(values))]
        sums.append([math.fsum(block) for block in blocks])
        magnitudes.append([math.fsum(map(abs, block)) for block in blocks])
    return sums, magnitudes


@pytest.fixture(params=["library", "torch"])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("the C library was not built (there is no C compiler)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sums_of_blocks_are_those_of_the_definition(backend, dtype, seed):
    draw = torch.Generator().manual_seed(seed)
    for pieces, length in ((1, 1), (1, 1024), (1, 5000), (2, 128), (3, 1025), (4, 2048), (2, 15)):
        values = torch.randn(pieces, length, generator=draw).to(dtype)
        found = block_sums(values, pieces)
        expected = torch.tensor(exactly(values, pieces), dtype=torch.float64)
        assert found.shape == expected.shape and found.dtype == torch.float64
        assert ((found - expected).abs() <= 1e-12 * expected[1]).all(), (pieces, length)


def test_sums_of_values_that_are_not_finite_are_not_finite(backend):
    values = torch.ones(3, 1024)
    values[0, 5], values[1, 7], values[2, 9] = math.inf, -math.inf, math.nan
    sums, magnitudes = block_sums(values, 3)
    assert sums[:2, 0].tolist() == [math.inf, -math.inf] and sums[2].isnan().all()
    assert magnitudes[:2, 0].tolist() == [math.inf] * 2 and magnitudes[2].isnan().all()


def test_strided_values_are_summed_in_their_order(backend):
    values = torch.arange(4096.0).reshape(64, 64).t()
    assert torch.equal(block_sums(values, 2), block_sums(values.contiguous(), 2))
