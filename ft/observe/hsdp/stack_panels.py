"""Draw the panels of the timeline for a run that uses SPARe: stack depth per step, and which group computed which type.

In SPARe a step's data is divided into N shard types, and each group (here: an FT-HSDP replica) hosts several types, so
that other groups can compute the types of a lost group. The stack of a step is the largest number of types that one
group computes in it. A patch compute is the computation, in the same step, of types that were lost with a group.
"""

import numpy
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator

from ft.observe.hsdp.stacks import depth
from ft.observe.hsdp.story import Story
from ft.show import palette
from ft.show.axes import STYLE, plain

_MOST_LABELS = 24


def draw_depth(axes, story: Story) -> None:
    """Draw the stack depth of every step, and a mark on each step that had patch computes."""
    plain(axes, "Stacks per step, and patch computes")
    numbers = [step.number for step in story.steps]
    axes.step(
        numbers, [step.commit.stack or 1 for step in story.steps], where="mid", color=palette.QUIET, linewidth=1.2
    )
    patched = [step for step in story.steps if step.commit.patch]
    axes.plot(
        [step.number for step in patched],
        [depth(step) for step in patched],
        linestyle="",
        marker="o",
        markersize=5,
        color=palette.FAULT,
    )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    axes.grid(axis="y", color=palette.FAINT, linewidth=0.8)
    axes.set_axisbelow(True)


def draw_owners(axes, story: Story) -> None:
    """Draw a row for each shard type over time, in the colour of the group that computed the type in each step."""
    plain(axes, "Group that computed each shard type")
    steps, types = story.steps, story.record.count
    owners = numpy.full((types, steps[-1].number - steps[0].number + 1), numpy.nan)
    for step in steps:
        owners[: len(step.commit.owners), step.number - steps[0].number] = step.commit.owners
    colours = ListedColormap([(palette.FIRST_WORKER, *palette.LATER_WORKERS)[g % 9] for g in range(types)])
    extent = (steps[0].number - 0.5, steps[-1].number + 0.5, types - 0.5, -0.5)
    axes.imshow(
        owners, aspect="auto", interpolation="nearest", cmap=colours, vmin=-0.5, vmax=types - 0.5, extent=extent
    )
    every = max(1, -(-types // _MOST_LABELS))
    axes.set_yticks(range(0, types, every), [f"type {kind}" for kind in range(0, types, every)])
    axes.set_xlabel("step; the colour is that of the group that owned the type in the first step", **STYLE)
