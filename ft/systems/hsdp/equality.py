"""Comparison of the replicas of a step: have all computed with equal models, and received equal sums of gradients?

Each member of the step's quorum fills in one row of a table of zeros, and the all-reduce of the tables gives every
member the whole table. A row is a list of whole numbers below 2**15 in fp32, so their sums are exact.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_WORDS = 8
"""Number of 16-bit words of a 128-bit digest."""


@dataclass(frozen=True)
class Comparison:
    """What the table says.

    Attributes:
        problem: why no member may commit the step; "" if all members are equal.
        is_stale: whether this member's model must be replaced by that of other members.
    """

    problem: str = ""
    is_stale: bool = False


def table(count: int, place: int, model: torch.Tensor | None, sums: torch.Tensor) -> torch.Tensor:
    """Return the table with the row of one member, as fp32 [count, 17].

    Args:
        count: number of members.
        place: index of the member.
        model: digest of the model with which it has computed its gradients, int64 [2]; None: it has computed none.
        sums: digest of the sums that it has received, int64 [2].
    """
    rows = torch.zeros((count, 1 + 2 * _WORDS), dtype=torch.float32, device="cpu")
    if model is not None:
        rows[place, 0] = 1.0
        rows[place, 1 : 1 + _WORDS] = _words(model)
    rows[place, 1 + _WORDS :] = _words(sums)
    return rows


def compare(rows: torch.Tensor, place: int) -> Comparison:
    """Compare all members. Every member gets the same ``problem``.

    Members whose model differs from that of the majority are stale. Without a majority, all are.

    Args:
        rows: the sum of the members' tables.
        place: index of this member.
    """
    models = [tuple(row[1 : 1 + _WORDS]) if row[0] else None for row in rows.tolist()]
    computed = [model for model in models if model is not None]
    if len(set(computed)) > 1:
        (most, count), *_ = Counter(computed).most_common(1)
        is_majority = 2 * count > len(computed)
        wrong = [at for at, model in enumerate(models) if model is not None and not (is_majority and model == most)]
        what = "differs from that of the majority" if is_majority else "differs, and no majority has equal ones"
        return Comparison(f"the model of members {_listed(wrong)} {what}", place in wrong)
    sums = [tuple(row[1 + _WORDS :]) for row in rows.tolist()]
    if len(set(sums)) > 1:
        return Comparison("the members have received different sums of the gradients")
    return Comparison()


def _words(digest: torch.Tensor) -> torch.Tensor:
    return digest.detach().cpu().contiguous().view(torch.int16).to(torch.float32)


def _listed(members: Sequence[int]) -> str:
    return ", ".join(map(str, members))
