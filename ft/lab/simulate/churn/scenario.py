"""The scenario of ``ft simulate churn``: read from a file and from flags, checked, and converted to simulation inputs.

A scenario describes the training of a pipeline, the failures of its stages, and the recovery strategies to compare.
A scenario file is TOML with the sections and keys of :data:`FIELDS`, and an optional section [published]: for each
strategy, the published hours at each of ``rates``. Times are seconds, or text such as "5m".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft.base.errors import UserError
from ft.base.quantities import between, whole
from ft.lab.simulate import fields
from ft.lab.simulate.churn.failures import Failures, Poisson, read_trace
from ft.lab.simulate.churn.loss import Convergence
from ft.lab.simulate.churn.strategy import CHECKPOINT, ENDS, STRATEGIES, Costs
from ft.lab.simulate.fields import Field, duration, one_of, several

PUBLISHED = "published"
SWAPPED_PART = 0.035
"""Jump of the loss when the first or last stage is rebuilt by copying its neighbour after swap training (CheckFree+),
as a fraction of the jump without swap training. On a small model the jumps were 0.03-0.10 with, and 1.6-2.1 without.
"""


@dataclass(frozen=True)
class Scenario:
    """A validated scenario.

    Attributes:
        costs: durations and costs of the job.
        law: convergence model.
        rates: hourly failure probabilities of a stage to simulate; empty if there is a ``trace``.
        trace: path of a file with recorded failures, or None.
        strategies: strategies to compare, from ``STRATEGIES``.
        seeds: number of runs of each case, one for each seed; 1 with a trace.
        seed: the first seed.
        limit: multiple of the duration without failures after which a run is given up.
        published: (strategy, rate) -> published hours to the target loss.
    """

    costs: Costs
    law: Convergence
    rates: tuple[float, ...]
    trace: str | None
    strategies: tuple[str, ...]
    seeds: int
    seed: int
    limit: float
    published: dict[tuple[str, float], float]

    @property
    def plain_s(self) -> float:
        """Return the duration in seconds of a training without failures, checkpoints and redundancy."""
        return self.law.iterations * self.costs.iteration_s

    def failures(self, rate: float | None) -> Failures:
        """Return the failures at one of ``rates``, or those of the trace if ``rate`` is None.

        Raises:
            UserError: the trace cannot be read.
        """
        if rate is None:
            return read_trace(self.trace, self.costs.stages)
        return Poisson(rate, self.costs.stages, range(self.seed, self.seed + self.seeds))


def probability(value: Any) -> float:
    """Parse a probability such as "5%" or 0.05.

    Raises:
        ValueError: the value is no probability from 0 to 90 %.
    """
    text = str(value).strip()
    try:
        found = float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
    except ValueError:
        found = math.nan
    if isinstance(value, bool) or not 0.0 <= found <= 0.9:
        raise ValueError("not a probability from 0 to 90 %, such as 5% or 0.05")
    return found


FIELDS = {
    "stages": Field("job", whole(2, 10_000), 6, "N", "number of stages that can fail, each with transformer blocks"),
    "iterations": Field("job", whole(1, 10**8), 10_000, "N", "number of iterations to the target loss without "
                                                             "failures"),
    "iteration": Field("job", duration(1e-3), 91.3, "TIME", "duration of one iteration, without checkpoints and "
                                                            "redundancy"),
    "rates": Field("failures", several(probability, "probabilities"), (0.05, 0.10, 0.16), "P,...",
                   "probability that a stage fails within an hour"),
    "trace": Field("failures", str, None, "FILE", "CSV file of recorded failures instead: lines time_s,stage; stages "
                                                  "count from 0"),
    "recovery": Field("failures", duration(0.0), 30.0, "TIME", "time until a new node replaces the node of a lost "
                                                               "stage"),
    "floor": Field("loss", between(0.0, 1e3), 2.138, "L", "limit of the loss for infinitely many iterations"),
    "above": Field("loss", between(1e-6, 1e3), 0.949, "L", "target loss minus the floor"),
    "exponent": Field("loss", between(0.01, 10.0), 0.28, "A", "loss(n) = floor + above (n / iterations)^-A"),
    "evaluate": Field("loss", whole(1, 10**8), 500, "N", "number of iterations between two evaluations of the loss"),
    "made-good": Field("loss", between(1e-3, 1e9), 500.0, "N", "number of iterations in which a jump decays to 1/e"),
    "interval": Field("checkpoint", whole(1, 10**8), 100, "N", "number of iterations between two checkpoints"),
    "save": Field("checkpoint", duration(0.0), 10.0, "TIME", "time for which the run waits for a checkpoint to be "
                                                             "written"),
    "load": Field("checkpoint", duration(0.0), 60.0, "TIME", "time to load a checkpoint, after the recovery"),
    "fallback": Field("checkpoint", whole(0, 10**8), 1000, "N", "number of iterations between checkpoints of the "
                                                                "strategies that need one only when two adjacent "
                                                                "stages are lost at once; 0: that never happens"),
    "redundant-overhead": Field("redundant", between(0.0, 100.0), 0.654, "X", "of an iteration"),
    "redundant-pause": Field("redundant", duration(0.0), 0.0, "TIME", "time until the neighbour takes over a lost "
                                                                      "stage"),
    "jump": Field("checkfree", between(0.0, 1e3), 0.0164, "L", "increase of the loss when a stage is rebuilt from "
                                                               "both neighbours"),
    "ends": Field("checkfree", one_of(ENDS), "copy", "HOW", "what CheckFree does when the first or last stage is "
                                                            "lost: copy (the neighbour), fall (back to the "
                                                            "checkpoint), or safe (these stages never fail)"),
    "ends-jump": Field("checkfree", between(0.0, 1e3), None, "L", "increase of the loss when the first or last stage "
                                                                  "is copied (default: as --jump)"),
    "swapped-jump": Field("checkfree_plus", between(0.0, 1e3), None, "L", "increase of the loss when the first or "
                                                                          "last stage is copied after swap training "
                                                                          "(default: {SWAPPED_PART} of --ends-jump)"),
    "slowdown": Field("checkfree_plus", between(0.0, 100.0), 0.045, "X", "fraction of additional iterations due to "
                                                                         "swap training"),
    "bubbles": Field("checkfree_plus", between(0.0, 0.99), 0.172, "X", "idle fraction of an iteration"),
    "swapped-bubbles": Field("checkfree_plus", between(0.0, 0.99), 0.242, "X", "idle fraction of an iteration with "
                                                                               "swap training"),
    "strategies": Field("run", several(one_of(STRATEGIES), "strategies"), STRATEGIES, "NAME,...", "to compare"),
    "seeds": Field("run", whole(1, 10_000), 200, "N", "number of runs of each case"),
    "seed": Field("run", whole(0), 0, "N", "first seed"),
    "limit": Field("run", between(1.0, 1e4), 20.0, "X", "give a run up after X times its duration without failures"),
}  # fmt: skip
"""Flag name -> field of the scenario file; a "-" in a flag name is a "_" in the file."""

TITLES = {
    "job": "what is trained",
    "failures": "failures of stages",
    "loss": "convergence",
    "checkpoint": "checkpointing",
    "redundant": "redundant computation",
    "checkfree": "CheckFree",
    "checkfree_plus": "CheckFree+",
    "run": "runs",
}


def read(file: str | None, given: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the values of a scenario file and of flags, keyed by the names of :data:`FIELDS`; flags override the file.

    Args:
        file: path of the scenario file, None if there is none.
        given: flag name -> text; None if the flag is not set.

    Raises:
        UserError: the file cannot be read, or a value is invalid.
    """
    in_file = fields.read_file(file, FIELDS, (PUBLISHED,)) if file is not None else {}
    said = fields.read_flags(given, FIELDS)
    if PUBLISHED in in_file:
        # Keyed by rate, because a flag may select other rates than the file.
        in_file[PUBLISHED] = _published(file, in_file[PUBLISHED], in_file.get("rates", FIELDS["rates"].default))
    for one, other in (("rates", "trace"), ("trace", "rates")):
        if one in said and other not in said:
            in_file.pop(other, None)
    return {**in_file, **said}


