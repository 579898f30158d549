"""Draw ``timeline.png`` of an FT-HSDP run: states of the replicas, duration of each step with incidents, and the loss.

A replica is a full copy of the model with its own workers. An incident is a failure or a rejoin of replicas, or a full
restart.
"""

from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ft.observe.hsdp.colours import INCIDENT, STATE
from ft.observe.hsdp.lanes import STATES
from ft.observe.hsdp.stack_panels import draw_depth, draw_owners
from ft.observe.hsdp.stacks import has_stacks
from ft.observe.hsdp.stalls import FAILURE
from ft.observe.hsdp.story import Story
from ft.show import palette
from ft.show.axes import STYLE, as_png, empty, legend, plain, rows
from ft.show.text import count, percent, shortened

_MOST_LABELS = 24
_LEAST_WIDTH = 1 / 600  # share of the whole width: shorter lanes are drawn that wide to stay visible


def draw(story: Story) -> bytes:
    """Return the picture as PNG."""
    height = max(1.3, min(4.5, 0.42 * story.record.count + 0.5))
    panels = [(height, _draw_lanes), (1.7, _draw_steps), (2.3, _draw_loss)]
    if has_stacks(story.steps):
        panels[2:2] = [(1.2, draw_depth), (height, draw_owners)]
    figure, every = rows(_title(story), [inches for inches, _ in panels])
    for axes, (_, draw_panel) in zip(every, panels, strict=True):
        draw_panel(axes, story)
    return as_png(figure)


def _title(story: Story) -> str:
    name = shortened(story.record.folder.resolve().name, 40)
    verdict = "each sample trained once" if story.audit.is_clean else "AUDIT NOT CLEAN"
    failures = count(len(story.of_kind(FAILURE)), "failure")
    return f"{name}   {failures}, effective {percent(story.effective.measured)}, {verdict}   {story.record.state}"


def _draw_lanes(axes, story: Story) -> None:
    plain(axes, "Replicas")
    if not story.lanes:
        empty(axes, "the run has recorded nothing yet")
        return
    end = max(lane.end for lane in story.lanes)
    for lane in sorted(story.lanes, key=lambda lane: lane.state != STATES[0]):
        width = max(lane.end - lane.begin, end * _LEAST_WIDTH)
        axes.barh(lane.replica, width, left=lane.begin, height=0.7, color=STATE[lane.state], zorder=2)
    every = max(1, -(-story.record.count // _MOST_LABELS))
    places = range(0, story.record.count, every)
    axes.set_yticks(places, [f"replica {replica}" for replica in places])
    axes.set_ylim(story.record.count - 0.4, -0.6)
    axes.set_xlim(0, end)
    axes.set_xlabel("seconds since the run began", **STYLE)
    shown = {lane.state for lane in story.lanes}
    legend(axes, [Patch(color=STATE[state], label=state) for state in STATES if state in shown])


def _draw_steps(axes, story: Story) -> None:
    """Draw the duration of every step, with the steps of incidents in colour."""
    plain(axes, "Time of steps")
    if not story.steps:
        empty(axes, "the run has recorded no step")
        return
    times = [step.when - story.zero for step in story.steps]
    axes.step(times, story.pace.took, where="pre", color=palette.QUIET, linewidth=0.9, zorder=2)
    at = {step.number: index for index, step in enumerate(story.steps)}
    for kind, colour in INCIDENT.items():
        inside = sorted({i for one in story.of_kind(kind) for i in range(at[one.first], at[one.last] + 1)})
        took = [story.pace.took[index] for index in inside]
        begins = [times[index] - story.pace.took[index] for index in inside]
        axes.bar(begins, took, width=took, align="edge", color=colour, alpha=0.75, zorder=3)
    axes.set_xlim(0, max(times[-1], max((lane.end for lane in story.lanes), default=0.0)))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds", **STYLE)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="y", color=palette.FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    kinds = dict.fromkeys(one.kind for one in story.incidents)
    if kinds:
        legend(axes, [Patch(color=INCIDENT[kind], label=f"step of a {kind}") for kind in kinds])


def _draw_loss(axes, story: Story) -> None:
    plain(axes, "Loss")
    if not story.losses.points:
        empty(axes, "the run has recorded no losses")
        return
    amounts, losses = zip(*story.losses.points, strict=True)
    axes.plot(amounts, losses, color=palette.LOSS, linewidth=1.5, marker="." if len(amounts) < 3 else None)
    for one in story.incidents:
        if one.kind == FAILURE and one.first in story.losses.at:
            at = story.losses.at[one.first]
            axes.axvline(at, color=palette.FAULT, linewidth=1.0, linestyle=(0, (4, 2)), alpha=0.7, zorder=1)
    axes.set_xlabel(story.losses.over, **STYLE)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y", color=palette.FAINT, linewidth=0.8)
    axes.margins(x=0.01)
