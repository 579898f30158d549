"""The question about a planned run: a file of keys, the flags of the same names, and where each value is
from.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ft.base import files, quantities
from ft.base.errors import Problems, UserError
from ft.base.flags import nearest
from ft.base.quantities import between, whole
from ft.lab.plan.goodput.histories import Cause, History, history

GIVEN, ASSUMED = "given", "assumed"
CHECKPOINTS, FEWER = "checkpoints", "fewer workers"
"""Names of rows that are no protection of this project: checkpoints alone, and ReCoVer's constant microbatches."""
BEST = "best"
LAWS = ("exponential", "weibull", "lognormal", "periodic", "trace")
REPAIRS = ("exponential", "fixed", "lognormal")
YEAR = 365.25 * 86400.0


@dataclass(frozen=True)
class Key:
    """One key of a scenario file, and the flag of the same name.

    Attributes:
        read: converts text or a number to the value; raises ValueError.
        metavar: placeholder in help.
        help: what it is.
        default: value if it is not given; None: there is none, and the model does without it, or it is required.
        origin: where the default is from.
        group: title of the group of flags.
    """

    read: Callable[[Any], Any]
    metavar: str
    help: str
    default: Any = None
    origin: str = ASSUMED
    group: str = "cluster"


def time(least: float = 0.0, most: float = 1000 * YEAR) -> Callable[[Any], float]:
    """Return a reader of times with a unit; a plain number in a file is in seconds."""

    def read(value: Any) -> float:
        found = quantities.seconds(value, least, bare=None if isinstance(value, str) else 1.0)
        if found > most:
            raise ValueError(f"more than {most / YEAR:,.0f} years")
        return found

    return read


def one_of(names: Sequence[str]) -> Callable[[Any], str]:
    """Return a reader that accepts only the given names."""

    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"none of {', '.join(names)}")
        return value

    return read


def spares(value: Any) -> tuple[int, ...]:
    """Read a number of standby nodes or a list of them; () stands for ``best``."""
    if value == BEST:
        return ()
    parts = value if isinstance(value, list) else str(value).split(",")
    return tuple(dict.fromkeys(whole(0, 10**6)(part) for part in parts))


