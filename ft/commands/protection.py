"""Determine from the command line of ``ft run`` how a run is protected, and find flags that can have no effect.

For this project's own trainer, ``pretrain_gpt.py``, the trainer's flags decide. Any other script enables its protection
at run time by calling ``ft.attach`` or ``ft.protect``. If a script never calls them, this is noticed only when the run
ends (:mod:`ft.job.control.run_ends`).
"""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ft import faults as inject
from ft.adapters.megatron_lm import tree
from ft.base import files
from ft.base.checkout import CHECKOUT
from ft.base.errors import NOT_INJECTED, Problem
from ft.commands import checkouts
from ft.commands.arguments import misplaced
from ft.faults.faults import Fault
from ft.faults.table import DMR, FILES, row_of
from ft.job.agent.options import Script

if TYPE_CHECKING:
    from megatron.ft_trainer.arguments import Options

HOT_SWAP, REPLICAS, NOTHING, UNKNOWN = "hot-swap", "replicas", "nothing", "unknown"

TRAINER = CHECKOUT / "pretrain_gpt.py"


@dataclass(frozen=True)
class LaunchLine:
    """The settings from the command line of ``ft run`` that decide about the run's protection.

    Attributes:
        world_size: number of logical ranks (positions in the parallel grid); in a run with replicas, of one replica.
        flags: the given flags that have an effect only in a protected run, such as "--standby 1", as the user wrote
            them.
        replicas: number of FT-HSDP replicas; 0 for a run without replicas.
    """

    world_size: int
    flags: Sequence[str] = ()
    replicas: int = 0


@dataclass(frozen=True)
class RunProtection:
    """How a run is protected.

    Attributes:
        by: HOT_SWAP, REPLICAS, NOTHING, or UNKNOWN (the script may enable a protection when it runs).
        copies: number of copies of each worker's state in other processes.
    """

    by: str
    copies: int = 0


def is_trainer(script: "Script") -> bool:
    """Return whether ``script`` is this project's own ``pretrain_gpt.py`` or an identical copy of that file."""
    path = Path(script.target)
    if script.is_module:
        found = importlib.util.find_spec(script.target) if script.target == TRAINER.stem else None
        path = Path(found.origin) if found is not None and found.origin else path
    try:
        return path.samefile(TRAINER) or files.read(path) == TRAINER.read_bytes()
    except OSError:
        return False


def trainers_flags() -> list[str]:
    """Return all flags of this project's trainer, ``pretrain_gpt.py``."""
    from megatron.ft_trainer.arguments import all_flags

    return [*all_flags(), tree.NVIDIA]


def choose_trainer(given: argparse.Namespace) -> None:
    """If the script is ``pretrain_gpt.py``, replace it by the one that runs the trainer which its flags choose.

    Args:
        given: the parsed command line; its ``script``, ``script_args`` and ``module`` are changed.

    Raises:
        UserError: the trainer that is asked for cannot be used (:func:`ft.adapters.megatron_lm.tree.choose`).
    """
    is_module = getattr(given, "module", False)
    if given.script is None or not is_trainer(Script(given.script, is_module, given.script_args)):
        return
    is_nvidias, given.script_args = tree.choose(given.script_args, tree.installed_release())
    if is_nvidias:
        given.script, given.module = str(tree.SCRIPT), False


def examine(
    script: "Script", asked: LaunchLine | None, faults: Sequence[Fault] = ()
) -> tuple[RunProtection, list[Problem]]:
    """Return how the run is protected, and the problems found in the trainer's flags and in ``asked.flags``.

    Args:
        asked: settings from the command line of ``ft run``; None if the flags of ``ft run`` are invalid.
        faults: all faults that will be injected into the run.
    """
    size, replicas = (asked.world_size, asked.replicas) if asked is not None else (None, 0)
    if checkouts.is_protected_checkout(script) or (replicas and checkouts.is_checkout(script)):
        options, problems = checkouts.examine(script, size, replicas)
        if options is None or asked is None:
            return RunProtection(UNKNOWN), problems
        return _protection(options, asked, faults, problems)
    if not is_trainer(script) or {"-h", "--help"} & set(script.args):
        others = asked.replicas - 1 if asked is not None else -1
        protection = RunProtection(REPLICAS, others) if others >= 0 else RunProtection(UNKNOWN)
        return protection, checkouts.outside_checkout(script)
    from megatron.ft_trainer.arguments import needs, refusals

    here = {"has_te": needs.is_here(needs.TE), "has_gpu": needs.is_here(needs.GPU)}
    options, problems = refusals(script.args, size, **here, replicas=replicas)
    problems = [misplaced(problem) or (problem, fix) for problem, fix in problems]
    if options is None or asked is None:
        return RunProtection(UNKNOWN), problems
    return _protection(options, asked, faults, problems)


