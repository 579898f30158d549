"""The table of all protections: the order in which they wrap a training step, which exclude each other, and which modes
of the trainer they cannot protect, and why.

The table is data. ``ft protections`` prints it, the trainer and ``ft run`` read it before they start anything, and
``docs/protections.md`` is generated from it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ft.base.errors import Problem

if TYPE_CHECKING:
    from ft.protection.contract import Protection


@dataclass(frozen=True)
class ProtectionEntry:
    """One protection.

    Attributes:
        home: "module:class" of its :class:`ft.protection.contract.Protection`.
        checks: module with a function ``check(options, grid, replicas)`` that yields the problems of its flags;
            importable without torch. "": there are no flags to check.
        flags: attribute names of the trainer's flags, any of which asks for the protection.
        variables: environment variables, any of which asks for the protection; ``ft run`` sets them. A protection
            without flags and variables is in every run, such as one that a user's script registers.
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
    """Two protections that exclude each other."""

    one: str
    other: str
    why: str
    fix: str = "use only one of the two"


@dataclass(frozen=True)
class Mode:
    """A mode of the trainer that some protections cannot protect.

    Attributes:
        fix: what a user can do; "": drop the flag.
        values: the values of the flags that are refused, as shell patterns (``-*``: negative numbers); empty: all
            values that turn it on.
        beside: other flags on which the refusal depends, and the values with which it holds; "" stands for a flag that
            is off, and no value for all that turn it on.
    """

    flags: tuple[str, ...]
    protections: tuple[str, ...]
    why: str
    fix: str = ""
    values: tuple[str, ...] = ()
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def given(self, core: Any) -> Iterator[tuple[str, str]]:
        """Yield (flag, value) for each flag with which megatron-core's options ``core`` turn on this mode."""
        if all(_is_among(_value(core, flag), values) for flag, values in self.beside.items()):
            for flag in self.flags:
                value = _value(core, flag)
                if _is_among(value, self.values):
                    yield flag, value


HOT_SWAP, REPLICAS, STACKS = "hot-swap", "replicas", "stacked shards"
STAGES, SWAPPED = "stage rebuild", "swapped ends"
DOUBLE, PROFILE = "double execution", "profile"