_PAPER_SWAP = "paper (DEADPOOL, VII-C: 29.8 and 32.6 s on 256 GPUs)"
_PAPER_STALL = "paper (FT-HSDP, 6.1)"
_RUN, _FAILS, _PROTECTS, _MODEL = "run", "failures", "recovery and protections", "simulation"
KEYS: dict[str, Key] = {
    "gpus": Key(whole(1, 10_000_000), "N", "GPUs that train, without standbys"),
    "gpus_per_node": Key(whole(1, 1024), "N", "GPUs of a node", 8),
    "replica_gpus": Key(whole(1, 10_000_000), "N", "fewest GPUs that hold a replica; default: from params"),
    "spares": Key(spares, "N[,N...]", "standby nodes, or best: those with the fewest paid GPU hours", (), "searched"),
    "repair_time": Key(time(), "TIME", "mean time until a failed node is back", 86400.0),
    "repair_law": Key(one_of(REPAIRS), "LAW", f"distribution of repairs: {', '.join(REPAIRS)}", "exponential"),
    "bad_spares": Key(between(0.0, 0.99), "P", "probability that a standby proves bad when it is needed", 0.0),
    "idle_failures": Key(between(0.0, 1.0), "X", "failures of a standby, as a share of those of a busy node", 1.0),
    "price_per_gpu_hour": Key(between(0.0, 1e6), "DOLLARS", "price of a GPU hour"),
    "params": Key(quantities.amount, "N", "parameters of the model, such as 70B", 70e9, group=_RUN),
    "step_time": Key(time(1e-3, YEAR), "TIME", "duration of a step without any protection", group=_RUN),
    "days": Key(between(0.01, 36500.0), "N", "days that the run takes without any failure or protection", 90.0,
                group=_RUN),
    "replicas": Key(whole(2, 20_000), "N", "replicas of the model, or SPARe's groups; default: the best of some", None,
                    "searched", _RUN),
    "stages": Key(whole(1, 100_000), "N", "stages of the pipeline", 8, group=_RUN),
    "reduce_share": Key(between(0.0, 0.99), "X", "part of a step that reduces gradients between groups", 0.09,
                        "paper (SPARe, table 1)", _RUN),
    "gpu_mtbf": Key(time(1e-3), "TIME", "mean time between two failures of one GPU that cost its node", group=_FAILS),
    "node_mtbf": Key(time(1e-3), "TIME", "the same for the other parts of one node", group=_FAILS),
    "software_mtbf": Key(time(1e-3), "TIME", "mean time between crashes of the run that cost no node", group=_FAILS),
    "rack_mtbf": Key(time(1e-3), "TIME", "mean time between failures of one whole rack", group=_FAILS),
    "nodes_per_rack": Key(whole(1, 10_000), "N", "nodes of a rack", group=_FAILS),
    "switch_mtbf": Key(time(1e-3), "TIME", "mean time between failures of one switch, which takes its nodes",
                       group=_FAILS),
    "nodes_per_switch": Key(whole(1, 100_000), "N", "nodes behind a switch", 32, group=_FAILS),
    "power_mtbf": Key(time(1e-3), "TIME", "mean time between failures of one power line, which takes its nodes",
                      group=_FAILS),
    "nodes_per_power": Key(whole(1, 100_000), "N", "nodes on a power line", 64, group=_FAILS),
    "domain_repair_time": Key(time(), "TIME", "mean time until the nodes of a rack, switch or power line are back",
                              4 * 3600.0, group=_FAILS),
    "law": Key(one_of(LAWS), "LAW", f"distribution of the time between failures: {', '.join(LAWS)}", "exponential",
               group=_FAILS),
    "shape": Key(between(0.2, 20.0), "K", "shape of the Weibull law, or sigma of the log-normal one", 0.78,
                 "paper (SPARe, table 1)", _FAILS),
    "sdc_mtbf": Key(time(1.0), "TIME", "mean time between silent corruptions of one GPU", 16384 * 54 * 86400.0 / 6,
                    "paper (Llama 3, table 5: 6 in 54 days of 16,384 GPUs)", _FAILS),
    "save_time": Key(time(), "TIME", "time for which a checkpoint stops training", group=_PROTECTS),
    "restart_time": Key(time(), "TIME", "time from a failure to the first step after a restart, without replay",
                        group=_PROTECTS),
    "interval": Key(whole(1, 10**9), "STEPS", "steps between checkpoints; default: the best of each row", None,
                    "searched", _PROTECTS),
    "swap_time": Key(time(), "TIME", "time of a recovery from memory (hot-swap)", 31.2, _PAPER_SWAP, _PROTECTS),
    "snapshot_overhead": Key(between(0.0, 10.0), "X", "part by which snapshots and copies prolong a step", 0.0,
                             "paper (DEADPOOL, V: hidden)", _PROTECTS),
    "stall_time": Key(time(), "TIME", "time for which the other replicas wait when one fails", 180.0, _PAPER_STALL,
                      _PROTECTS),
    "rejoin_time": Key(time(), "TIME", "time for which they wait when it returns", 0.0,
                       "paper (FT-HSDP, 6.1 counts it in the stall)", _PROTECTS),
    "shrink_time": Key(time(), "TIME", "wait of the other groups of SPARe when one fails", 0.2,
                       "paper (SPARe, table 1)", _PROTECTS),
    "neighbour_time": Key(time(), "TIME", "time to rebuild a stage from its neighbours (CheckFree)", 30.0,
                          "paper (CheckFree, 5.1)", _PROTECTS),
    "dmr_overhead": Key(between(0.0, 2.0), "X", "part by which executing everything twice prolongs a step", 0.11,
                        "paper (SpareTrain: 3 to 14 %)", _PROTECTS),
    "dmr_sample": Key(between(0.0, 1.0), "X", "share of the steps that sampled DMR executes twice", 0.1,
                      group=_PROTECTS),
    "seed": Key(whole(0), "N", "seed of all random numbers", 0, group=_MODEL),
    "failures": Key(whole(200, 10_000_000), "N", "failures to simulate for each row", None, "chosen", _MODEL),
}  # fmt: skip
"""Key -> what it is. A "_" in a key is a "-" in its flag."""
_RATES = ("gpu_mtbf", "node_mtbf", "software_mtbf", "rack_mtbf", "switch_mtbf", "power_mtbf")
_NOTHING_FAILS = "nothing fails: no --gpu-mtbf and no other rate", "give --gpu-mtbf or --history"
REQUIRED = ("gpus", "step_time", "save_time", "restart_time")
FILES = {
    "history": ("NAME|FILE.csv", "published failures, or recorded ones, scaled to this cluster: llama3, rsc, ..."),
    "from_run": ("DIR", "take step, save, restart and recovery times from the record of this run"),
    "from_sacct": ("FILE", "take failures of nodes from sacct -a -X -D -P -S DATE -o JobID,State,ElapsedRaw,NNodes"),
}
RENAMED = {
    "mtbf_gpu": "gpu_mtbf", "mtbf_node": "node_mtbf", "node_mtbf_s": "node_mtbf", "mtbf": "gpu_mtbf",
    "mttf": "gpu_mtbf", "mtbf_min": "gpu_mtbf", "step": "step_time", "stack": "step_time", "iteration": "step_time",
    "checkpoint_cost": "save_time", "save": "save_time", "restart": "restart_time", "rebuild": "restart_time",
    "standbys": "spares", "checkpoint_interval": "interval", "fallback_interval": "interval", "recovery":
    "neighbour_time", "price": "price_per_gpu_hour", "hot_swap_time": "swap_time", "stall": "stall_time",
    "rejoin_stall": "rejoin_time", "repair": "repair_time",
}  # fmt: skip
"""Names that older commands gave to a key -> the key."""


