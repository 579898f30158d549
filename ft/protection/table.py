"""Which protections there are, in which order they wrap a training step, and which do not go together, and why.

This is data: ``ft protections`` prints it, the trainer and ``ft run`` read it before anything is started, and
``docs/protections.md`` is made of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ft.base.errors import Problem

if TYPE_CHECKING:
    from ft.protection.contract import Protection


@dataclass(frozen=True)
class Entry:
    """One protection.

    Attributes:
        name: what messages and reports call it. does: what it gives, in a few words. paper: where it is from.
        home: "module:class" of its :class:`ft.protection.contract.Protection`.
        checks: module with ``check(options, grid, replicas)``, which says what is wrong with its flags; importable
            without torch. "": it has no flags to check.
        flags: flags of the trainer, any of which asks for it, as attribute names.
        variables: variables of the environment, any of which asks for it; ``ft run`` sets them. Without flags and
            variables a protection is in every run, as one that a script of a user's own registers.
        asked_by: how a user asks for it.
        needs: names of the protections that it is part of.
    """

    name: str
    does: str
    paper: str
    home: str
    asked_by: str
    checks: str = ""
    flags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def is_asked(self, flags: Any, environment: Mapping[str, str]) -> bool:
        """Return whether the trainer's ``flags`` or the environment ask for it."""
        if not self.flags and not self.variables:
            return True
        wanted = any(getattr(flags, name, None) not in (None, False) for name in self.flags)
        return wanted or any(environment.get(name, "") != "" for name in self.variables)

    def load(self) -> type["Protection"]:
        """Import the system and return its class."""
        module, name = self.home.split(":")
        found: type[Protection] = getattr(import_module(module), name)
        return found


@dataclass(frozen=True)
class Conflict:
    """Two protections that cannot protect the same run. ``why``: a sentence. ``fix``: what to do."""

    one: str
    other: str
    why: str
    fix: str = "drop one of the two"


HOT_SWAP, REPLICAS, STACKS = "hot-swap", "replicas", "stacked shards"
STAGES, SWAPPED = "stage rebuild", "swapped ends"
DOUBLE, PROFILE = "double execution", "profile"

TABLE: list[Entry] = [
    Entry(
        HOT_SWAP,
        "a standby takes a dead worker's place, with its state from memory",
        "DEADPOOL",
        "ft.systems.hot_swap.layer:HotSwap",
        asked_by="--ft-hot-swap",
        checks="ft.systems.hot_swap.flags",
        flags=("ft_hot_swap",),
    ),
    Entry(
        REPLICAS,
        "when a replica fails the others train on, and it catches up",
        "FT-HSDP",
        "ft.systems.hsdp.layer:Replicas",
        asked_by="--ft-hsdp-replicas",
        checks="ft.systems.hsdp.flags",
        variables=("FT_HSDP_REPLICA",),
    ),
    Entry(
        STACKS,
        "what lost groups would have computed the others compute in the same step",
        "SPARe",
        "ft.systems.spare.layer:StackedShards",
        asked_by="--ft-spare-redundancy",
        variables=("FT_SPARE_REDUNDANCY",),
        needs=(REPLICAS,),
    ),
    Entry(
        STAGES,
        "a pipeline stage that is lost with all its copies is rebuilt from its neighbours",
        "CheckFree",
        "ft.systems.checkfree.layer:StageRebuild",
        asked_by="--ft-checkfree",
        checks="ft.systems.checkfree.flags",
        flags=("ft_checkfree", "ft_checkfree_plus"),
        needs=(HOT_SWAP,),
    ),
    Entry(
        SWAPPED,
        "half of the microbatches swap the stages at both ends, so that these can be rebuilt, too",
        "CheckFree+",
        "ft.systems.checkfree.layer:SwappedEnds",
        asked_by="--ft-checkfree-plus",
        flags=("ft_checkfree_plus",),
        needs=(STAGES,),
    ),
    Entry(
        DOUBLE,
        "every operator is executed twice and compared; a mismatch redoes the step",
        "SpareTrain",
        "ft.systems.dmr.layer:DoubleExecution",
        asked_by="--ft-dmr, --ft-dmr-plan",
        checks="ft.systems.dmr.flags",
        flags=("ft_dmr", "ft_dmr_plan"),
    ),
    Entry(
        PROFILE,
        "a few steps are measured for a plan of double execution, and the run ends",
        "SpareTrain",
        "ft.systems.dmr.layer:Profile",
        asked_by="--ft-dmr-profile",
        flags=("ft_dmr_profile",),
    ),
]
"""All protections, the outermost first: each wraps what those below it do in a step."""

CONFLICTS: list[Conflict] = [
    Conflict(
        HOT_SWAP, REPLICAS, "a replica that has lost a worker is rebuilt as a whole, from the state of the others"
    ),
    Conflict(STAGES, REPLICAS, "a replica that has lost a stage takes it from the others, exactly"),
    Conflict(DOUBLE, REPLICAS, "the other replicas wait in the exchange for a step that is done once more"),
    Conflict(PROFILE, REPLICAS, "a profile is one run's, and replicas wait for one another"),
    Conflict(DOUBLE, SWAPPED, "it follows megatron-core's own schedules, and swapped ends have another"),
    Conflict(PROFILE, SWAPPED, "it follows megatron-core's own schedules, and swapped ends have another"),
    Conflict(DOUBLE, PROFILE, "a profile measures a run without double execution"),
]


def register(entry: Entry, *conflicts: Conflict) -> None:
    """Add a protection of one's own as the innermost layer, before the trainer starts."""
    TABLE.append(entry)
    CONFLICTS.extend(conflicts)


def asked_for(flags: Any, environment: Mapping[str, str]) -> list[Entry]:
    """Return the protections that are asked for, the outermost first."""
    return [entry for entry in TABLE if entry.is_asked(flags, environment)]


def problems(options: Any, grid: Any, replicas: int, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield (problem, fix) for protections that do not go together, and for flags of theirs that cannot work.

    Args:
        options: the trainer's, with the flags of protections in ``fault_tolerance``.
        grid: sizes of the trainer's parallel groups. replicas: of the model, 0: it has none.
        environment: as ``ft run`` sets it for workers.
    """
    if replicas:
        environment = {**environment, "FT_HSDP_REPLICA": environment.get("FT_HSDP_REPLICA", "0")}
    entries = {entry.name: entry for entry in asked_for(options.fault_tolerance, environment)}
    for conflict in CONFLICTS:
        if conflict.one in entries and conflict.other in entries:
            pair = [f"{name} ({entries[name].asked_by})" for name in (conflict.one, conflict.other)]
            yield f"{pair[0]} does not go with {pair[1]}: {conflict.why}", conflict.fix
    for entry in TABLE:
        if entry.checks:
            yield from import_module(entry.checks).check(options, grid, replicas)


def text() -> str:
    """The table for a terminal, and for ``docs/protections.md``."""
    lines = ["| | protection | asked for by | needs | what it does | paper |", "|---|---|---|---|---|---|"]
    for number, entry in enumerate(TABLE, 1):
        needs = ", ".join(entry.needs)
        lines.append(f"| {number} | {entry.name} | `{entry.asked_by}` | {needs} | {entry.does} | {entry.paper} |")
    lines += ["", "Each layer wraps what those below it do in a step.", "", "Not in one run:", ""]
    lines += [f"- {each.one} and {each.other}: {each.why}." for each in CONFLICTS]
    return "\n".join(lines) + "\n"
