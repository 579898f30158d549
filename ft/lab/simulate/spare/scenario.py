"""The scenario of the SPARe simulation: read from a file and from flags, checked, and converted to simulation inputs.

A scenario describes the job, its failures, the costs of recovery, and the fault-tolerance schemes to compare. A group
is one data-parallel rank, which fails as a whole; the redundancy is the number of groups that hold each data shard. In
a stack, every group computes one of its data shards; with SPARe, a step consists of one or more stacks.

A scenario file is TOML with the sections and keys of :data:`FIELDS`; times are seconds, or text such as "5m".
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft.base import quantities
from ft.base.errors import UserError
from ft.base.quantities import between, whole
from ft.lab.simulate import fields
from ft.lab.simulate.fields import Field, duration, one_of, several
from ft.lab.simulate.spare.clocks import Law, Weibull, read_trace
from ft.lab.simulate.spare.restart import SEMANTICS
from ft.lab.simulate.spare.run import JITTERED, Job

SCHEMES = ("spare", "replication", "checkpoint")
"""Fault-tolerance schemes: SPARe, replication, and checkpoints alone."""
LAWS = ("weibull", "exponential", "trace", "none")
"""Distributions of the time between failures: two random ones, recorded failures, and no failures."""


@dataclass(frozen=True)
class Scenario:
    """A validated scenario.

    Attributes:
        job: the simulated job.
        mtbf_s: mean time between two failures of any of the groups, in seconds; infinite: no failures.
        law: distribution of the failures, one of :data:`LAWS`.
        shape: shape of the Weibull distribution.
        trace: path of a file with recorded failures, or None.
        schemes: schemes to compare, from :data:`SCHEMES`.
        redundancy: redundancies of SPARe to simulate; empty: the optimum by SPARe, formula (8).
        degree: replication degrees to simulate; empty: the optimum by SPARe, formula (8).
        seeds: number of runs of each case, one for each seed.
        seed: the first seed.
    """

    job: Job
    mtbf_s: float
    law: str
    shape: float
    trace: str | None
    schemes: tuple[str, ...]
    redundancy: tuple[int, ...]
    degree: tuple[int, ...]
    seeds: int
    seed: int

    def failures(self) -> Law:
        """Return the distribution of the failures of one group.

        Raises:
            UserError: the trace cannot be read.
        """
        if self.trace is not None:
            return read_trace(self.trace, self.job.groups)
        return Weibull(self.mtbf_s * self.job.groups, self.shape)


def numbers(value: Any) -> tuple[int, ...]:
    """Parse "9", "2..12" or "2..4,8", or a list of numbers.

    Raises:
        ValueError: the value is none of these, or a range is empty.
    """
    try:
        found = quantities.several(",".join(map(str, value)) if isinstance(value, list) else str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from error
    return tuple(dict.fromkeys(found))


FIELDS = {
    "groups": Field("job", whole(2, 20_000), None, "N", "number of groups, which is also the number of shard types"),
    "steps": Field("job", whole(1, 10_000_000), 10_000, "N", "number of training steps"),
    "stack": Field("job", duration(1e-3), 64.0, "TIME", "time in which every group computes one data shard"),
    "all-reduce": Field("job", duration(0.0), None, "TIME", "duration of an all-reduce between the groups (default: "
                                                            "N / 100 seconds, as of a ring)"),
    "mtbf": Field("failures", duration(1e-3), None, "TIME", "mean time between two failures of any of the groups"),
    "law": Field("failures", one_of(LAWS), "weibull", "LAW", "distribution of each group's failures: "
                                                             f"{', '.join(LAWS)}"),
    "shape": Field("failures", between(0.2, 20.0), 0.78, "K", "shape of the Weibull distribution"),
    "trace": Field("failures", str, None, "FILE", "file of recorded failures with lines: seconds group; for --law "
                                                  "trace"),
    "clocks": Field("failures", one_of(tuple(SEMANTICS)), "extend", "HOW", "failures during a restart: extend (a "
                                                                           "group that fails while it restarts does "
                                                                           "so again), replace (groups that fail are "
                                                                           "replaced at the end) or ignore (no group "
                                                                           "fails)"),
    "restart": Field("costs", duration(0.0), 3600.0, "TIME", "duration of a global restart"),
    "save": Field("costs", duration(1e-3), 60.0, "TIME", "duration of a checkpoint"),
    "shrink": Field("costs", duration(0.0), 0.1, "TIME", "time to shrink the communicator after a loss"),
    "controller": Field("costs", duration(0.0), 0.1, "TIME", "time of SPARe's controller after a loss"),
    "jitter": Field("costs", between(0.0, 0.3), 0.05, "SIGMA", "multiply the duration of each event by a factor "
                                                               "drawn from N(1, SIGMA^2)"),
    "jitter-per": Field("costs", one_of(JITTERED), "stack", "WHAT", "draw one factor for each stack that a group "
                                                                    "computes, or for all stacks of a step: stack or "
                                                                    "step"),
    "scheme": Field("schemes", several(one_of(SCHEMES), "schemes"), ("spare",), "NAME,...", "schemes to compare, from: "
                                                                                          f"{', '.join(SCHEMES)}"),
    "redundancy": Field("schemes", numbers, None, "R[..R2]", "redundancies of SPARe (default: the optimum by formula 8 "
                                                             "of the SPARe paper)"),
    "degree": Field("schemes", numbers, None, "R[..R2]", "degrees of replication (default: as --redundancy)"),
    "seeds": Field("run", whole(1, 10_000), 5, "N", "number of runs of each case"),
    "seed": Field("run", whole(0), 0, "N", "first seed"),
    "limit": Field("run", between(1.0, 1e6), 50.0, "X", "give a run up after X times its duration without failures"),
}  # fmt: skip
"""Flag name -> field of the scenario file; a "-" in a flag name is a "_" in the file."""


def read_file(path: str | Path) -> dict[str, Any]:
    """Return the values of a scenario file, keyed by the names of :data:`FIELDS`.

    The path of a trace of failures is relative to the directory of the file.

    Raises:
        UserError: the file cannot be read, is not TOML, has an unknown section or key, or has an invalid value.
    """
    return fields.read_file(path, FIELDS)


def read_flags(given: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the parsed values of the flags that are not None, keyed by the names of :data:`FIELDS`.

    Raises:
        UserError: a value is invalid.
    """
    return fields.read_flags(given, FIELDS)


