"""Format the outcome of ``ft dmr selftest`` as text or JSON values."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ft.lab.reproducibility.cases import Case
from ft.lab.reproducibility.probe import NOT_TRIED, REFUSED, STABLE, UNSTABLE, Finding
from ft.show.text import count, table
from ft.systems.dmr.unstable import Unstable

_MEANING = {
    STABLE: "reproducible",
    UNSTABLE: "not either",
    REFUSED: "torch has no other kernel",
    NOT_TRIED: "try --deterministic",
}
_HEAD = ("operator", "dtypes", "largest", "differed", "elements", "with --deterministic-mode")


@dataclass(frozen=True)
class Outcome:
    """The result of a self-test.

    Attributes:
        deterministic: whether torch's deterministic algorithms were enabled.
    """

    device: str
    threads: int
    torch: str
    deterministic: bool
    cases: Sequence[Case]
    findings: Sequence[Finding]

    @property
    def unstable(self) -> list[Finding]:
        """Return the findings of unstable operators, ordered by operator."""
        return sorted((one for one in self.findings if not one.is_stable), key=lambda one: one.kind)

    def names(self) -> Unstable:
        """Return the list of unstable operators that a run with DMR reads."""
        operators = dict.fromkeys(one.kind.operator for one in self.unstable)
        return Unstable(tuple(operators), self.torch, self.device)


def as_text(outcome: Outcome) -> str:
    """Return a table of the unstable operators, with advice."""
    operators = {one.kind.operator for one in outcome.findings}
    runs = sum(one.runs for one in outcome.findings)
    where = f"{outcome.device}, {count(outcome.threads, 'thread')}, torch {outcome.torch}"
    mode = ", deterministic mode" if outcome.deterministic else ""
    watched = f"{count(len(operators), 'operator')} of {count(len(outcome.cases), 'model')} in training"
    lines = [
        f"{where}{mode}",
        f"{watched}, {count(len(outcome.findings), 'kind')} of calls, executed {runs} times again",
    ]
    if not outcome.unstable:
        return "\n".join([*lines, "all results were equal each time, bit for bit"])
    rows = [_row(one, deterministic=outcome.deterministic) for one in outcome.unstable]
    return "\n".join([*lines, "", table(_HEAD, rows, right=(2, 3, 4)), "", *_advice(outcome)])


def as_values(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as JSON values."""
    return {
        "device": outcome.device,
        "threads": outcome.threads,
        "torch": outcome.torch,
        "deterministic_mode": outcome.deterministic,
        "cases": [asdict(case) for case in outcome.cases],
        "unstable": [_values(one) for one in outcome.unstable],
        "stable": sorted({one.kind.operator for one in outcome.findings} - set(outcome.names().operators)),
    }


def _row(one: Finding, *, deterministic: bool) -> tuple[str, ...]:
    largest = max(one.shapes, key=_elements, default=())
    instead = "that is on" if deterministic else _MEANING[one.deterministic or NOT_TRIED]
    return (
        one.kind.operator,
        ", ".join(one.kind.dtypes) or "-",
        " x ".join(map(str, largest)) or "-",
        f"{one.differing} of {one.runs}",
        f"{one.elements} of {one.output_elements}",
        instead,
    )


def _elements(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _advice(outcome: Outcome) -> list[str]:
    worst: dict[str, set[str]] = {}
    for one in outcome.unstable:
        worst.setdefault(one.kind.operator, set()).add(one.deterministic or NOT_TRIED)
    helped = Counter(kinds == {STABLE} for kinds in worst.values())[True]
    lines = []
    if helped and not outcome.deterministic:
        lines.append(
            f"train with --deterministic-mode: {helped} of {count(len(worst), 'operator')} become reproducible"
        )
    if helped < len(worst):
        lines.append(
            "or exclude them from DMR: give --out unstable.json here, and --ft-dmr-unstable unstable.json to the "
            "trainer"
        )
    return lines


def _values(one: Finding) -> dict[str, Any]:
    return {
        "operator": one.kind.operator,
        "dtypes": list(one.kind.dtypes),
        "shapes": [list(shape) for shape in one.shapes],
        "case": one.case,
        "calls": one.calls,
        "runs": one.runs,
        "differing_runs": one.differing,
        "elements": one.elements,
        "of": one.output_elements,
        "deterministic_algorithms": one.deterministic,
    }
