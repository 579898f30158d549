"""Summarise a run with stacked shard types (SPARe): stacks per step and patch computes."""

import statistics
from collections.abc import Sequence

from ft.observe.hsdp.lineage import Step
from ft.show.text import count


def has_stacks(steps: Sequence[Step]) -> bool:
    """Whether the run trains shard types that are stacked on groups."""
    return any(step.commit.stack is not None for step in steps)


def stacks_told(steps: Sequence[Step]) -> str:
    """Return one line with the mean and largest number of stacks and the number of patch computes."""
    depths = [depth(step) for step in steps]
    patched = [step for step in steps if step.commit.patch]
    types = sum(len(step.commit.patch) for step in patched)
    return (
        f"{statistics.mean(depths):.2f} per step (mean), {max(depths)} at most; "
        f"{count(types, 'patch compute')} in {count(len(patched), 'step')}"
    )


def depth(step: Step) -> int:
    """Return the largest number of shard types that one group computed in the step."""
    owners = step.commit.owners
    return max((owners.count(group) for group in set(owners)), default=1)
