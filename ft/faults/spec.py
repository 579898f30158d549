"""What ``--inject`` and scenario files ask for, and the schedule of numbered faults that follows.

``parse`` reads ``--inject``, such as ``kill@step=20:rank=3,slow@time=30s:rank=random:for=5s``. The format is
``KIND@KEY=VALUE[:KEY=VALUE...]``; several faults are separated by commas. Examples of the keys::

    when       step=20 | time=90s
               every=exponential(mean=60s) | every=weibull(shape=0.7,scale=90s)
               every=exponential(mean=20steps) | every=weibull(shape=0.7,scale=30steps)
    where      rank=3 | rank=random | node=n1 | node=random
               in runs with replicas (FT-HSDP) also: replica=1 | replica=random
    how        phase=backward  for=5s  factor=3  error=software  copies=peer  value=nan
               kind bit-flip: operator=mm  phase=backward  execution=checker  bit=30  mode=stuck  nth=3  probability=0.1
    how often  count=10  until=10m (only with every)

``read_scenario`` reads a file in YAML, TOML or JSON (``ft.faults.page.SCENARIO`` shows one).

``schedule`` draws random victims and times, and numbers the faults. The same seed gives the same schedule.
"""

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ft.base import files
from ft.base.errors import Problems, UserError
from ft.base.quantities import between, seconds, whole
from ft.faults.faults import COPIES, ERRORS, OF_CONTROL, OF_NODE, PHASES, RECOVERY_PHASES, VALUES, Fault
from ft.faults.flip import BIT_FLIP, FaultKey, one_of, read_flip, read_values
from ft.faults.flip import KEYS as FLIP_KEYS
from ft.faults.table import NAMES

_PARAMETERS = {"exponential": ("mean",), "weibull": ("shape", "scale")}


@dataclass(frozen=True)
class Distribution:
    """Distribution of the time, or of the number of steps, between two failures.

    Attributes:
        family: "exponential" (memoryless) or "weibull" (``shape`` < 1: failures come in bursts; > 1: wear-out).
        scale: mean of the exponential or scale of the Weibull distribution, in seconds or steps.
    """

    family: str
    scale: float
    shape: float = 1.0
    in_steps: bool = False

    @property
    def mean(self) -> float:
        """Return the expected number of seconds, or of steps, between two failures."""
        return self.scale * math.gamma(1.0 + 1.0 / self.shape)

    def times(self, rng: random.Random) -> Iterator[float]:
        """Yield the times of failures since the start, in seconds or steps, without end."""
        at = 0.0
        while True:
            at += rng.weibullvariate(self.scale, self.shape)
            yield at


def parse_distribution(value: Any) -> Distribution:
    """Parse ``exponential(mean=60s)`` or ``weibull(shape=0.7,scale=90s)``; ``20steps`` instead of a time counts steps.

    Raises:
        ValueError: the text is not valid, or a number in it is out of range.
    """
    match = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", str(value))
    if match is None or match[1] not in _PARAMETERS:
        raise ValueError("there is no such distribution")
    family, pairs = match[1], [part.partition("=") for part in match[2].split(",")]
    given = {name.strip(): text.strip() for name, _, text in pairs}
    expected = _PARAMETERS[family]
    if sorted(given) != sorted(expected) or len(pairs) != len(expected):
        raise ValueError(f"{family} takes {' and '.join(expected)}")
    shape = float(given.get("shape", 1.0))
    if not 0.1 <= shape <= 100.0:
        raise ValueError("shape is not between 0.1 and 100")
    scale = given.get("mean", given.get("scale"))
    steps = re.fullmatch(r"(.*\d\.?)\s*steps?", scale)
    if steps is None:
        return Distribution(family, parse_duration(scale), shape)
    number = float(steps[1])
    if not 0.1 <= number <= 1e9:
        raise ValueError("the number of steps is not between 0.1 and a billion")
    return Distribution(family, number, shape, in_steps=True)


