"""Implement ``ft dmr estimate``: predict the cost of executing each operator twice (DMR), without any hardware.

A scenario file is TOML with the sections and keys of :data:`FIELDS`. Flags override it.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ft.base import files
from ft.base.errors import UserError
from ft.base.quantities import argument, between, gigabytes_per_second, size, whole
from ft.lab.estimate.answer import Question, as_text, as_values, cluster_of, estimate
from ft.lab.estimate.layout import DEVICES, GB, STATES, Cluster, fitted
from ft.lab.estimate.models import MODELS
from ft.lab.estimate.profile import profile
from ft.systems.dmr.plan.file import write_trace
from ft.systems.dmr.plan.trace import INTER, INTRA


class Field(NamedTuple):
    """A key of the scenario file, and the flag of the same name.

    Attributes:
        section: section of the file.
        read: converts text or a TOML value to the value; raises ValueError for invalid input.
        default: the default value; None: there is none.
    """

    section: str
    read: Callable[[Any], Any]
    default: Any
    metavar: str
    help: str


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
    "model": Field("model", _one_of(tuple(MODELS)), None, "NAME", f"one of {', '.join(MODELS)}"),
    "sequence": Field("model", _COUNT, None, "N", "number of tokens of a sequence (default: that of the model)"),
    "device": Field("cluster", _one_of(tuple(DEVICES)), "h200", "NAME", _DEVICES),
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
    "recompute": Field("layout", _one_of(("full", "none")), "full", "HOW", "activation recomputation: full (every "
                                                                            "layer is a segment) or none"),
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
        UserError: the file cannot be read, or contains an invalid section, key or value.
    """
    text = files.read_structured(path, "scenario")
    if not isinstance(text, dict):
        raise UserError(f"scenario {path} has no sections", "see examples/dmr for one")
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
            try:
                values[name] = FIELDS[name].read(value)
            except ValueError as error:
                said = f"{path}: {key} = {value!r}: {error}"
                raise UserError(said, f"{name}: {FIELDS[name].help}") from error
    return values


def question(values: Mapping[str, Any]) -> Question:
    """Build the question from values by the names of :data:`FIELDS`.

    Raises:
        UserError: a value is missing, or contradicts another one.
    """
    has = {name: values.get(name, field.default) for name, field in FIELDS.items()}
    for name in ("model", "gpus"):
        if has[name] is None:
            raise UserError(f"{name} is not given", f"give --{name}: {FIELDS[name].help}")
    model, device = MODELS[has["model"]], DEVICES[has["device"]]
    model = model if has["sequence"] is None else replace(model, sequence=has["sequence"])
    network = device.network if has["network"] is None else has["network"] * GB
    cluster = Cluster(device, has["gpus"], has["per-node"], network)
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


_DESCRIPTION = """\
Estimate what DMR will cost on a cluster that need not exist. The iteration is computed from published model shapes,
data sheets and assumed efficiencies, and planned by the planner of real runs. Overheads are shares of an iteration
without DMR. A scenario file (examples/dmr) has a key for each flag; flags override the file."""


def add_parser(subparsers, name: str = "estimate") -> None:
    """Add the subcommand: ``ft dmr estimate``, and under another name ``ft plan dmr``."""
    parser = subparsers.add_parser(
        name,
        help="estimate what DMR will cost a model on a cluster, without hardware",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="a TOML file")
    for name, field in FIELDS.items():
        parser.add_argument(
            f"--{name}", type=argument(field.read), metavar=field.metavar, help=field.help.replace("%", "%%")
        )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the computed profile to this file, for ft dmr plan; needs a single batch size",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate.

    Raises:
        UserError: the scenario is inconsistent, or training without DMR does not fit the memory budget.
    """
    values = read_file(arguments.scenario) if arguments.scenario else {}
    flags = {name: getattr(arguments, name.replace("-", "_")) for name in FIELDS}
    given = {name: value for name, value in flags.items() if value is not None}
    for one, other in (("idle", "naive-overhead"), ("naive-overhead", "idle")):
        if one in given and other not in given:
            values.pop(other, None)
    asked = question(values | given)
    if arguments.out and len(asked.layouts) > 1:
        raise UserError(
            "a profile needs a single batch size, and there are several", "give one --batch, or remove --out"
        )
    cluster = cluster_of(asked)
    found = [estimate(asked, layout, cluster) for layout in asked.layouts]
    if arguments.out:
        write_trace(Path(arguments.out), profile(asked.model, asked.layouts[0], cluster, asked.budget))
    print(json.dumps(as_values(asked, cluster, found)) if arguments.json else as_text(asked, cluster, found))
    return 0
