"""What is simulated: read from a file and from flags, checked, and turned into the pieces of a run.

A scenario file is TOML with the sections and keys of :data:`FIELDS`; times are seconds, or text such as "5m".
"""

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft.errors import UserError
from ft.inject.distributions import parse_duration
from ft.simulate.spare.clocks import Law, Weibull, read_trace
from ft.simulate.spare.restart import SEMANTICS
from ft.simulate.spare.run import JITTERED, Job

SCHEMES = ("spare", "replication", "checkpoint")
LAWS = ("weibull", "exponential", "trace", "none")


@dataclass(frozen=True)
class Field:
    """A key of the scenario file, and the flag of the same name.

    Attributes:
        section: of the file. read: text or number -> value, ValueError where it is none. default: None: there is none.
        metavar, help: for the flag.
    """

    section: str
    read: Callable[[Any], Any]
    default: Any
    metavar: str
    help: str

    @property
    def about(self) -> str:
        """``help`` with the default."""
        shown = ",".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        return self.help if self.default is None else f"{self.help} (default: {shown})"


@dataclass(frozen=True)
class Scenario:
    """A question that makes sense.

    Attributes:
        job: what is trained. mtbf_s: mean time between two group failures of the whole system, infinite: none.
        law: one of :data:`LAWS`. shape: of the Weibull distribution. trace: file of failures.
        schemes: of :data:`SCHEMES`. redundancy: of SPARe, several at a time; empty: formula (8).
        degree: of replication; empty: as ``redundancy``. seeds: so many runs, from ``seed`` on.
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
        """Of one group; raises UserError where a trace cannot be read."""
        if self.trace is not None:
            return read_trace(self.trace, self.job.groups)
        return Weibull(self.mtbf_s * self.job.groups, self.shape)


def _whole(least: int, most: int = 10**9) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        text = str(value).strip().replace(",", "")
        if isinstance(value, bool) or not text.lstrip("-").isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"no whole number from {least} to {most}")
        return int(text)

    return read


def _number(least: float, most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not least <= number <= most:
            raise ValueError(f"no number from {least:g} to {most:g}")
        return number

    return read


def _time(least: float) -> Callable[[Any], float]:
    return lambda value: parse_duration(value, least)


def _one_of(names: tuple[str, ...]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"none of {', '.join(names)}")
        return value

    return read


def _schemes(value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise ValueError("no list of schemes")
    return tuple(dict.fromkeys(_one_of(SCHEMES)(name.strip() if isinstance(name, str) else name) for name in names))


def numbers(value: Any) -> tuple[int, ...]:
    """Reads "9", "2..12" or "2..4,8", or a list of numbers.

    Raises:
        ValueError: it is none of these, or a range holds nothing.
    """
    found = []
    for part in (",".join(map(str, value)) if isinstance(value, list) else str(value)).split(","):
        first, dots, last = part.partition("..")
        if not first.strip().isdecimal() or (dots and not last.strip().isdecimal()):
            raise ValueError("no number, and no range such as 2..12")
        span = range(int(first), int(last if dots else first) + 1)
        if not span:
            raise ValueError(f"the range {part.strip()} holds nothing")
        if len(span) > 1000:
            raise ValueError("more than 1000 numbers")
        found.extend(span)
    return tuple(dict.fromkeys(found))


FIELDS = {
    "groups": Field("job", _whole(2, 20_000), None, "N", "groups"),
    "steps": Field("job", _whole(1, 10_000_000), 10_000, "N", "steps of the training"),
    "stack": Field("job", _time(1e-3), 64.0, "TIME", "compute of one stack"),
    "all-reduce": Field("job", _time(0.0), None, "TIME", "between the groups (default: N / 100 seconds, a ring)"),
    "mtbf": Field("failures", _time(1e-3), None, "TIME", "between two group failures anywhere"),
    "law": Field("failures", _one_of(LAWS), "weibull", "LAW", f"of each group's failures: {', '.join(LAWS)}"),
    "shape": Field("failures", _number(0.2, 20.0), 0.78, "K", "of the Weibull law"),
    "trace": Field("failures", str, None, "FILE", "lines of: seconds group; with --law trace"),
    "clocks": Field("failures", _one_of(tuple(SEMANTICS)), "extend", "HOW", "failure clocks in a restart: "
                    "extend (they run on), replace (who fails is replaced at the end) or ignore (they stand still)"),
    "restart": Field("costs", _time(0.0), 3600.0, "TIME", "of a global restart"),
    "save": Field("costs", _time(1e-3), 60.0, "TIME", "of a checkpoint"),
    "shrink": Field("costs", _time(0.0), 0.1, "TIME", "of the communicator, after a loss"),
    "controller": Field("costs", _time(0.0), 0.1, "TIME", "of SPARe's controller, after a loss"),
    "jitter": Field("costs", _number(0.0, 0.3), 0.05, "SIGMA", "each event lasts N(1, SIGMA^2) times as long"),
    "jitter-per": Field("costs", _one_of(JITTERED), "stack", "WHAT", "one draw for each stack that a group computes, "
                        "or for its whole compute of a step: stack or step"),
    "scheme": Field("schemes", _schemes, ("spare",), "NAME,...", f"of {', '.join(SCHEMES)}"),
    "redundancy": Field("schemes", numbers, None, "R[..R2]", "of SPARe (default: formula 8)"),
    "degree": Field("schemes", numbers, None, "R[..R2]", "of replication (default: as --redundancy)"),
    "seeds": Field("run", _whole(1, 10_000), 5, "N", "runs of each case"),
    "seed": Field("run", _whole(0), 0, "N", "the first of the seeds"),
    "limit": Field("run", _number(1.0, 1e6), 50.0, "X", "give a run up after X times what it takes without failures"),
}  # fmt: skip
"""By name, as in flags; "-" is "_" in files."""


def read_file(path: str | Path) -> dict[str, Any]:
    """The values of a scenario file by the names of :data:`FIELDS`; a trace is looked for beside the file.

    Raises:
        UserError: it cannot be read, is no TOML, or holds a section or key that there is not.
    """
    try:
        text = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"the scenario {path} cannot be read: {error}", "see examples/ for scenario files") from error
    sections: dict[str, list[str]] = {}
    for name, field in FIELDS.items():
        sections.setdefault(field.section, []).append(name.replace("-", "_"))
    values = {}
    for section, entries in text.items():
        if section not in sections or not isinstance(entries, dict):
            there = ", ".join(f"[{name}]" for name in sections)
            raise UserError(f"{path}: {section!r} is no section of a scenario", f"there are: {there}")
        for key, value in entries.items():
            if key not in sections[section]:
                raise UserError(f"{path}: [{section}] has no {key!r}", f"it has: {', '.join(sections[section])}")
            name = key.replace("_", "-")
            values[name] = _read(name, value, f"{path}: {key} = {value!r}")
    if "trace" in values:
        values["trace"] = str(Path(path).parent / values["trace"])
    return values


def _read(name: str, value: Any, said: str) -> Any:
    try:
        return FIELDS[name].read(value)
    except ValueError as error:
        raise UserError(f"{said}: {error}", f"{name}: {FIELDS[name].about}") from error


def read_flags(given: Mapping[str, str | None]) -> dict[str, Any]:
    """The values of flags by the names of :data:`FIELDS`, None where a flag is not there.

    Raises:
        UserError: a value cannot be.
    """
    said = {name: value for name, value in given.items() if value is not None}
    return {name: _read(name, value, f"--{name} {value}") for name, value in said.items()}


def scenario(values: Mapping[str, Any]) -> Scenario:
    """The question that values by the names of :data:`FIELDS` ask.

    Raises:
        UserError: something is missing, or contradicts something else.
    """
    has = {name: values.get(name, field.default) for name, field in FIELDS.items()}
    if has["groups"] is None:
        raise UserError("how many groups there are is not said", "give --groups, or groups in [job] of a scenario file")
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
        raise UserError("a trace belongs to law trace, and law trace needs one", "give --law trace and --trace FILE")
    if shaped and law != "weibull":
        raise UserError(f"the {law} law has no shape", "leave it out, or choose weibull")
    if law == "none":
        if mtbf is not None:
            raise UserError("a time between failures, and no failures", "leave mtbf out, or choose another law")
        return math.inf, 1.0
    if mtbf is None:
        reason = ", which the checkpoint period follows from" if law == "trace" else ""
        raise UserError(f"the time between two failures is not said{reason}", "give --mtbf, such as 5m")
    return mtbf, has["shape"] if law == "weibull" else 1.0


def _check(asked: Scenario) -> None:
    job = asked.job
    for least, name, given in ((2, "redundancy", asked.redundancy), (1, "degree", asked.degree)):
        if wrong := [number for number in given if not least <= number <= job.groups]:
            raise UserError(f"{name} {wrong[0]} with {job.groups} groups", f"give {least} to {job.groups}")
