"""Format what DMR found in a run as text for the terminal and as HTML for ``report.html``.

DMR (dual modular redundancy, from the SpareTrain paper) executes each operator twice and compares the results.
"""

from collections.abc import Sequence

from ft.observe.report.corruption import BESIDE, WORDS, Corruption, Mismatch
from ft.show.html import safe
from ft.show.html import table as html_table
from ft.show.text import count, table

_MOST_ROWS, _MOST_LINES = 200, 8
_HEAD = ("step", "where", "operator", "phase", "layer", "microbatch", "compared", "elements", "then")


def summary_of(found: Corruption) -> str:
    """Return one line such as "piggyback: 3 mismatches, 1 attempt redone; operators: 120 at once, ..."."""
    what = [count(len(found.mismatches), "mismatch").replace("mismatchs", "mismatches")]
    what += [f"{count(found.redone, 'attempt')} redone"] if found.redone else []
    if found.evicted:
        what.append(f"{'ranks' if len(found.evicted) > 1 else 'rank'} {', '.join(map(str, found.evicted))} evicted")
    what += ["given up"] if found.gave_up else []
    what += [_fall(fall) for fall in found.falls]
    operators = f"; operators: {coverage(found)}" if found.covered else ""
    return f"{found.strategy or 'no coverage recorded'}: {', '.join(what)}{operators}"


def _fall(fall: tuple[int, float, float]) -> str:
    step, before, now = fall
    return f"coverage fell from {before:.2%} to {now:.2%} in step {step}"


def coverage(found: Corruption) -> str:
    """Return how many operators were verified when: "120 at once, 80 with the recomputation".

    A set of the verification plan without a display name is shown by its own name.
    """
    words = {**WORDS, **BESIDE}
    return ", ".join(f"{number} {words.get(name, name)}" for name, number in found.covered.items())


def text_table(found: Corruption) -> str:
    """Return a table of the first mismatches, or "" where there are none."""
    if not found.mismatches:
        return ""
    shown = found.mismatches[:_MOST_LINES]
    left = len(found.mismatches) - len(shown)
    lines = table(_HEAD, [_row(one) for one in shown], right=(5,))
    return lines + (f"\nand {left} more, in report.html" if left else "")


def panel(found: Corruption) -> str:
    """Return HTML that says how operators were verified and lists the mismatches (the first 200 of them)."""
    of = count(found.ranks, "rank")
    summary = f"{safe(found.strategy)}; operators of a step, {of} together: {safe(coverage(found))}."
    lines = [f"<p>{summary if found.covered else 'How operators were verified is not on record.'}</p>"]
    lines += [f"<p>The {_fall(fall)}.</p>" for fall in found.falls]
    if not found.mismatches:
        return "".join([*lines, "<p>Both executions of every operator gave the same result.</p>"])
    shown = found.mismatches[:_MOST_ROWS]
    left = len(found.mismatches) - len(shown)
    lines.append(f'<div class="wide">{html_table(_HEAD, [_row(one) for one in shown])}</div>')
    lines += [f"<p>{left} more mismatches are in events.jsonl.</p>"] if left else []
    return "".join(lines)


def card(found: Corruption) -> tuple[str, str, str]:
    """Return the number of mismatches for the head of the report, as (name, value, note)."""
    steps = count(len(found.steps), "step")
    note = f"in {steps}, {found.clean} of them clean in the end" if found.mismatches else str(found.strategy or "")
    return "mismatches (DMR)", str(len(found.mismatches)), note


def _row(one: Mismatch) -> Sequence[str]:
    return (
        one.attempt,
        one.where,
        one.said("operator"),
        one.said("phase"),
        one.layer,
        one.said("microbatch"),
        one.said("how"),
        one.elements,
        one.follows,
    )
