"""Print the table of faults: the command ``ft faults``, and the page "what happens when X fails".

``python -m ft.faults.page`` writes the page. Its recovery times come from the fault campaign, an experiment that
injects all kinds of faults.
"""

import argparse
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from ft.base import bounded_json
from ft.base.checkout import CHECKOUT
from ft.faults.spec import KEYS_UNDER
from ft.faults.table import DMR, GPU, GROUPS, HARMLESS, MEANING, ROOT, START, FaultRow

SEED = (
    "A seed (--seed N) fixes all random choices: kinds, logical ranks, nodes and bits are the same in every run. "
    "With step= and every=...steps, the steps are the same, too. With time= and every= in time, the times "
    "since the beginning of training are the same, but the steps depend on the speed of the run. The planned faults "
    "are in faults.NODE.json in the run's directory. A fault that is added at the end of the list changes no other "
    "fault."
)

SCENARIO = """\
# a file for --scenario: YAML (.yaml, .yml), TOML (.toml) or JSON; --inject adds faults, --seed overrides its seed
seed: 7
faults:
  - kill@step=20:rank=3                 # as for --inject
  - kind: slow                          # or with one line for each key
    every: exponential(mean=50steps)
    rank: random
    for: 5s
    count: 4
  - {kind: kill, time: 2m, node: n1}
"""


PAGE = "docs/what_happens_when.md"
TIMES = "tools/experiments/results/fault_campaign.json"
_NEEDS = {ROOT: "root", GPU: "a GPU, and none has run it", DMR: "--ft-dmr or --ft-dmr-plan"}
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
    for heading, keys in KEYS_UNDER.items():
        lines.append(f"| | **{heading}** |")
        lines += [f"| `{name}` | {key.says} |" for name, key in keys.items()]
    lines += ["", "### What a seed determines\n", *textwrap.wrap(SEED, 118)]
    return [*lines, "", "### Scenario files\n", "```yaml", *SCENARIO.splitlines(), "```", ""]


def read_times(root: Path) -> dict[str, dict]:
    """Return the times that the fault campaign left in the checkout ``root``; an empty dictionary without them."""
    file = root / TIMES
    return bounded_json.loads(file.read_text()) if file.exists() else {}


def _command(times: Mapping) -> str:
    command = times.get("command")
    if command is None:
        return "which has no results here."
    return f"{times['faults']} faults in {times['runs']} runs of a tiny model on two cores (`{command}`)."


def _line(row: FaultRow, measured: Mapping | None) -> str:
    name = f"`{row.name}`" if row.where != START else row.kind
    fault = f"{name}<br>{row.does}" + (f" (needs {_NEEDS[row.needs]})" if row.needs else "")
    category = row.sign.category if row.sign is not None else "-"
    answer = f"**{row.outcome}**" + (f". {row.answer}" if row.answer else "")
    return f"| {fault} | {row.seen} | {category} | {answer} | {_how_long(row, measured)} |"


def _how_long(row: FaultRow, measured: Mapping | None) -> str:
    if not measured:
        return "-"
    if row.outcome == HARMLESS and measured.get("median_s") is None:
        return "no stop"
    return f"{measured['median_s']:.2g} s (at worst {measured['worst_s']:.2g} s, of {measured['count']})"


def write_page() -> int:
    """Write the page into the repository that contains this file."""
    (CHECKOUT / PAGE).parent.mkdir(exist_ok=True)
    (CHECKOUT / PAGE).write_text(page(read_times(CHECKOUT)))
    return 0


_EPILOG = """examples:
  ft faults                                        the table
  ft faults --markdown > docs/what_happens_when.md
  ft run --inject hang@step=20:rank=3 ...          injects one of them
"""


def add_parser(subparsers) -> None:
    """Add the command ``faults`` to the parser of ``ft``."""
    parser = subparsers.add_parser(
        "faults",
        help="list every kind of fault: how it is injected, how it is classified, and what happens then",
        description="List every kind of fault: how it is injected, how it is classified, and what happens then.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the page 'What happens when X fails' as Markdown"
    )
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> int:
    """Print the table of faults, or with ``--markdown`` the page; return the exit code 0."""
    print(page(read_times(CHECKOUT)) if given.markdown else text(), end="")
    return 0


def text() -> str:
    """Return the table of faults for a terminal."""
    rows = [row for group in GROUPS.values() for row in group]
    name, outcome = (max(map(len, texts)) for texts in ([row.name for row in rows], MEANING))
    lines = []
    for heading, group in GROUPS.items():
        lines.append(f"{heading}")
        for row in group:
            needs = f" [{row.needs}]" if row.needs else ""
            signal = f" (seen as: {row.sign.signal})" if row.sign is not None else ""
            lines.append(f"  {row.name:{name}}  {row.outcome:{outcome}}  {row.does}{signal}{needs}")
    lines.append("")
    lines += [f"{outcome}: {meaning}" for outcome, meaning in MEANING.items()]
    lines += ["", "KIND@KEY=VALUE[:KEY=VALUE...][,...]"]
    for heading, keys in KEYS_UNDER.items():
        lines.append(heading)
        lines += [f"  {name:11}  {key.says}" for name, key in keys.items()]
    lines += ["", *textwrap.wrap(SEED, 118), "", SCENARIO.rstrip()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(write_page())
