"""The question about a planned run: its keys, and the causes of failures that they describe."""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ft.base import quantities, scenario
from ft.base.errors import Problems
from ft.base.quantities import between, whole
from ft.base.scenario import GIVEN, YEAR, Key, one_of, time
from ft.lab.plan.goodput.histories import FailureCause, FailureHistory, history

CHECKPOINTS, FEWER = "checkpoints", "fewer workers"
"""Names of rows that are no protection of this project: checkpoints alone, and ReCoVer's constant microbatches."""
BEST = "best"
LAWS = ("exponential", "weibull", "lognormal", "periodic", "trace")
REPAIRS = ("exponential", "fixed", "lognormal")


def spares(value: Any) -> tuple[int, ...]:
    """Read a number of standby nodes or a list of them; () stands for ``best``."""
    if value == BEST:
        return ()
    parts = value if isinstance(value, list) else str(value).split(",")
    return tuple(dict.fromkeys(whole(0, 10**6)(part) for part in parts))


_PAPER_SWAP = "paper (DEADPOOL, VII-C: 29.8 and 32.6 s on 256 GPUs)"
_PAPER_STALL = "paper (FT-HSDP, 6.1)"
_RUN, _FAILS, _PROTECTS, _MODEL = "run", "failures", "recovery and protections", "simulation"
_MEASURED = "measured and published values"
_KNOWN: dict[str, Key] = {
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
    "history": Key(str, "NAME|FILE.csv", "published failures, or recorded ones, scaled to this cluster: llama3, ...",
                   group=_MEASURED),
    "from_run": Key(str, "DIR", "take step, save, restart and recovery times from the record of this run",
                    group=_MEASURED),
    "from_sacct": Key(str, "FILE", "take failures of nodes from sacct -a -X -D -P -S DATE -o "
                      "JobID,State,ElapsedRaw,NNodes", group=_MEASURED),
}  # fmt: skip
"""Key -> what it is."""
_RATES = ("gpu_mtbf", "node_mtbf", "software_mtbf", "rack_mtbf", "switch_mtbf", "power_mtbf")
_NOTHING_FAILS = "nothing fails: no --gpu-mtbf and no other rate", "give --gpu-mtbf or --history"
_RENAMED = {
    "mtbf_gpu": "gpu_mtbf", "mtbf_node": "node_mtbf", "node_mtbf_s": "node_mtbf", "mtbf": "gpu_mtbf",
    "mttf": "gpu_mtbf", "mtbf_min": "gpu_mtbf", "step": "step_time", "stack": "step_time", "iteration": "step_time",
    "checkpoint_cost": "save_time", "save": "save_time", "restart": "restart_time", "rebuild": "restart_time",
    "standbys": "spares", "checkpoint_interval": "interval", "fallback_interval": "interval", "recovery":
    "neighbour_time", "price": "price_per_gpu_hour", "hot_swap_time": "swap_time", "stall": "stall_time",
    "rejoin_stall": "rejoin_time", "repair": "repair_time",
}  # fmt: skip
"""Names that older commands gave to a key -> the key."""
KEYS = scenario.Keys(_KNOWN, ("gpus", "step_time", "save_time", "restart_time"), _RENAMED)


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
    causes: tuple[FailureCause, ...]
    trace: FailureHistory | None = None

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


def shown(name: str, value: Any) -> str:
    """Return the value of a key as text that the key reads."""
    return scenario.shown(value, _KNOWN[name]) or BEST


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the scenario file and every key as a flag."""
    KEYS.add_flags(parser)


def read(given: argparse.Namespace) -> Scenario:
    """Return the scenario of the file and of the flags.

    Raises:
        UserError: something is wrong; the message names all of it.
    """
    values, origin, bad, problems = KEYS.read(given)
    causes: list[FailureCause] = []
    trace = None
    with problems:
        trace = _measured(values, origin, causes)
    if not bad & set(_RATES) and not any(values[name] for name in (*_RATES, "history", "from_run", "from_sacct")):
        problems.add([_NOTHING_FAILS])
    problems.refuse()
    causes += _causes(values, bool(causes))
    found = Scenario(values, origin, tuple(causes), trace)
    problems.add(_contradictions(found))
    problems.refuse()
    return found


def _measured(values: dict, origin: dict, causes: list[FailureCause]) -> FailureHistory | None:
    """Add what the record of a run, Slurm's accounting or a history says; return a history that is replayed."""
    from ft.lab.plan.goodput import measured

    problems, trace = Problems(), None
    if values["from_run"]:
        with problems:
            for name, (value, source) in measured.of_run(values["from_run"]).items():
                if origin[name] != GIVEN:
                    values[name], origin[name] = value, source
    if values["from_sacct"]:
        with problems:
            causes += measured.of_sacct(values["from_sacct"], values["repair_time"])
            origin["from_sacct"] = f"measured ({causes[-1].name})"
    if values["history"]:
        with problems:
            found = history(values["history"])
            if found.times and (origin["law"] != GIVEN or values["law"] == "trace"):
                trace, values["law"] = found, "trace"
            sizes = {kind: values[f"nodes_per_{kind}"] for kind in ("rack", "switch", "power")}
            causes += found.causes(values["gpus_per_node"], values["repair_time"], values["domain_repair_time"], sizes)
            origin["history"] = f"history ({found.source})"
    problems.refuse()
    return trace


def _causes(values: Mapping[str, Any], known: bool) -> list[FailureCause]:
    """Return the causes of failures that the keys describe."""
    repair, domain = values["repair_time"], values["domain_repair_time"]
    found = []
    if values["gpu_mtbf"] and values["gpus_per_node"]:
        found.append(FailureCause("GPU", values["gpu_mtbf"] / values["gpus_per_node"], 1, 1, repair))
    if values["node_mtbf"]:
        found.append(FailureCause("node", values["node_mtbf"], 1, 1, repair))
    for name in ("rack", "switch", "power"):
        size = values[f"nodes_per_{name}"]
        if values[f"{name}_mtbf"] and size:
            found.append(FailureCause(name, values[f"{name}_mtbf"], size, size, domain))
    if values["software_mtbf"] and values["gpus"]:
        nodes = max(1, values["gpus"] // values["gpus_per_node"])
        found.append(FailureCause("software", values["software_mtbf"] * nodes, 0, 1, 0.0))
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
    for name, key in _KNOWN.items():
        if key.group != group:
            group = key.group
            lines += [f"[{group.replace(' ', '_')}]"]
        value = example.get(name) or ('""' if key.default in (None, ()) else _toml(name, key))
        about = f"{key.help}; required" if name in KEYS.required else key.said
        lines += [f"# {about}", f"{'' if name in example else '# '}{name} = {value}", ""]
    return "\n".join(lines)


def _toml(name: str, key: Key) -> str:
    text = shown(name, key.default)
    is_number = isinstance(key.default, int | float) and key.metavar != "TIME" and "B" not in text
    return text if is_number else f'"{text}"'