def parse_duration(value: Any, least: float = 1e-3) -> float:
    """Return a duration in seconds: a text as :func:`ft.base.quantities.seconds` reads it, or a plain number of
    seconds.

    Raises:
        ValueError: it is not valid, or less than ``least`` seconds.
    """
    return seconds(value, least, bare=1.0)


_WHEN = ("step", "time", "every")
_LASTING = {
    "slow": 10.0,
    "partition": 10.0,
    "disk-full": 10.0,
    "delay-frames": 0.5,
    "lose-reports": 0.5,
    "duplicate-reports": 2.0,
    "reorder-reports": 2.0,
    "delay-reports": 2.0,
}
"""Kind of a fault that ends by itself -> its duration in seconds if the key ``for`` is not given."""


def _rank(value: Any) -> int | str:
    return "random" if value == "random" else whole(0)(value)


def _choice(choices: tuple[str, ...], says: str, *kinds: str) -> FaultKey:
    return FaultKey(one_of(*choices), f"one of: {', '.join(choices)}", says, kinds)


_DURATION = "seconds, or a number with ms, s, m or h: 500ms, 90s, 2m"
KEYS_UNDER: dict[str, dict[str, FaultKey]] = {
    "When: give exactly one of these keys": {
        "step": FaultKey(whole(1), "a step number from 1", "step in which the fault happens, counted from 1."),
        "time": FaultKey(
            partial(parse_duration, least=0.0),
            _DURATION,
            "time from the beginning of training: 500ms, 90s, 2m, 1h.",
        ),
        "every": FaultKey(
            parse_distribution,
            "exponential(mean=60s) or weibull(shape=0.7,scale=90s), or with steps: exponential(mean=20steps)",
            "repeated faults at random times: exponential(mean=60s) or weibull(shape=0.7,scale=90s) in time, "
            "exponential(mean=20steps) or weibull(shape=0.7,scale=30steps) in steps.",
        ),
    },
    "Where: without any of these keys, a random rank is hit, or the target of the kind (a node, the control plane)": {
        "rank": FaultKey(
            _rank,
            "a logical rank from 0, or random",
            "logical rank, or random; the fault hits the worker that holds the rank when the fault is due.",
        ),
        "node": FaultKey(
            str,
            "a node's name (n0, n1, ...), its number, or random",
            "node (its name or number), or random; the fault hits all workers on the node.",
        ),
        "replica": FaultKey(
            _rank,
            "a replica from 0, or random",
            "FT-HSDP replica to which rank or node belongs, or random; without it, ranks are numbered over "
            "all replicas.",
        ),
    },
    "How": {
        "phase": _choice(
            PHASES,
            "point of the step, or of the next recovery from this step on, at which the fault happens; for "
            "bit-flip, part of the step.",
        ),
        "for": FaultKey(
            parse_duration,
            _DURATION,
            "duration, for kinds that end by themselves.",
            tuple(kind for kind in NAMES if kind in (*_LASTING, "hang", "gil", "stall")),
        ),
        "factor": FaultKey(
            between(math.nextafter(1, 2), 1000),
            "a number above 1 and at most 1000",
            "for slow: factor by which the duration of a step grows.",
            ("slow",),
        ),
        "error": _choice(ERRORS, "for exception: class of the exception.", "exception"),
        "copies": _choice(
            COPIES,
            "for corrupt-snapshot: corrupt the worker's own snapshot, or the peer copies that it holds.",
            "corrupt-snapshot",
        ),
        "value": _choice(
            VALUES, "for corrupt-tensor: set one element to NaN, or flip one bit of it.", "corrupt-tensor"
        ),
        **FLIP_KEYS,
    },
    "How often: these keys need every": {
        "count": FaultKey(whole(1), "a number from 1", "maximum number of faults; 1000 by default."),
        "until": FaultKey(
            parse_duration,
            _DURATION,
            "time from the beginning of training after which no more faults happen; one week by default. Not "
            "allowed with steps.",
        ),
    },
}
"""Heading -> name -> key."""
KEYS = {name: key for keys in KEYS_UNDER.values() for name, key in keys.items()}


