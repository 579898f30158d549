"""Generator of the page "what happens when X fails": the table of faults with measured recovery times.

``python -m ft.faults.page`` writes the page. The times come from the fault campaign, an experiment that injects all
kinds of faults.
"""

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from ft.base import bounded_json
from ft.base.checkout import CHECKOUT
from ft.faults import keys
from ft.faults.kinds import DMR, GPU, HARMLESS, MEANING, ROOT, START, Row
from ft.faults.table import GROUPS

PAGE = "docs/what_happens_when.md"
TIMES = "tools/experiments/results/fault_campaign.json"
_NEEDS = {ROOT: "root", GPU: "a GPU", DMR: "--ft-dmr or --ft-dmr-plan"}
_HEAD = """# What happens when X fails

`ft faults --markdown` generates this page from `ft/faults/table.py`, which `ft run --inject` and the tests use, too.
A *worker* is a process that holds a *logical rank*, a *standby* is a worker that holds none, and an *agent* is the
supervisor process of a node. Under `--ft-hot-swap`, two copies of every committed step are in host memory.

## Possible outcomes of a fault

| outcome | what it means |
|---|---|
"""
_TIMES_HEAD = """
The last column is the time from the fault to the beginning of the next step on every worker: median and worst case of
the fault campaign,
{command}
Detection limits are in `ft/job/control/timeouts.py`; only a timeout distinguishes a
worker that hangs from a slow one. An outcome differs from the table only if something else has failed before:
the second copy of a snapshot is lost, no node is left on which a worker can be started, or the same failure has
repeated. Then the run uses the next kind of recovery: an earlier step of which all ranks still have a state, a warm
restart from the newest valid checkpoint, and finally the end of the run with a message. Training never continues with a
state that is not verified.
"""


def page(times: Mapping[str, Mapping]) -> str:
    """Return the page as Markdown.

    Args:
        times: result of the fault campaign: name of a row -> {"count", "median_s", "worst_s"} (times in seconds), and
            "command", "faults" and "runs": the command of the campaign, and how many faults and runs it had.
    """
    lines = [_HEAD + "\n".join(f"| {outcome} | {meaning} |" for outcome, meaning in MEANING.items())]
    lines.append(_TIMES_HEAD.format(command=_command(times)))
    for heading, rows in GROUPS.items():
        lines.append(f"## {heading}\n")
        lines.append("| fault | what the operator sees | classified as | what the system does | how long |")
        lines.append("|---|---|---|---|---|")
        lines += [_line(row, times.get(row.name)) for row in rows]
        lines.append("")
    return "\n".join([*lines, *_injection_syntax()])


def _injection_syntax() -> list[str]:
    """Return the lines about the syntax of ``--inject``, about the seed, and about scenario files."""
    lines = ["## How to inject faults\n", "`--inject KIND@KEY=VALUE[:KEY=VALUE...][,...]` may be repeated.\n"]
    lines += ["| key | what it says |", "|---|---|"]
    for heading, meanings in keys.MEANING.items():
        lines.append(f"| | **{heading}** |")
        lines += [f"| `{key}` | {meaning} |" for key, meaning in meanings.items()]
    lines += ["", "### What a seed determines\n", *textwrap.wrap(keys.SEED, 118)]
    return [*lines, "", "### Scenario files\n", "```yaml", *keys.SCENARIO.splitlines(), "```", ""]


def read_times(root: Path) -> dict[str, dict]:
    """Return the times that the fault campaign left in the checkout ``root``; an empty dictionary without them."""
    file = root / TIMES
    return bounded_json.loads(file.read_text()) if file.exists() else {}


def _command(times: Mapping) -> str:
    command = times.get("command")
    if command is None:
        return "which has no results here."
    return f"{times['faults']} faults in {times['runs']} runs of a tiny model on two cores (`{command}`)."


def _line(row: Row, measured: Mapping | None) -> str:
    name = f"`{row.name}`" if row.where != START else row.kind
    fault = f"{name}<br>{row.does}" + (f" (needs {_NEEDS[row.needs]})" if row.needs else "")
    category = row.sign.category if row.sign is not None else "-"
    answer = f"**{row.outcome}**" + (f". {row.answer}" if row.answer else "")
    return f"| {fault} | {row.seen} | {category} | {answer} | {_how_long(row, measured)} |"


def _how_long(row: Row, measured: Mapping | None) -> str:
    if not measured:
        return "-"
    if row.outcome == HARMLESS and measured.get("median_s") is None:
        return "no stop"
    return f"{measured['median_s']:.2g} s (at worst {measured['worst_s']:.2g} s, of {measured['count']})"


def main() -> int:
    """Write the page into the repository that contains this file."""
    (CHECKOUT / PAGE).parent.mkdir(exist_ok=True)
    (CHECKOUT / PAGE).write_text(page(read_times(CHECKOUT)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
