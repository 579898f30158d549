"""Summarise an FT-HSDP run that uses SPARe: how many data shards each group computed per step, and how many patches.

In SPARe a shard type is one of the N parts of a step's data, and each group (here: an FT-HSDP replica) hosts several
types. The stack of a step is the largest number of types that one group computes in it. When a group is lost during a
step, surviving groups compute its missing types in the same step; this is a patch compute. ``ft.observe.hsdp.text``
prints the summary.
"""

import statistics
from collections.abc import Sequence

from ft.observe.hsdp.lineage import Step
from ft.show.text import count


def has_stacks(steps: Sequence[Step]) -> bool:
    """Return whether the run uses SPARe, that is, whether any commit records a stack."""
    return any(step.commit.stack is not None for step in steps)


def stacks_line(steps: Sequence[Step]) -> str:
    """Return one line of text: the mean and the largest stack of the steps, and the number of patch computes."""
    depths = [depth(step) for step in steps]
    patched = [step for step in steps if step.commit.patch]
    types = sum(len(step.commit.patch) for step in patched)
    return (
        f"{statistics.mean(depths):.2f} per step (mean), {max(depths)} at most; "
        f"{count(types, 'patch compute')} in {count(len(patched), 'step')}"
    )


def depth(step: Step) -> int:
    """Return the stack of the step: the largest number of shard types that one group computed in it."""
    owners = step.commit.owners
    return max((owners.count(group) for group in set(owners)), default=1)