@dataclass(frozen=True, kw_only=True)
class FaultSpec(Fault):
    """One entry of ``--inject`` as the user wrote it. Random victims and times are drawn later, by the fault schedule.

    Exactly one of ``step``, ``time`` and ``every`` is not None. What is not listed here is as in ``Fault``.

    Attributes:
        rank: logical rank that is hit, "random", or None.
        node: node that is hit, "random", or None.
        until: seconds from the beginning of training after which a distribution causes no more faults.
        replica: replica to which ``rank`` or ``node`` belongs, or "random". None: ranks and nodes are numbered over all
            replicas.
    """

    text: str
    number: int = 0
    every: Distribution | None = None
    rank: int | str | None = None
    count: int | None = None
    until: float | None = None
    replica: int | str | None = None


def parse(text: str) -> list[FaultSpec]:
    """Parse the value of ``--inject`` and return its faults.

    Raises:
        UserError: the value is empty, or a part of it is invalid; the message names that part.
    """
    parts = [part for part in _split(text, ",") if part.strip()]
    if not parts:
        raise UserError("--inject names no fault", "for example: --inject kill@step=20:rank=3")
    return [_parse_one(part.strip()) for part in parts]


def from_values(values: Mapping[str, Any], text: str) -> FaultSpec:
    """Return the fault that a kind and keys describe.

    Args:
        values: "kind" and the keys of the fault, as text or as JSON values.
        text: origin of the values, for messages.

    Raises:
        UserError: a key or value is invalid, or keys contradict each other.
    """
    keys = dict(values)
    kind = str(keys.pop("kind", ""))
    if kind not in NAMES:
        raise UserError(f"{text!r}: there is no fault named {kind!r}", f"one of: {', '.join(NAMES)}")
    for key in keys:
        if key not in KEYS:
            raise UserError(f"{text!r}: there is no key named {key!r}", f"one of: {', '.join(KEYS)}")
    flip = None
    if kind == BIT_FLIP:
        # For a bit flip, ``phase`` selects the operators that are hit, not a point of the step. The flip is active from
        # the beginning of its step, so FaultSpec.phase keeps its default.
        flip = read_flip({key: keys.pop(key) for key in (*FLIP_KEYS, "phase") if key in keys}, text)
    _check_combination(kind, keys, text)
    read = {_FIELDS.get(key, key): value for key, value in read_values(KEYS, keys, text).items()}
    read.setdefault("seconds", _LASTING.get(kind))
    return FaultSpec(text=text, kind=kind, flip=flip, **read)


def _parse_one(text: str) -> FaultSpec:
    kind, at, rest = text.partition("@")
    values: dict[str, str] = {"kind": kind.strip()}
    for part in _split(rest, ":") if at else []:
        key, equals, value = part.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not value:
            raise UserError(f"{text!r}: {part!r} is not KEY=VALUE", f"keys: {', '.join(KEYS)}")
        if key in values:
            raise UserError(f"{text!r}: {key} is given twice", "give it once")
        values[key] = value
    return from_values(values, text)


def _split(text: str, separator: str) -> list[str]:
    """Split ``text`` at every ``separator`` that is not inside parentheses."""
    return re.split(re.escape(separator) + r"(?![^(]*\))", text)


