"""Scenario files: lists of faults with a seed, as YAML, TOML or JSON. ``ft.faults.keys.SCENARIO`` shows an example."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base import structured_file
from ft.base.errors import Problems, UserError
from ft.faults.spec import FaultSpec, from_values, parse


@dataclass(frozen=True)
class Scenario:
    """The content of a scenario file.

    Attributes:
        specs: the faults that were asked for.
        seed: seed for random victims and times, or None if the file has none.
    """

    specs: list[FaultSpec]
    seed: int | None = None


def read_scenario(path: str | Path) -> Scenario:
    """Read a scenario file. The path of a trace file in it is relative to the folder of the scenario file.

    Raises:
        UserError: the file cannot be read or an entry is not valid; the message names the entry by its position.
    """
    path = Path(path)
    values = structured_file.read(path, "scenario")
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
        specs += _specs(entry, path, f"{path}, fault {number}")
    return Scenario(specs, seed)


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
