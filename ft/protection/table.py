"""The table of all protections: the order in which they wrap a training step, and which exclude each other, and why.

The table is data. ``ft protections`` prints it, the trainer and ``ft run`` read it before they start anything, and
``docs/protections.md`` is generated from it.
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
        name: its name in messages and reports.
        does: what it provides, in a few words.
        paper: the paper that describes it.
        home: "module:class" of its :class:`ft.protection.contract.Protection`.
        checks: module with a function ``check(options, grid, replicas)`` that yields the problems of its flags;
            importable without torch. "": there are no flags to check.
        flags: attribute names of the trainer's flags, any of which asks for the protection.
        variables: environment variables, any of which asks for the protection; ``ft run`` sets them. A protection
            without flags and variables is in every run, such as one that a user's script registers.
        asked_by: how a user asks for it, for messages.
        needs: names of the protections that it requires.
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
        """Return whether the trainer's ``flags`` or the environment ask for this protection."""
        if not self.flags and not self.variables:
            return True
        wanted = any(getattr(flags, name, None) not in (None, False) for name in self.flags)
        return wanted or any(environment.get(name, "") != "" for name in self.variables)

    def load(self) -> type["Protection"]:
        """Import the system's module and return its protection class."""
        module, name = self.home.split(":")
        found: type[Protection] = getattr(import_module(module), name)
        return found


@dataclass(frozen=True)
class Conflict:
    """Two protections that exclude each other.

    Attributes:
        one: name of one protection.
        other: name of the other protection.
        why: the reason, as a sentence.
        fix: what a user can do.
    """

    one: str
    other: str
    why: str
    fix: str = "use only one of the two"


HOT_SWAP, REPLICAS, STACKS = "hot-swap", "replicas", "stacked shards"
STAGES, SWAPPED = "stage rebuild", "swapped ends"
DOUBLE, PROFILE = "double execution", "profile"

TABLE: list[Entry] = [
    Entry(
        HOT_SWAP,
        "a standby replaces a dead worker and restores the state from peers' memory",
        "DEADPOOL",
        "ft.systems.hot_swap.layer:HotSwap",
        asked_by="--ft-hot-swap",
        checks="ft.systems.hot_swap.flags",
        flags=("ft_hot_swap",),
    ),
    Entry(
        REPLICAS,
        "when a replica fails, the other replicas continue training, and the failed one catches up later",
        "FT-HSDP",
        "ft.systems.hsdp.layer:Replicas",
        asked_by="--ft-hsdp-replicas",
        checks="ft.systems.hsdp.flags",
        variables=("FT_HSDP_REPLICA",),
    ),
    Entry(
        STACKS,
        "the other groups compute the data of lost groups in the same step",
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
        "half of the microbatches pass the first two and the last two stages in swapped order, so that these can be "
        "rebuilt, too",
        "CheckFree+",
        "ft.systems.checkfree.layer:SwappedEnds",
        asked_by="--ft-checkfree-plus",
        flags=("ft_checkfree_plus",),
        needs=(STAGES,),
    ),
    Entry(
        DOUBLE,
        "every operator is executed twice and the results are compared; after a mismatch the step is repeated",
        "SpareTrain",
        "ft.systems.dmr.layer:DoubleExecution",
        asked_by="--ft-dmr, --ft-dmr-plan",
        checks="ft.systems.dmr.flags",
        flags=("ft_dmr", "ft_dmr_plan"),
    ),
    Entry(
        PROFILE,
        "a few steps are measured to plan double execution, and then the run ends",
        "SpareTrain",
        "ft.systems.dmr.layer:Profile",
        asked_by="--ft-dmr-profile",
        flags=("ft_dmr_profile",),
    ),
]
"""All protections, the outermost first: each wraps what those below it do in a step."""

CONFLICTS: list[Conflict] = [
    Conflict(PROFILE, REPLICAS, "a profile describes one world, and replicas wait for one another"),
    Conflict(PROFILE, SWAPPED, "a profile describes megatron-core's own schedules, and swapped ends need another one"),
    Conflict(DOUBLE, PROFILE, "a profile measures a run without double execution"),
]


def register(entry: Entry, *conflicts: Conflict) -> None:
    """Add a user-defined protection as the innermost layer. Call it before the trainer starts."""
    TABLE.append(entry)
    CONFLICTS.extend(conflicts)


def asked_for(flags: Any, environment: Mapping[str, str]) -> list[Entry]:
    """Return the protections that the run asks for, the outermost first."""
    return [entry for entry in TABLE if entry.is_asked(flags, environment)]


def problems(options: Any, grid: Any, replicas: int, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield (problem, fix) for protections that exclude each other, and for flags of protections that cannot work.

    Args:
        options: the trainer's options, with the flags of protections in ``fault_tolerance``.
        grid: sizes of the trainer's parallel groups.
        replicas: number of replicas of the model; 0: the run has none.
        environment: the environment variables that ``ft run`` sets for workers.
    """
    if replicas:
        environment = {**environment, "FT_HSDP_REPLICA": environment.get("FT_HSDP_REPLICA", "0")}
    entries = {entry.name: entry for entry in asked_for(options.fault_tolerance, environment)}
    for conflict in CONFLICTS:
        if conflict.one in entries and conflict.other in entries:
            pair = [f"{name} ({entries[name].asked_by})" for name in (conflict.one, conflict.other)]
            yield f"{pair[0]} cannot be combined with {pair[1]}: {conflict.why}", conflict.fix
    for entry in TABLE:
        if entry.checks:
            yield from import_module(entry.checks).check(options, grid, replicas)


def text() -> str:
    """Return the table as text for a terminal and for ``docs/protections.md``."""
    lines = ["| | protection | enabled by | needs | what it does | paper |", "|---|---|---|---|---|---|"]
    for number, entry in enumerate(TABLE, 1):
        needs = ", ".join(entry.needs)
        lines.append(f"| {number} | {entry.name} | `{entry.asked_by}` | {needs} | {entry.does} | {entry.paper} |")
    lines += [
        "",
        "Each layer wraps the work of the layers below it in a step.",
        "",
        "These protections exclude each other:",
        "",
    ]
    lines += [f"- {each.one} and {each.other}: {each.why}." for each in CONFLICTS]
    return "\n".join(lines) + "\n"