def _check_combination(kind: str, keys: Mapping[str, Any], text: str) -> None:
    given = [key for key in _WHEN if key in keys]
    if len(given) != 1:
        says = " and ".join(given) or "nothing"
        raise UserError(
            f"{text!r}: exactly one key must say when the fault happens, and there is {says}",
            f"exactly one of: {', '.join(_WHEN)}",
        )
    for key in keys:
        if (kinds := KEYS[key].kinds) and kind not in kinds:
            raise UserError(f"{text!r}: {key} has no meaning for {kind}", f"{key} goes with: {', '.join(kinds)}")
    for key in ("count", "until"):
        if key in keys and given[0] != "every":
            raise UserError(f"{text!r}: {key} has no meaning with {given[0]}", f"use {key} only with every")
    if "until" in keys and "steps" in str(keys.get("every")):
        raise UserError(f"{text!r}: until is a time, but every counts steps", "give count, or every with a time")
    if "rank" in keys and "node" in keys:
        raise UserError(f"{text!r}: it can hit a rank or a node, not both", "give rank or node")
    if "phase" in keys and given[0] != "step":
        raise UserError(f"{text!r}: a phase needs a step", "give step=NUMBER, or remove phase")
    if "phase" in keys and ("node" in keys or kind == "partition"):
        raise UserError(f"{text!r}: only the fault of one rank can happen inside a phase", "remove phase")
    if kind == "partition" and "rank" in keys:
        raise UserError(f"{text!r}: a network belongs to a node", "give node=NAME or node=random")
    if kind in (*OF_CONTROL, *OF_NODE) and "rank" in keys and keys.get("phase") not in RECOVERY_PHASES:
        what = "there is one control plane" if kind in OF_CONTROL else "an agent belongs to a node"
        fix = f"remove rank, or give the phase of a recovery in which the worker of that rank kills it: {_RECOVERY}"
        raise UserError(f"{text!r}: {what}", fix)
    if kind in (*OF_CONTROL, *OF_NODE) and "phase" in keys and "rank" not in keys:
        raise UserError(
            f"{text!r}: a phase belongs to one worker", "give the rank of the worker that carries the fault out"
        )
    if kind in OF_CONTROL and "node" in keys:
        raise UserError(f"{text!r}: there is one control plane", "remove node")


_RECOVERY = ", ".join(RECOVERY_PHASES)
_FIELDS = {"for": "seconds"}


@dataclass(frozen=True)
class FaultScenario:
    """The content of a scenario file.

    Attributes:
        specs: its entries.
        seed: the seed from which random victims and times are drawn; None if the file names none.
    """

    specs: list[FaultSpec]
    seed: int | None = None


def read_scenario(path: str | Path) -> FaultScenario:
    """Read a scenario file.

    Raises:
        UserError: the file cannot be read or an entry is not valid; the message names the entry by its position.
    """
    path = Path(path)
    values = files.read_structured(path, "scenario")
    if isinstance(values, list):
        values = {"faults": values}
    faults = values.get("faults") if isinstance(values, dict) else None
    if not isinstance(faults, list) or set(values) - {"faults", "seed"}:
        raise UserError(f"scenario {path} is not a list of faults with a seed", 'keys: "faults" (a list), "seed"')
    seed = values.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise UserError(f"scenario {path}: seed {seed!r} is no whole number", "for example: seed = 7")
    specs = []
    for number, entry in enumerate(faults, 1):
        specs += _specs(entry, f"{path}, fault {number}")
    return FaultScenario(specs, seed)


def read_specs(texts: Sequence[str], scenario: str | None, seed: int | None) -> tuple[list[FaultSpec], int]:
    """Return the faults of the ``--inject`` values ``texts`` and of the ``scenario`` file, and the seed.

    The argument ``seed`` has priority over the seed in the file; without either, the seed is 0.

    Raises:
        UserError: listing everything that is not valid.
    """
    specs, problems = [], Problems()
    for text in texts:
        with problems:
            specs += parse(text)
    if scenario:
        with problems:
            found = read_scenario(scenario)
            specs += found.specs
            seed = found.seed if seed is None else seed
    problems.refuse()
    return specs, seed or 0


def _specs(entry: Any, place: str) -> list[FaultSpec]:
    if isinstance(entry, str):
        return parse(entry)
    if not isinstance(entry, dict):
        raise UserError(
            f"{place}: {entry!r} is no fault", 'a text like "kill@step=20", or an object with kind and keys'
        )
    return [from_values(entry, place)]


