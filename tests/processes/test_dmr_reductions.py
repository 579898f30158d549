"""Results of all-reduces: who came to another one than most is told from the others, without a look at clean ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ft.systems.dmr.runtime.collectives import verdicts
from ft.systems.dmr.runtime.findings import DISPUTED, REDUCTION

ROWS = 4


def reduced(wrong: dict) -> dict:
    """All-reduces of a group of everybody; ``wrong``: rank -> results that reached it falsified. In a group of one's
    own there is nothing to compare."""
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
def test_only_who_differs_from_most_notes_a_wrong_result(ranks, world, wrong, noted):
    for rank, found in enumerate(ranks(reduced, world, wrong)):
        (flag, gathers, said), clean = found["said"]
        assert flag and said == noted.get(rank, [])
        assert gathers == 0, "results are gathered only after the flag is up"
        assert clean == (False, 1, []) and found["gathers"] == 1, "and not those of a group that agrees"


digests = some.lists(some.tuples(some.integers(0, 2), some.just(0)), min_size=2, max_size=7)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(some.lists(digests, min_size=1, max_size=3))
def test_never_are_most_members_of_a_group_told_to_be_wrong(rows):
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
