"""Read the scenario of ``ft dmr estimate`` from a file and flags, check it, and build model, cluster and layouts.

A scenario file is TOML with the sections and keys of :data:`FIELDS`. Flags override it.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft.base import files
from ft.base.errors import UserError
from ft.base.quantities import between, gigabytes_per_second, size, whole
from ft.lab.estimate.clusters import DEVICES, GB, NETWORKS, AchievedShares, Cluster, device_named
from ft.lab.estimate.layout import RECOMPUTE, STATES, Layout, fitted
from ft.lab.estimate.models import MODELS, Model, model_named
from ft.systems.dmr.plan.trace import INTER, INTRA


@dataclass(frozen=True)
class Field:
    """A key of the scenario file, and the flag of the same name.

    Attributes:
        section: section of the file.
        read: converts text or a TOML value to the value; raises ValueError for invalid input.
        default: the default value; None: there is none.
        metavar: placeholder in the help of the flag.
        help: help of the flag.
    """

    section: str
    read: Callable[[Any], Any]
    default: Any
    metavar: str
    help: str


@dataclass(frozen=True)
class Question:
    """A consistent scenario.

    Attributes:
        model: the model.
        cluster: the cluster.
        layouts: one layout for each batch size, otherwise equal.
        budget: bytes that each GPU may use.
        calibration: ("idle" or "naive_overhead", share), or None for transfers at the assumed rates.
        kinds: kinds of windows (idle times of the GPU) that the planner may use to execute operators again.
    """

    model: Model
    cluster: Cluster
    layouts: tuple[Layout, ...]
    budget: float
    calibration: tuple[str, float] | None = None
    kinds: tuple[str, ...] = INTER + INTRA


_COUNT, _SHARE = whole(1), between(1e-6, 0.999)


def _wholes(value: Any) -> tuple[int, ...]:
    parts = value if isinstance(value, list) else str(value).split(",")
    return tuple(dict.fromkeys(_COUNT(part) for part in parts))


def _one_of(names: Sequence[str]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"one of {', '.join(names)} is needed")
        return value

    return read


def _flag(value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ValueError("true or false is needed")
    return str(value).lower() == "true"


_DEVICES = f"one of {', '.join(DEVICES)} (default: h200)"
FIELDS = {
    "model": Field("model", str, None, "NAME", f"one of {', '.join(MODELS)}"),
    "sequence": Field("model", _COUNT, None, "N", "number of tokens of a sequence (default: that of the model)"),
    "device": Field("cluster", str, "h200", "NAME", _DEVICES),
    "gpus": Field("cluster", _COUNT, None, "N", "number of GPUs in all; GPUs that do not suffice for a whole copy of "
                                                "the model stay unused"),
    "per-node": Field("cluster", _COUNT, 8, "N", "number of GPUs in a node (default: 8)"),
    "network": Field("cluster", gigabytes_per_second, None, "GB/S", "bandwidth between nodes for each GPU, one way "
                                                                    "(default: that of NVIDIA's own systems)"),
    "memory": Field("cluster", size, None, "SIZE", "memory budget of each GPU, such as 80GB (default: the memory of "
                                                   "the device)"),
    "pp": Field("layout", _COUNT, 1, "N", "number of pipeline stages (default: 1)"),
    "chunks": Field("layout", _COUNT, 1, "N", "number of model chunks of each stage; more than 1: interleaved "
                                              "schedule (default: 1)"),
    "tp": Field("layout", _COUNT, None, "N", "tensor-parallel size, with sequence parallelism (default: the GPUs of "
                                             "a node)"),
    "ep": Field("layout", _COUNT, None, "N", "expert-parallel size, within the tensor-parallel group (default: the "
                                             "tensor-parallel size)"),
    "dp": Field("layout", _COUNT, None, "N", "data-parallel size (default: as large as the number of GPUs allows)"),
    "batch": Field("layout", _wholes, (16,), "N[,N]", "number of sequences of an iteration, over all data-parallel "
                                                      "copies (default: 16)"),
    "micro": Field("layout", _COUNT, 1, "N", "number of sequences of a microbatch (default: 1)"),
    "recompute": Field("layout", _one_of(RECOMPUTE), "full", "HOW", "activation recomputation: full (every layer is "
                                                                    "a segment) or none"),
    "early-stop": Field("layout", _flag, False, "BOOL", "whether recomputation omits the last operator of a segment, "
                                                        "as torch's own checkpointing does and Megatron's does not "
                                                        "(default: false)"),
    "fused-gate": Field("layout", _flag, True, "BOOL", "whether the gate and up matrices of an MLP are one matrix "
                                                       "product, as in Megatron (default: true)"),
    "state": Field("layout", _one_of(tuple(STATES)), "megatron", "NAME", "bytes of training state per parameter: "
                                                                         "megatron (18, of which 12 are sharded over "
                                                                         "the copies) or titan (16)"),
    "idle": Field("calibration", _SHARE, None, "SHARE", "slow all transfers down until stages are idle for this "
                                                        "share of the time"),
    "naive-overhead": Field("calibration", _SHARE, None, "SHARE", "slow all transfers down until naive DMR has this "
                                                                  "overhead"),
    "bubbles": Field("plan", _flag, True, "BOOL", "whether pipeline bubbles are used as windows, too (default: true)"),
}  # fmt: skip
"""Name of the flag -> field. In files, names contain "_" instead of "-"."""


def read_file(path: str | Path) -> dict[str, Any]:
    """Return the values of a scenario file by the names of :data:`FIELDS`.

    Raises:
        UserError: the file cannot be read, is no TOML, or contains an invalid section, key or value.
    """
    try:
        text = tomllib.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the scenario {path} cannot be read: {error}", "see examples/dmr for such files") from error
    values: dict[str, Any] = {}
    for section, entries in text.items():
        there = [name for name, field in FIELDS.items() if field.section == section]
        if not there or not isinstance(entries, dict):
            sections = ", ".join(f"[{name}]" for name in dict.fromkeys(field.section for field in FIELDS.values()))
            raise UserError(f"{path}: {section!r} is not a section of a scenario", f"there are: {sections}")
        for key, value in entries.items():
            name = key.replace("_", "-")
            if name not in there:
                keys = ", ".join(each.replace("-", "_") for each in there)
                raise UserError(f"{path}: [{section}] has no {key!r}", f"it has: {keys}")
            values[name] = _read(name, value, f"{path}: {key} = {value!r}")
    return values


def read_flags(given: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the values of the flags that were given, by the names of :data:`FIELDS`.

    Raises:
        UserError: a value is invalid.
    """
    return {name: _read(name, value, f"--{name} {value}") for name, value in given.items() if value is not None}