@dataclass(frozen=True)
class Scenario:
    """A validated question.

    Attributes:
        values: key -> value.
        origin: key -> where the value is from: ``GIVEN``, ``ASSUMED``, or a sentence.
        causes: what fails, and how often.
        trace: recorded failures that are replayed (``law`` is ``trace``), or None.
    """

    values: Mapping[str, Any]
    origin: Mapping[str, str]
    causes: tuple[Cause, ...]
    trace: History | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def nodes(self) -> int:
        """Return the number of nodes that train."""
        return self.gpus // self.gpus_per_node

    @property
    def mtbf_s(self) -> float:
        """Return the mean seconds between two failures of the whole run."""
        return 1.0 / sum(cause.rate(self.nodes) for cause in self.causes)

    def but(self, **values: Any) -> "Scenario":
        """Return the scenario with other values; ``scale`` multiplies every rate of failures."""
        scale = values.pop("scale", 1.0)
        causes = [replace(cause, mtbf_s=cause.mtbf_s / scale) for cause in self.causes]
        if "repair_time" in values:
            ratio = values["repair_time"] / self.repair_time if self.repair_time else 0.0
            causes = [replace(cause, repair_s=cause.repair_s * ratio) for cause in causes]
        return Scenario({**self.values, **values}, self.origin, tuple(causes), self.trace)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the scenario file and every key as a flag; values stay text, so that all problems are told at once."""
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO.toml", help="file of the keys; flags override it")
    titles: dict[str, Any] = {}
    for name, key in KEYS.items():
        if key.group not in titles:
            titles[key.group] = parser.add_argument_group(key.group)
        titles[key.group].add_argument(flag(name), metavar=key.metavar, help=_about(name).replace("%", "%%"))
    group = parser.add_argument_group("measured and published values")
    for name, (metavar, about) in FILES.items():
        group.add_argument(flag(name), metavar=metavar, help=about)
    parser.parse_known_args = lambda words=None, space=None: _parse(parser, words or (), space)  # type: ignore


def _about(name: str) -> str:
    key = KEYS[name]
    needed = "; required" if name in REQUIRED else ""
    default = "" if key.default in (None, ()) else f" (default: {shown(key.default, key)}, {key.origin})"
    return f"{key.help}{needed}{default}"


def shown(value: Any, key: Key) -> str:
    """Return a value as text that its key reads."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or BEST
    if key.metavar == "TIME":
        unit, size = ("h", 3600.0) if value >= 3600 else ("s", 1.0)
        return f"{value / size:.10g}{unit}"
    return f"{value / 1e9:g}B" if key.read is quantities.amount else str(value)


def flag(name: str) -> str:
    """Return the flag of a key."""
    return f"--{name.replace('_', '-')}"