def scenario(values: Mapping[str, Any]) -> Scenario:
    """Build the scenario from values that are keyed by the names of :data:`FIELDS`.

    Raises:
        UserError: a value is missing, or two values contradict each other.
    """
    has = {name: values.get(name, field.default) for name, field in FIELDS.items()}
    if has["groups"] is None:
        raise UserError("the number of groups is missing", "give --groups, or groups in [job] of a scenario file")
    reduce_s = has["groups"] / 100 if has["all-reduce"] is None else has["all-reduce"]
    costs = {f"{name}_s": has[name] for name in ("restart", "save", "shrink", "controller")}
    spread = {"jitter": has["jitter"], "jitter_per": has["jitter-per"]}
    job = Job(has["groups"], has["steps"], has["stack"], reduce_s, **costs, **spread)
    job = replace(job, restart=has["clocks"], limit=has["limit"])
    mtbf, shape = _mtbf(has, "shape" in values)
    found = Scenario(
        job=job,
        mtbf_s=mtbf,
        law=has["law"],
        shape=shape,
        trace=has["trace"],
        schemes=has["scheme"],
        redundancy=has["redundancy"] or (),
        degree=has["degree"] or has["redundancy"] or (),
        seeds=has["seeds"],
        seed=has["seed"],
    )
    _check(found)
    return found


def _mtbf(has: Mapping[str, Any], shaped: bool) -> tuple[float, float]:
    law, mtbf = has["law"], has["mtbf"]
    if (law == "trace") != (has["trace"] is not None):
        raise UserError("--trace and --law trace need each other", "give --law trace and --trace FILE")
    if shaped and law != "weibull":
        raise UserError(f"the {law} law has no shape", "remove shape, or choose --law weibull")
    if law == "none":
        if mtbf is not None:
            raise UserError(
                "mtbf is given, but the law says that there are no failures", "remove mtbf, or choose another law"
            )
        return math.inf, 1.0
    if mtbf is None:
        reason = ", which the checkpoint period follows from" if law == "trace" else ""
        raise UserError(f"the mean time between two failures is missing{reason}", "give --mtbf, such as 5m")
    return mtbf, has["shape"] if law == "weibull" else 1.0


def _check(asked: Scenario) -> None:
    job = asked.job
    for least, name, given in ((2, "redundancy", asked.redundancy), (1, "degree", asked.degree)):
        if wrong := [each for each in given if not least <= each <= job.groups]:
            raise UserError(f"{name} {wrong[0]} with {job.groups} groups", f"give {least} to {job.groups}")