def _read(name: str, value: Any, said: str) -> Any:
    try:
        return FIELDS[name].read(value)
    except ValueError as error:
        raise UserError(f"{said}: {error}", f"{name}: {FIELDS[name].help}") from error


def question(values: Mapping[str, Any]) -> Question:
    """Build the question from values by the names of :data:`FIELDS`.

    Raises:
        UserError: a value is missing, or contradicts another one.
    """
    has = {name: values.get(name, field.default) for name, field in FIELDS.items()}
    for name in ("model", "gpus"):
        if has[name] is None:
            raise UserError(f"{name} is not given", f"give --{name}: {FIELDS[name].help}")
    model, device = model_named(has["model"]), device_named(has["device"])
    model = model if has["sequence"] is None else replace(model, sequence=has["sequence"])
    network = NETWORKS[device.name] if has["network"] is None else has["network"] * GB
    cluster = Cluster(device, has["gpus"], has["per-node"], network, AchievedShares())
    others = {name: has[name] for name in ("micro", "recompute", "dp", "chunks")}
    others |= {"early_stop": has["early-stop"], "fused_gate": has["fused-gate"], "state": STATES[has["state"]]}
    sizes = (has["pp"], has["tp"], has["ep"])
    layouts = tuple(fitted(model, cluster, *sizes, batch=batch, **others) for batch in has["batch"])
    return Question(
        model=model,
        cluster=cluster,
        layouts=layouts,
        budget=device.memory if has["memory"] is None else has["memory"],
        calibration=_calibration(has),
        kinds=tuple(kind for kind in INTER + INTRA if has["bubbles"] or kind != "bubble"),
    )


def _calibration(has: Mapping[str, Any]) -> tuple[str, float] | None:
    given = [(name.replace("-", "_"), has[name]) for name in ("idle", "naive-overhead") if has[name] is not None]
    if len(given) > 1:
        raise UserError("transfers cannot be calibrated to an idle share and a naive overhead at once", "give one")
    return given[0] if given else None