def _parse(parser: argparse.ArgumentParser, words: Sequence[str], space: argparse.Namespace | None) -> tuple:
    """Parse the words of the command into strings, and note unknown flags as ``problems`` of the namespace, and the
    keys that were given by another name as ``renamed``.
    """
    space = space or argparse.Namespace()
    actions = parser._option_string_actions
    for action in parser._actions:
        if action.dest != "help":
            setattr(space, action.dest, action.default)
    for name, value in parser._defaults.items():
        setattr(space, name, value)
    space.problems, space.renamed, rest = [], set(), list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--") and word != "-h":
            if space.scenario is not None:
                space.problems.append((f"unexpected word {word!r}", "quote values that contain spaces"))
            space.scenario = word
        elif name in ("-h", "--help"):
            parser.print_help()
            parser.exit()
        elif name not in actions:
            space.problems.append(unknown(name, actions))
            space.renamed |= {RENAMED.get(name.removeprefix("--").replace("-", "_"), "")}
            if rest and not rest[0].startswith("--"):
                rest.pop(0)
        elif actions[name].nargs == 0:
            setattr(space, actions[name].dest, True)
        elif not equals and (not rest or rest[0].startswith("--")):
            space.problems.append((f"{name} has no value", actions[name].help))
        else:
            setattr(space, actions[name].dest, value if equals else rest.pop(0))
    return space, []


def unknown(word: str, known: Mapping[str, Any]) -> tuple[str, str]:
    """Return the problem of an unknown flag, with the name that replaces it, or the nearest one."""
    name = word.removeprefix("--").replace("-", "_")
    if name in RENAMED:
        return f"{word} has another name", f"give {flag(RENAMED[name])}: {KEYS[RENAMED[name]].help}"
    meant = nearest(word, [each for each in known if each.startswith("--")])
    return f"unknown flag {word}", f"did you mean {meant}?" if meant else "see --help"


def read(given: argparse.Namespace, needs: Sequence[str] = REQUIRED) -> Scenario:
    """Return the scenario of the file and of the flags.

    Args:
        given: the parsed flags.
        needs: keys that must have a value.

    Raises:
        UserError: something is wrong; the message names all of it.
    """
    problems = Problems()
    problems.add(getattr(given, "problems", []))
    texts: dict[str, Any] = {}
    with problems:
        texts |= _file(given.scenario)
    texts |= {name: getattr(given, name) for name in (*KEYS, *FILES) if getattr(given, name, None) is not None}
    values, origin = {name: key.default for name, key in KEYS.items()}, {n: key.origin for n, key in KEYS.items()}
    bad: set[str] = set()
    for name, text in texts.items():
        if name in KEYS:
            try:
                values[name], origin[name] = KEYS[name].read(text), GIVEN
            except ValueError as error:
                bad.add(name)
                problems.add([(f"{flag(name)} {text}: {error}", f"{name}: {KEYS[name].help}")])
    causes: list[Cause] = []
    trace = None
    with problems:
        trace = _measured(texts, values, origin, causes)
    bad |= getattr(given, "renamed", set())
    missing = [name for name in needs if values[name] is None and name not in bad]
    problems.add([(f"{flag(name)} is missing: {KEYS[name].help}", f"give {flag(name)}") for name in missing])
    if not bad & set(_RATES) and not texts.keys() & set(FILES) and not any(values[name] for name in _RATES):
        problems.add([_NOTHING_FAILS])
    problems.refuse()
    causes += _causes(values, bool(causes))
    found = Scenario(values, origin, tuple(causes), trace)
    problems.add(_contradictions(found))
    problems.refuse()
    return found


def _file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    content = files.read_structured(path, "the scenario")
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no keys", "give the keys of a scenario")
    flat: dict[str, Any] = {}
    for name, value in content.items():
        flat |= value if isinstance(value, dict) else {name: value}
    flat = {str(name).replace("-", "_"): value for name, value in flat.items()}
    known = (*KEYS, *FILES)
    problems = []
    for name in flat.keys() - set(known):
        near = RENAMED.get(name) or nearest(name, known)
        problems.append((f"{path} has the unknown key {name!r}", f"use {near}" if near else "see the list of keys"))
    if problems:
        raise UserError.of(problems)
    return flat


def _measured(texts: Mapping[str, Any], values: dict, origin: dict, causes: list[Cause]) -> History | None:
    """Add what the record of a run, Slurm's accounting or a history says; return a history that is replayed."""
    from ft.lab.plan.goodput import measured

    problems, trace = Problems(), None
    if "from_run" in texts:
        with problems:
            for name, (value, source) in measured.of_run(texts["from_run"]).items():
                if origin[name] != GIVEN:
                    values[name], origin[name] = value, source
    if "from_sacct" in texts:
        with problems:
            causes += measured.of_sacct(texts["from_sacct"], values["repair_time"])
            values["from_sacct"], origin["from_sacct"] = texts["from_sacct"], f"measured ({causes[-1].name})"
    if "history" in texts:
        with problems:
            found = history(str(texts["history"]))
            if found.times and (origin["law"] != GIVEN or values["law"] == "trace"):
                trace, values["law"] = found, "trace"
            sizes = {kind: values[f"nodes_per_{kind}"] for kind in ("rack", "switch", "power")}
            causes += found.causes(values["gpus_per_node"], values["repair_time"], values["domain_repair_time"], sizes)
            values["history"], origin["history"] = str(texts["history"]), f"history ({found.source})"
    problems.refuse()
    return trace


