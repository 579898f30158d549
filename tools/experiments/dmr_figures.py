"""Estimate the eight configurations and the ablation of the SpareTrain paper, beside the figures that it prints.

    python tools/experiments/dmr_figures.py [--calibration idle] [--no-bubbles] [--batch 16,32,64] [--only mistral]

The paper does not print everything that an estimate needs. ``--calibration`` selects one of three readings of it:

idle    transfers are slowed down until stages are idle for the share of time that the paper measured: 68 %, or 77 % for
        mixtures of experts
naive   transfers are slowed down until naive DMR has the overhead that two figures of the paper imply,
        (1 + gain)(1 + overhead) - 1
rates   transfers have the rates of data sheets with assumed efficiencies; nothing is fitted to the paper

One reading of all configurations takes seven minutes on one core.
"""

import argparse
import gc
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from msgspec import structs

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from ft.lab.estimate.cluster import JobSizes  # noqa: E402
from ft.lab.estimate.command import KEYS, EstimateQuestion, cluster_of, estimate, question, shares  # noqa: E402
from ft.show.text import percent, table  # noqa: E402
from ft.systems.dmr.plan.check import problems  # noqa: E402
from ft.systems.dmr.plan.trace import Plan  # noqa: E402

READINGS = ("idle", "naive", "rates")


@dataclass(frozen=True)
class Printed:
    """Figures that the paper (SpareTrain) prints for a configuration, means over batches.

    Attributes:
        overhead: overhead of planned DMR over no DMR.
        gain: speedup over naive DMR.
        gains: speedup over naive DMR with 1, 2 and 3 phases, by batch; where the ablation reports it.
    """

    overhead: float
    gain: float
    gains: tuple[tuple[float, ...], ...] = ()

    @property
    def naive(self) -> float:
        """Return the overhead of naive DMR that the two figures imply."""
        return (1 + self.gain) * (1 + self.overhead) - 1


class Planned(NamedTuple):
    """The plan of a layout, and the share of an iteration without DMR for which a stage is idle on average."""

    layout: JobSizes
    idle: float
    plan: Plan


PAPER = {
    "llama3-70b_80gb": Printed(0.033, 0.32),
    "llama3-70b_94gb": Printed(0.138, 0.31),
    "llama3-70b_141gb": Printed(0.109, 0.33),
    "mistral-large-123b_80gb": Printed(
        0.061, 0.26, ((0.129, 0.108, 0.170), (0.225, 0.225, 0.241), (0.231, 0.261, 0.288))
    ),
    "mistral-large-123b_94gb": Printed(0.110, 0.21),
    "mistral-large-123b_141gb": Printed(0.098, 0.23),
    "llama4-scout_94gb": Printed(0.098, 0.11),
    "llama4-scout_141gb": Printed(0.081, 0.14, ((0.047, 0.083, 0.093), (0.120, 0.099, 0.120), (0.137, 0.120, 0.165))),
}
"""Scenario file -> printed figures. The ablation's batches are 16, 32, 64."""

HEAD = [
    "configuration",
    "PP",
    "slowdown",
    "idle",
    "naive",
    "paper",
    "phase 1",
    "1+2",
    "1+2+3",
    "paper",
    "gain",
    "paper",
    "",
]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", choices=READINGS, default="idle", help="the reading (default: idle)")
    parser.add_argument("--no-bubbles", action="store_true", help="do not use pipeline bubbles, as in the paper")
    parser.add_argument("--batch", default="16,32,64", help="batch sizes, in sequences (default: 16,32,64)")
    parser.add_argument("--only", default="", help="only configurations whose name contains this text")
    given = parser.parse_args(argv)
    # Traces are hundreds of thousands of objects without cycles; the cycle collector would take a fifth of the time.
    gc.disable()
    names = [name for name in PAPER if given.only in name]
    batches = tuple(map(int, given.batch.split(",")))
    found = {name: _estimates([_asked(name, batch, given) for batch in batches]) for name in names}
    print(f"reading: {given.calibration}; bubbles {'unused' if given.no_bubbles else 'used'}; mean of batches ", end="")
    print(f"{given.batch}\n")
    rows = [_row(name, *found[name]) for name in names]
    print(table(HEAD, rows, right=range(1, len(HEAD) - 1)))
    below = sum(_mean(found[name][1], 3) <= PAPER[name].overhead for name in names)
    print(f"\noverhead at or below the paper's: {below} of {len(names)}")
    print("every plan holds: each operator assigned once, windows and memory within what there is, phases monotone")
    for name in names:
        if PAPER[name].gains:
            print(f"\nablation, {name}: throughput over naive DMR\n\n{_ablation(name, found[name][1])}")
    return 0