def _published(file: str, table: Mapping[str, Any], rates: Sequence[float]) -> dict[tuple[str, float], float]:
    found = {}
    for name, hours in table.items():
        key = name.replace("_", "-")
        if key not in STRATEGIES:
            raise UserError(f"{file}: [{PUBLISHED}] has no {name!r}", f"it has: {', '.join(STRATEGIES)}")
        plain = isinstance(hours, list) and all(type(each) in (int, float) and 0 < each < math.inf for each in hours)
        if not plain or len(hours) != len(rates):
            raise UserError(f"{file}: {name} = {hours!r}", f"give {len(rates)} numbers of hours, one for each rate")
        found.update({(key, rate): float(each) for rate, each in zip(rates, hours, strict=True)})
    return found


def scenario(values: Mapping[str, Any]) -> Scenario:
    """Build the scenario from values that are keyed by the names of :data:`FIELDS`.

    Raises:
        UserError: two values contradict each other.
    """
    has = {name: values.get(name, field.default) for name, field in FIELDS.items()}
    traced = has["trace"] is not None
    if traced and "rates" in values:
        raise UserError("both rates and a trace of failures", "give --rates or --trace")
    if traced and "seeds" in values:
        raise UserError("--seeds has no effect with a trace, because nothing in it is random", "leave --seeds out")
    if has["ends"] == CHECKPOINT and not has["fallback"]:
        raise UserError(
            "the first and last stage fall back to a checkpoint, but there are no checkpoints",
            "give --fallback 1 or more",
        )
    if has["evaluate"] > has["iterations"]:
        problem = f"the loss is evaluated every {has['evaluate']} iterations, but there are only {has['iterations']}"
        raise UserError(problem, "give an --evaluate that is no more than --iterations")
    law = Convergence(has["floor"], has["above"], has["exponent"], has["iterations"], has["made-good"], has["evaluate"])
    return Scenario(
        costs=_costs(has),
        law=law,
        rates=() if traced else has["rates"],
        trace=has["trace"],
        strategies=has["strategies"],
        seeds=1 if traced else has["seeds"],
        seed=has["seed"],
        limit=has["limit"],
        published=values.get(PUBLISHED, {}),
    )


def _costs(has: Mapping[str, Any]) -> Costs:
    ends = has["jump"] if has["ends-jump"] is None else has["ends-jump"]
    swapped = SWAPPED_PART * ends if has["swapped-jump"] is None else has["swapped-jump"]
    return Costs(
        stages=has["stages"],
        iteration_s=has["iteration"],
        interval=has["interval"],
        fallback=has["fallback"],
        save_s=has["save"],
        load_s=has["load"],
        recovery_s=has["recovery"],
        redundant_overhead=has["redundant-overhead"],
        redundant_pause_s=has["redundant-pause"],
        jump=has["jump"],
        ends_jump=ends,
        swapped_jump=swapped,
        ends=has["ends"],
        slowdown=has["slowdown"],
        bubbles=has["bubbles"],
        swapped_bubbles=has["swapped-bubbles"],
    )