def _causes(values: Mapping[str, Any], known: bool) -> list[Cause]:
    """Return the causes of failures that the keys describe."""
    repair, domain = values["repair_time"], values["domain_repair_time"]
    found = []
    if values["gpu_mtbf"] and values["gpus_per_node"]:
        found.append(Cause("GPU", values["gpu_mtbf"] / values["gpus_per_node"], 1, 1, repair))
    if values["node_mtbf"]:
        found.append(Cause("node", values["node_mtbf"], 1, 1, repair))
    for name in ("rack", "switch", "power"):
        size = values[f"nodes_per_{name}"]
        if values[f"{name}_mtbf"] and size:
            found.append(Cause(name, values[f"{name}_mtbf"], size, size, domain))
    if values["software_mtbf"] and values["gpus"]:
        nodes = max(1, values["gpus"] // values["gpus_per_node"])
        found.append(Cause("software", values["software_mtbf"] * nodes, 0, 1, 0.0))
    return found


def _contradictions(asked: Scenario) -> list[tuple[str, str]]:
    found = []
    if asked.gpus and asked.gpus % asked.gpus_per_node:
        found.append((f"{asked.gpus:,} GPUs are no whole nodes of {asked.gpus_per_node}", "give whole nodes"))
    if not asked.causes:
        return [*found, _NOTHING_FAILS]
    if asked.rack_mtbf and not asked.nodes_per_rack:
        found.append(("--rack-mtbf without --nodes-per-rack", "give --nodes-per-rack"))
    if asked.law == "trace" and asked.trace is None:
        found.append(("--law trace without recorded failures", "give --history FILE.csv"))
    if asked.nodes and asked.step_time and asked.mtbf_s < asked.step_time:
        found.append(
            (
                f"a failure every {asked.mtbf_s:.3g} s, and a step takes {asked.step_time:g} s: no step would ever end",
                "check --gpu-mtbf, --gpus and --step-time",
            )
        )
    if asked.spares and max(asked.spares) > 10 * max(1, asked.nodes or 1):
        found.append((f"{max(asked.spares):,} standby nodes for {asked.nodes:,} nodes", "give fewer --spares"))
    if asked.replicas and asked.nodes and asked.nodes % asked.replicas:
        found.append((f"{asked.nodes:,} nodes are not divisible into {asked.replicas:,} replicas", "give a divisor"))
    if asked.replica_gpus and asked.gpus and asked.replica_gpus > asked.gpus:
        found.append((f"a replica of {asked.replica_gpus:,} GPUs, and there are {asked.gpus:,}", "lower it"))
    if any(math.isnan(value) for value in asked.values.values() if isinstance(value, float)):
        found.append(("a value is not a number", "give numbers"))
    return found


def template() -> str:
    """Return a commented scenario file with every key."""
    lines = ["# A scenario. Keys with a # in front have the value shown; every key is also a flag.", ""]
    example = {"gpus": "4096", "step_time": '"10s"', "gpu_mtbf": '"50000h"', "save_time": '"60s"'}
    example |= {"restart_time": '"10m"', "repair_time": '"24h"'}
    group = ""
    for name, key in KEYS.items():
        if key.group != group:
            group = key.group
            lines += [f"[{group.replace(' ', '_')}]"]
        value = example.get(name) or ('""' if key.default in (None, ()) else _toml(key))
        lines += [f"# {_about(name)}", f"{'' if name in example else '# '}{name} = {value}", ""]
    lines += ["[measured]", *(f'# {about}\n# {name} = ""\n' for name, (_, about) in FILES.items())]
    return "\n".join(lines)


def _toml(key: Key) -> str:
    text = shown(key.default, key)
    is_number = isinstance(key.default, int | float) and key.metavar != "TIME" and "B" not in text
    return text if is_number else f'"{text}"'