def _protection(
    options: "Options", asked: LaunchLine, faults: Sequence[Fault], problems: list[Problem]
) -> tuple[RunProtection, list[Problem]]:
    """Return how a run is protected, and ``problems`` with those of its faults."""
    if asked.replicas:
        if not options.fault_tolerance.ft_hot_swap:
            problems = problems + _no_use_of_standbys(asked.flags)
        return RunProtection(REPLICAS, asked.replicas - 1), problems + _useless(faults, options)
    if not options.fault_tolerance.ft_hot_swap:
        return RunProtection(NOTHING), problems + _never_act(asked.flags)
    return RunProtection(HOT_SWAP, options.fault_tolerance.ft_snapshot_peers), problems + _useless(faults, options)


def _useless(faults: Sequence[Fault], options: "Options") -> list[Problem]:
    return [problem for fault in faults for problem in _cannot_act(fault, options)]


def announcement(protection: RunProtection, nodes: int) -> str:
    """Return the sentence that ``ft run`` prints at the start of a run on ``nodes`` nodes about its protection."""
    if protection.by == NOTHING:
        return (
            "nothing protects this run: it ends if a worker dies (add --ft-hot-swap after pretrain_gpt.py to protect "
            "it)"
        )
    if protection.by == UNKNOWN:
        return (
            "nothing protects this run until its script calls ft.attach or ft.protect: until then the run ends if a "
            "worker dies"
        )
    if protection.by == REPLICAS:
        lone = "with one replica, nothing protects this run"
        text = "protected by replicas: if one replica loses a worker, the others continue training"
        text = lone if protection.copies == 0 else text
    elif protection.copies == 0:
        text = (
            "protected by hot-swap without copies: a lost worker's state is made from data-parallel peers or from the "
            "stages beside it (--ft-checkfree)"
        )
    else:
        text = f"protected by hot-swap: {protection.copies} other worker(s) hold a copy of each worker's state"
    return text + _where(nodes) if protection.copies else text


def has_joined(nodes: int) -> str:
    """Return the sentence that is printed once a script of unknown protection has enabled hot-swap at run time, and the
    first snapshots of all its workers have reached their peers.
    """
    state = "the script has joined the run, and the first snapshot of its whole state is complete"
    return f"{state}: from now on it is protected by hot-swap{_where(nodes)}"


def _where(nodes: int) -> str:
    return "" if nodes > 1 else "; all copies are on this host, so only a checkpoint survives the loss of this host"


def judge_faults(code: int, folder: Path, is_strict: bool, tell: Callable[[str], None]) -> int:
    """Tell which planned faults of a run that has ended were not injected, and return the exit code of ``ft run``.

    Args:
        is_strict: whether a run that ends with code 0 shall have another code if faults were not injected.
    """
    missed = inject.missed(folder)
    if missed:
        tell(missed)
    return NOT_INJECTED if missed and is_strict and code == 0 else code


def _never_act(flags: Sequence[str]) -> list[Problem]:
    if not flags:
        return []
    problem = f"{', '.join(flags)} has no effect: nothing protects a run of pretrain_gpt.py without --ft-hot-swap"
    names = ", ".join(dict.fromkeys(flag.split()[0] for flag in flags))
    return [(problem, f"add --ft-hot-swap after pretrain_gpt.py, or remove {names}")]


def _no_use_of_standbys(flags: Sequence[str]) -> list[Problem]:
    problem = "has no effect: standbys replace workers of a replica only with --ft-hot-swap"
    return [(f"{flag} {problem}", "add --ft-hot-swap after pretrain_gpt.py, or remove the flag") for flag in flags]


def _cannot_act(fault: Fault, options: "Options") -> list[Problem]:
    """Return the reasons why ``fault`` can have no effect in a protected run of the trainer; empty if it can."""
    row, last = row_of(fault), options.training.train_iters
    found = []
    if row.needs == DMR and options.fault_tolerance.ft_dmr is None and options.fault_tolerance.ft_dmr_plan is None:
        problem = f"the fault {fault} has no effect: DMR injects bit flips, and DMR is off"
        found.append((problem, "add --ft-dmr piggyback after pretrain_gpt.py, or remove the fault"))
    if row.where == FILES and not options.checkpoint.save:
        problem = f"the fault {fault} has no effect: there is no checkpoint to damage"
        found.append((problem, "add --save FOLDER after pretrain_gpt.py, or remove the fault"))
    if fault.step is not None and last is not None and fault.step > last:
        problem = f"the fault {fault} has no effect: the run ends with step {last} (--train-iters)"
        found.append((problem, f"give a step from 1 to {last}, or remove the fault"))
    return found