def _estimates(asked: list[EstimateQuestion]) -> tuple[float, list[Planned]]:
    """Return the slowdown of transfers, which is that of the middle batch for all of them, and the plan of each."""
    by_batch = sorted(asked, key=lambda one: one.layout.batch)
    slowdown = cluster_of(by_batch[len(by_batch) // 2]).slowdown
    return slowdown, [_planned(one, slowdown) for one in asked]


def _asked(name: str, batch: int, given: argparse.Namespace) -> EstimateQuestion:
    words = [str(ROOT / "examples" / "dmr" / f"{name}.toml"), "--batch", str(batch)]
    words += ["--bubbles", "false"] if given.no_bubbles else []
    words += ["--naive-overhead", str(PAPER[name].naive)] if given.calibration == "naive" else []
    parser = argparse.ArgumentParser()
    KEYS.add_flags(parser)
    asked = question(parser.parse_args(words))
    return replace(asked, calibration=None) if given.calibration == "rates" else asked


def _planned(asked: EstimateQuestion, slowdown: float) -> Planned:
    """Return the plan without its trace, which is large, and the idle share without it.

    Raises:
        RuntimeError: the plan is invalid.
    """
    cluster = replace(asked.cluster, slowdown=slowdown)
    plan = estimate(asked, cluster)
    overheads = [phase.overhead for phase in plan.phases]
    wrong = next(problems(plan), None)
    if wrong is not None:
        raise RuntimeError(wrong)
    if sorted(overheads, reverse=True) != overheads:
        raise RuntimeError(f"phases make it worse: {overheads}")
    idle = shares(asked.model, asked.layout, cluster).idle
    return Planned(asked.layout, idle, structs.replace(plan, trace=None, assign={}, segments={}))


def _mean(found: list[Planned], phase: int) -> float:
    return fmean(one.plan.phases[phase].overhead for one in found)


def _row(name: str, slowdown: float, found: list[Planned]) -> list[str]:
    paper = PAPER[name]
    means = [_mean(found, phase) for phase in range(4)]
    gain = fmean(one.plan.predicted.gain for one in found)
    return [
        *(name, str(found[0].layout.pp), f"{slowdown:.2f}", percent(fmean(one.idle for one in found))),
        *(percent(means[0]), percent(paper.naive), *(percent(mean) for mean in means[1:]), percent(paper.overhead)),
        *("+" + percent(gain), "+" + percent(paper.gain), "at or below" if means[3] <= paper.overhead else "ABOVE"),
    ]


def _ablation(name: str, found: list[Planned]) -> str:
    rows = []
    for phase, printed in enumerate(PAPER[name].gains, start=1):
        ours = [percent(one.plan.phases[phase].gain) for one in found]
        by_batch = dict(zip((16, 32, 64), printed, strict=True))
        theirs = [percent(by_batch.get(one.layout.batch)) for one in found]
        rows.append(["1" + "+2" * (phase > 1) + "+3" * (phase > 2), *ours, *theirs])
    batches = [str(one.layout.batch) for one in found]
    return table(["phases", *batches, *(f"paper {batch}" for batch in batches)], rows, right=range(1, 7))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