HORIZON_S = 7 * 24 * 3600.0
"""Default limit for drawn times, in seconds: one week."""
MOST_OF_A_DISTRIBUTION = 1000
"""Maximum number of faults of one entry without ``count``. It is limited because a worker reads all faults at its
start.
"""


def schedule(
    specs: Sequence[FaultSpec], world_size: int, nodes: Sequence[str], seed: int, horizon_s: float = HORIZON_S
) -> list[Fault]:
    """Return the faults of a run, numbered from 1: first those with a step, by step, then those with a time, by time.

    The random draws for an entry depend only on the seed and its place in the list, so adding an entry at the end
    changes no other.

    Args:
        nodes: names of the nodes, in the order of their node ranks. The first node hosts the control plane; a random
            node is one of the others if there are any.
        horizon_s: limit for drawn times, in seconds.

    Raises:
        UserError: a victim does not exist.
    """
    faults = []
    for spec in specs:
        if spec.replica is not None:
            raise UserError(f"{spec.text!r}: the run has no replicas", "add --ft-hsdp-replicas R, or remove replica")
    for index, spec in enumerate(specs):
        rng = random.Random(f"{seed}/{index}")
        faults += [_seat(one, world_size, nodes, rng) for one in _moments(spec, rng, horizon_s)]
    faults.sort(key=lambda fault: (fault.step is None, fault.step if fault.step is not None else fault.time))
    return [replace(fault, number=number) for number, fault in enumerate(faults, 1)]


def _moments(spec: FaultSpec, rng: random.Random, horizon_s: float) -> list[FaultSpec]:
    """Return one entry for each fault, with a fixed step or time."""
    if spec.every is None:
        return [spec]
    end = min(horizon_s, spec.until if spec.until is not None else horizon_s)
    most = spec.count if spec.count is not None else MOST_OF_A_DISTRIBUTION
    if spec.every.in_steps:  # a drawn value of 3.2 means step 4: three whole steps are done before
        return [replace(spec, every=None, step=math.ceil(at)) for at in islice(spec.every.times(rng), most)]
    found = []
    for time in islice(spec.every.times(rng), most):
        if time > end:
            break
        found.append(replace(spec, every=None, time=round(time, 3)))
    return found


def _seat(spec: FaultSpec, world_size: int, nodes: Sequence[str], rng: random.Random) -> Fault:
    flip = None if spec.flip is None else replace(spec.flip, seed=rng.getrandbits(32))
    drawn = {"rank": _drawn_rank(spec, world_size, rng), "node": _node(spec, nodes, rng), "flip": flip}
    return Fault(**{f.name: getattr(spec, f.name) for f in fields(Fault)} | drawn)


def _drawn_rank(spec: FaultSpec, world_size: int, rng: random.Random) -> int | None:
    if spec.node is not None or (spec.rank is None and spec.kind in (*OF_CONTROL, *OF_NODE)):
        return None
    if spec.rank is None or spec.rank == "random":
        return rng.randrange(world_size)
    if spec.rank >= world_size:
        raise UserError(
            f"{spec.text!r}: there is no logical rank {spec.rank} among {world_size}",
            f"rank=0 to rank={world_size - 1}, or rank=random",
        )
    return spec.rank


def _node(spec: FaultSpec, nodes: Sequence[str], rng: random.Random) -> str | None:
    asked = "random" if spec.kind in OF_NODE and spec.node is None and spec.rank is None else spec.node
    if asked is None:
        return None
    if asked == "random":
        return rng.choice(nodes[1:] or nodes)
    if asked in nodes:
        return asked
    if asked.isdecimal() and int(asked) < len(nodes):
        return nodes[int(asked)]
    raise UserError(f"{spec.text!r}: there is no node {asked}", f"one of: {', '.join(nodes)}, or random")