TABLE: list[ProtectionEntry] = [
    ProtectionEntry(
        HOT_SWAP,
        "a standby replaces a dead worker and restores the state from peers' memory",
        "DEADPOOL",
        "ft.systems.hot_swap.layer:HotSwap",
        asked_by="--ft-hot-swap",
        checks="ft.systems.hot_swap.flags",
        flags=("ft_hot_swap",),
    ),
    ProtectionEntry(
        REPLICAS,
        "when a replica fails, the other replicas continue training, and the failed one catches up later",
        "FT-HSDP",
        "ft.systems.hsdp.layer:Replicas",
        asked_by="--ft-hsdp-replicas",
        checks="ft.systems.hsdp.flags",
        variables=("FT_HSDP_REPLICA",),
    ),
    ProtectionEntry(
        STACKS,
        "the other groups compute the data of lost groups in the same step",
        "SPARe",
        "ft.systems.spare.layer:StackedShards",
        asked_by="--ft-spare-redundancy",
        variables=("FT_SPARE_REDUNDANCY",),
        needs=(REPLICAS,),
    ),
    ProtectionEntry(
        STAGES,
        "a pipeline stage that is lost with all its copies is rebuilt from its neighbours",
        "CheckFree",
        "ft.systems.checkfree.layer:StageRebuild",
        asked_by="--ft-checkfree",
        checks="ft.systems.checkfree.flags",
        flags=("ft_checkfree", "ft_checkfree_plus"),
        needs=(HOT_SWAP,),
    ),
    ProtectionEntry(
        SWAPPED,
        "half of the microbatches pass the first two and the last two stages in swapped order, so that these can be "
        "rebuilt, too",
        "CheckFree+",
        "ft.systems.checkfree.layer:SwappedEnds",
        asked_by="--ft-checkfree-plus",
        flags=("ft_checkfree_plus",),
        needs=(STAGES,),
    ),
    ProtectionEntry(
        DOUBLE,
        "every operator is executed twice and the results are compared; after a mismatch the step is repeated",
        "SpareTrain",
        "ft.systems.dmr.layer:DoubleExecution",
        asked_by="--ft-dmr, --ft-dmr-plan",
        checks="ft.systems.dmr.flags",
        flags=("ft_dmr", "ft_dmr_plan"),
    ),
    ProtectionEntry(
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

_SENDING = (HOT_SWAP, REPLICAS)
"""Protections that give a worker the state of others, and repeat a step that was interrupted."""

_TWICE = (DOUBLE, PROFILE)
_REPEATING = (*_SENDING, DOUBLE)
"""Protections that can execute a step again, for which they restore the state before it."""

_IS_PRECISION_AWARE: Mapping[str, tuple[str, ...]] = {"--use-precision-aware-optimizer": ()}
_GRAPHS = "--cuda-graph-impl", "--enable-cuda-graph", "--external-cuda-graph", "--optimizer-cuda-graph"

_WEIGHT_SHARDS = "--tensor-parallel-num-weight-shards", "--expert-tensor-parallel-num-weight-shards"


def _twice(why: str) -> str:
    return f"it {why}, which DMR cannot execute a second time"


MODES: list[Mode] = [
    Mode(
        ("--use-precision-aware-optimizer",),
        _SENDING,
        "without --bf16 the optimizer of Transformer Engine keeps the weights themselves in its state",
        "add --bf16",
        beside={"--bf16": ("",)},
    ),
    Mode(
        ("--exp-avg-dtype", "--exp-avg-sq-dtype"),
        _SENDING,
        "moments in fp8 are tensors of Transformer Engine's own kind, whose bytes and scales no copy has",
        "use fp32, bf16 or fp16",
        ("fp8",),
        _IS_PRECISION_AWARE,
    ),
    Mode(
        ("--optimizer-cpu-offload",),
        _TWICE,
        _twice("copies gradients and weights between the device and optimizers on the host beside the operators"),
    ),
    Mode(
        ("--fp8-format",),
        (REPLICAS, STAGES),
        "with delayed scaling (--fp8-recipe delayed, the default) the layers keep scales of earlier steps, which "
        "differ between replicas, and which no other stage has",
        "add --fp8-recipe tensorwise, or another one without a history",
        beside={"--fp8-recipe": ("", "delayed")},
    ),
    Mode(
        ("--fp8-param-gather", "--fp4-param-gather"),
        _SENDING,
        "parameters are quantized, and no copy of the state has their scales",
    ),
    Mode(
        _GRAPHS,
        _SENDING,
        "CUDA graphs keep the communicators that a recovery aborts, and an interrupted step leaves graphs between "
        "their forward and their backward pass",
    ),
    Mode(
        ("--use-torch-fsdp2",),
        (STAGES, *_TWICE),
        "it shards parameters and gathers them in hooks of the layers, which only hot-swap and replicas know",
        "use --use-distributed-optimizer",
    ),
    Mode(
        ("--cpu-offloading-num-layers", "--fine-grained-activation-offloading"),
        (HOT_SWAP,),
        "an interrupted step leaves activations in the queues between device and host, which only whole steps empty",
    ),
    Mode(("--tp-comm-overlap",), (HOT_SWAP,), "its buffers cannot be connected to a new process"),
    Mode(
        ("--moe-token-dispatcher-type",),
        (HOT_SWAP,),
        "its buffers are mapped into the ranks once, and cannot be connected to a new process",
        "use --moe-token-dispatcher-type alltoall",
        ("flex",),
        {"--num-experts": ()},
    ),
    Mode(
        ("--use-nccl-ub",),
        (HOT_SWAP,),
        "its buffers are registered with the communicators once, and a recovery makes new communicators",
    ),
    Mode(
        ("--fim-data",),
        _REPEATING,
        "its data set draws from a generator of its own, so that a sample that is read a second time differs",
    ),
    Mode(
        ("--logits-load-dir", "--logits-save-dir"),
        _REPEATING,
        "logits are read and written one after another, which does not go back to the beginning of a step",
    ),
    Mode(
        ("--moe-router-force-biased",),
        _REPEATING,
        "with a negative value each layer draws its bias in the first forward pass of a process, so that a new worker, "
        "or a first step that is repeated, draws others",
        "give a positive value",
        ("-*",),
    ),
    Mode(
        ("--qk-clip",),
        (HOT_SWAP, DOUBLE),
        "it scales the model's weights and the optimizer's separately, so that the first cannot be computed from the "
        "second, and it uses maxima that an evaluation has left",
    ),
    Mode(
        ("--delay-wgrad-compute", "--overlap-dispatch-backward-with-experts-wgrad"),
        _SENDING,
        "an interrupted step leaves weight gradients that Transformer Engine has yet to compute",
    ),
    Mode(
        _WEIGHT_SHARDS,
        _SENDING,
        "an interrupted step leaves gathers and reductions under way, which belong to the chain of all weights",
    ),
    Mode(
        ("--moe-routing-trace-path",),
        _REPEATING,
        "a step that is repeated is recorded twice, and a recovery adds the hooks again and empties the files",
    ),
    Mode(
        ("--fault-injector-ranks", "--fault-injector-num-ranks"),
        _SENDING,
        "each recovery plans the same faults again",
        "plan faults with ft run --inject",
    ),
    Mode(("--tp-comm-overlap",), _TWICE, _twice("lets kernels write to the buffers of other ranks")),
    Mode(
        (
            "--delay-wgrad-compute",
            "--overlap-dispatch-backward-with-experts-wgrad",
            "--defer-embedding-wgrad-compute",
        ),
        _TWICE,
        _twice("computes gradients outside of the backward pass"),
    ),
    Mode(_WEIGHT_SHARDS, _TWICE, _twice("gathers the next weight and sums another one's gradient within each layer")),
    Mode(("--moe-paged-stash",), _TWICE, _twice("moves activations by kernels outside of the layers")),
    Mode(
        ("--overlap-moe-expert-parallel-comm",),
        _TWICE,
        _twice("has a schedule of its own, with messages that nothing compares"),
    ),
    Mode(
        ("--overlap-param-gather-with-optimizer-step",),
        _TWICE,
        _twice("gathers parameters in one step for the next one"),
    ),
    Mode(("--dsa-kernel-backend",), _TWICE, _twice("chooses keys by a kernel outside of the layers' functions")),
    Mode(
        ("--fp8-param-gather", "--fp4-param-gather"),
        _TWICE,
        _twice("casts parameters by kernels outside of the layers"),
    ),
    Mode(_GRAPHS, _TWICE, _twice("replays kernels that nobody calls")),
]
"""The modes of the trainer that some protections cannot protect. ``ProtectionEntry.checks`` are for what depends on
sizes and on combinations."""


def register(entry: ProtectionEntry, *conflicts: Conflict) -> None:
    """Add a user-defined protection as the innermost layer. Call it before the trainer starts."""
    TABLE.append(entry)
    CONFLICTS.extend(conflicts)


def asked_for(flags: Any, environment: Mapping[str, str]) -> list[ProtectionEntry]:
    """Return the protections that the run asks for, the outermost first."""
    return [entry for entry in TABLE if entry.is_asked(flags, environment)]


def problems(options: Any, grid: Any, replicas: int, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield (problem, fix) for protections that exclude each other, and for flags of protections that cannot work.

    Args:
        options: the trainer's options, with the flags of protections in ``fault_tolerance``.
        environment: the environment variables that ``ft run`` sets for workers.
        replicas: number of replicas of the model; 0: the run has none.
    """
    if replicas:
        environment = {**environment, "FT_HSDP_REPLICA": environment.get("FT_HSDP_REPLICA", "0")}
    entries = {entry.name: entry for entry in asked_for(options.fault_tolerance, environment)}
    for conflict in CONFLICTS:
        if conflict.one in entries and conflict.other in entries:
            pair = [f"{name} ({entries[name].asked_by})" for name in (conflict.one, conflict.other)]
            yield f"{pair[0]} cannot be combined with {pair[1]}: {conflict.why}", conflict.fix
    yield from refused_modes(options.core, entries.values())
    for entry in TABLE:
        if entry.checks:
            yield from import_module(entry.checks).check(options, grid, replicas)


def refused_modes(core: Any, asked: Iterable[ProtectionEntry]) -> Iterator[Problem]:
    """Yield (problem, fix) for each mode of the trainer that a protection cannot protect."""
    entries = list(asked)
    for mode in MODES:
        concerned = [entry for entry in entries if entry.name in mode.protections]
        for flag, value in mode.given(core) if concerned else ():
            shown = flag if value == str(True) else f"{flag} {value}"
            names = " and ".join(f"{entry.name} ({entry.asked_by})" for entry in concerned)
            drop = " and ".join(entry.asked_by for entry in concerned)
            yield f"{shown} cannot be protected by {names}: {mode.why}", f"{mode.fix or f'drop {flag}'}, or drop {drop}"


_FIELDS = {"--fp8-format": "fp8", "--use-nccl-ub": "nccl_ub"}
"""Flags whose option has another name -> the name."""

_OFF = {
    _WEIGHT_SHARDS[0]: ("tensor_model_parallel_size",),
    _WEIGHT_SHARDS[1]: ("expert_tensor_parallel_size", "tensor_model_parallel_size"),
}
"""Flag -> option with whose value the flag changes nothing; the second one is used if the first one is None."""

_TYPES = {"torch.float16": "fp16", "torch.uint8": "fp8"}
"""Types of numbers, as Megatron-LM's parsed arguments have them -> their names in flags."""


def _value(core: Any, flag: str) -> str:
    """Return the value of a flag as text; "": it is off, or this release of megatron-core does not have it."""
    off = next((str(n) for name in _OFF.get(flag, ()) if (n := getattr(core, name, None)) is not None), "")
    for name in (_FIELDS.get(flag, ""), flag.removeprefix("--").replace("-", "_")):
        value = getattr(core, name, None) if name else None
        if value not in (None, False, 0, "", "none", []) and str(value) != off:
            return _TYPES.get(str(value), str(value))
    return ""


def _is_among(value: str, values: tuple[str, ...]) -> bool:
    return any(fnmatchcase(value, pattern) for pattern in values) if values else value != ""


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
    lines += [
        "",
        "These modes of the trainer cannot be protected:",
        "",
        "| flag | by | why | what to do |",
        "|---|---|---|---|",
    ]
    for mode in MODES:
        flags = ", ".join(f"`{' '.join((flag, '/'.join(mode.values))).strip()}`" for flag in mode.flags)
        lines.append(f"| {flags} | {', '.join(mode.protections)} | {mode.why} | {mode.fix or 'drop it'} |")
    return "\n".join(lines) + "\n"
