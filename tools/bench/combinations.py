"""Measure what combined protections cost in fault-free training, against the sum of what each costs alone.

    python tools/bench/combinations.py

Prints one JSON line. For each combination, `ratio` is its step time divided by the step time of a run without
protections plus what each of its parts adds to that alone. All runs have the same number of processes and the same
global batch. A round is one run of each kind, in an order that is reversed from round to round, so that a slow machine
slows all down; each figure is the median over the rounds of the median step of a run, beside the least and the most.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import in_ranks
import small_runs

from megatron import patches

WARM_UP = 5


@dataclass(frozen=True)
class Part:
    """A protection alone: the trainer's flags, the options of ``ft run``, and the layout's flags it needs."""

    flags: str = ""
    options: str = ""


REPLICAS = "replicas"
PARTS = {
    "hot-swap": Part("--ft-hot-swap"),
    REPLICAS: Part("", "--ft-hsdp-replicas 2"),
    "DMR": Part("--ft-dmr piggyback"),
    "CheckFree": Part("--ft-hot-swap --ft-checkfree"),
}
COMBINATIONS = {
    "replicas + DMR": (REPLICAS, "DMR"),
    "hot-swap + DMR": ("hot-swap", "DMR"),
    "CheckFree + DMR": ("CheckFree", "DMR"),
    "replicas + hot-swap": (REPLICAS, "hot-swap"),
    "replicas + hot-swap + DMR": (REPLICAS, "hot-swap", "DMR"),
}


def main() -> int:
    options = _options()
    names = options.only or list(COMBINATIONS)
    kinds = _kinds(names)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        patches.apply()
        corpus = small_runs.make_corpus(Path(folder))
        for each in range(options.rounds):
            for name in list(kinds)[:: -1 if each % 2 else 1]:
                run = Path(folder) / f"{len(times[name])}-{list(kinds).index(name)}"
                times[name].append(_step_s(kinds[name], options, corpus, run))
    print(json.dumps({"bench": "combinations", **_sizes(options), **_figures(names, times)}))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=COMBINATIONS, help="combinations to measure (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help=f"steps of a run; the first {WARM_UP} do not count")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2, help="hot-swap inside replicas needs 4")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    return parser.parse_args()


def _sizes(options: argparse.Namespace) -> dict[str, int]:
    return {name: value for name, value in vars(options).items() if isinstance(value, int)}


def _kinds(names: list[str]) -> dict[str, Part]:
    """Return all runs of a round: without protections, each part alone, and the combinations."""
    kinds = {"nothing": Part()}
    for name in names:
        parts = [(PARTS[part].flags, PARTS[part].options) for part in COMBINATIONS[name]]
        kinds |= {part: PARTS[part] for part in COMBINATIONS[name]}
        kinds[name] = Part(*(" ".join(filter(None, each)) for each in zip(*parts, strict=True)))
    return kinds


def _step_s(part: Part, options: argparse.Namespace, corpus: str, folder: Path) -> float:
    """Train once, and return the median duration of a step in seconds."""
    folder.mkdir()
    metrics = folder / "metrics.jsonl"
    base = small_runs.BASE.replace("--hidden-size 32", f"--hidden-size {options.hidden_size}")
    base = base.replace("--seq-length 32", f"--seq-length {options.seq_length}")
    flags = f"{base} --train-iters {options.steps} --data-path {corpus} --use-distributed-optimizer"
    flags += f" --pipeline-model-parallel-size {options.pp} {part.flags}"
    if part.options or "--ft-hot-swap" in part.flags:
        metrics = folder / "run" / ("replica-0" if "replicas" in part.options else ".") / "metrics.jsonl"
        start = in_ranks.protected(options.processes, folder, part.options.split())
    else:
        start = in_ranks.launcher(options.processes)
        flags += f" --metrics-file {metrics}"
    in_ranks.run([*start, "pretrain_gpt.py", *flags.split()], folder)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return statistics.median(line["step_time_s"] for line in lines[WARM_UP:])


def _figures(names: list[str], times: Mapping[str, list[float]]) -> dict:
    steps = {
        name: {"median_ms": 1e3 * statistics.median(each), "least_ms": 1e3 * min(each), "most_ms": 1e3 * max(each)}
        for name, each in times.items()
    }
    ratios = {}
    for name in names:
        rounds = zip(times[name], times["nothing"], *(times[part] for part in COMBINATIONS[name]), strict=True)
        each = [together / (nothing + sum(part - nothing for part in alone)) for together, nothing, *alone in rounds]
        ratios[name] = {"ratio": statistics.median(each), "least": min(each), "most": max(each)}
    return {"step": _rounded(steps, 1), "combinations": _rounded(ratios, 3)}


def _rounded(values: dict[str, dict[str, float]], digits: int) -> dict[str, dict[str, float]]:
    return {name: {key: round(value, digits) for key, value in each.items()} for name, each in values.items()}


if __name__ == "__main__":
    sys.exit(main())
