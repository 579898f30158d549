"""Summarise an FT-HSDP run that uses SPARe: how many data shards each group computed per step, and how many patches.

When a group is lost during a step, surviving groups compute those of its types that none of them has computed, in the
same step; this is a patch compute. A wipe-out is a step in which no host of some type was present, so that other groups
computed the type.
"""

import statistics
from collections import Counter
from collections.abc import Sequence

from ft.observe.report.lineage import Step
from ft.show.text import count, percent, seconds


def has_stacks(steps: Sequence[Step]) -> bool:
    """Return whether the run uses SPARe, that is, whether any commit records a stack."""
    return any(step.commit.stack is not None for step in steps)


def stacks_line(steps: Sequence[Step]) -> str:
    """Return one line of text: the mean and the largest stack of the steps, and the number of patch computes."""
    depths = [depth(step) for step in steps]
    patched = [step for step in steps if step.commit.patch]
    types, covered = (sum(len(getattr(step.commit, name)) for step in steps) for name in ("patch", "covered"))
    return (
        f"{statistics.mean(depths):.2f} per step (mean), {max(depths)} at most; "
        f"{count(types, 'patch compute')} in {count(len(patched), 'step')}, "
        f"{count(covered, 'lost shard')} had been computed by another group"
    )


def wipe_outs_line(steps: Sequence[Step]) -> str:
    """Return one line of text: the steps with types that had no host, and what these have cost; "" without any.

    The cost of a step is the share of its time that the group with the most types has spent on such types.
    """
    wiped = [step for step in steps if step.commit.adopted]
    if not wiped:
        return ""
    shards = sum(len(step.commit.adopted) for step in wiped)
    spent_s = sum(step.commit.step_s * (1 - depth(step, adopted=False) / depth(step)) for step in wiped)
    share = spent_s / sum(step.commit.step_s for step in wiped) if spent_s else 0.0
    return (
        f"in {count(len(wiped), 'step')} no host of a shard type was left: others computed {count(shards, 'shard')}, "
        f"which took {seconds(spent_s)} ({percent(share)} of these steps); no sample was lost"
    )


def depth(step: Step, adopted: bool = True) -> int:
    """Return the largest number of shard types that one group computed in the step: its stack and its patch computes.

    Args:
        adopted: whether to count types that had no host.
    """
    commit = step.commit
    extra = Counter(
        group
        for kind, group in enumerate(commit.owners)
        if kind in commit.patch and (adopted or kind not in commit.adopted)
    )
    return max(extra.values(), default=0) + (commit.stack or 1)
