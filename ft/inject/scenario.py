"""Scenario files: the faults of an experiment with their seed, as JSON or TOML.

seed = 7
faults = ["kill@step=20:rank=3", {kind = "slow", time = "30s", rank = "random", for = "5s"}]
"""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.errors import UserError
from ft.inject.spec import FaultSpec, from_values, parse


@dataclass(frozen=True)
class Scenario:
    """Faults as they were asked for, and the seed to draw what is open with (None: the file has none)."""

    specs: list[FaultSpec]
    seed: int | None = None


def read_scenario(path: str | Path) -> Scenario:
    """Reads a scenario file. A trace in it is found from the file's folder.

    Raises:
        UserError: it cannot be read, or is wrong; the fault is named by its place in the list.
    """
    path = Path(path)
    values = _load(path)
    if isinstance(values, list):
        values = {"faults": values}
    faults = values.get("faults") if isinstance(values, dict) else None
    if not isinstance(faults, list) or set(values) - {"faults", "seed"}:
        raise UserError(f"scenario {path} is no list of faults with a seed", 'keys: "faults" (a list), "seed"')
    seed = values.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise UserError(f"scenario {path}: seed {seed!r} is no whole number", "for example: seed = 7")
    specs = []
    for number, entry in enumerate(faults, 1):
        specs += _specs(entry, path, f"{path}, fault {number}")
    return Scenario(specs, seed)


def _specs(entry: Any, path: Path, place: str) -> list[FaultSpec]:
    if isinstance(entry, str):
        return parse(entry)
    if not isinstance(entry, dict):
        raise UserError(
            f"{place}: {entry!r} is no fault", 'a text like "kill@step=20", or an object with kind and keys'
        )
    if "trace" in entry:
        entry = {**entry, "trace": str(path.parent / str(entry["trace"]))}
    return [from_values(entry, place)]


def _load(path: Path) -> Any:
    try:
        text = path.read_text()
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UserError(f"scenario {path} cannot be read: {error}", "give a readable file") from error
    except ValueError as error:
        raise UserError(f"scenario {path} is not {path.suffix[1:].upper()}: {error}", "correct the file") from error
