"""Which protection a run has according to its command line, and which of its flags could have no effect.

For the fork's trainer, the trainer's flags decide. Another script joins the run by itself (``ft.attach``,
``ft.protect``) or never does, which is detected when the script has ended (:mod:`ft.job.control.run_ends`).
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ft.base.checkout import CHECKOUT
from ft.base.errors import Problem
from ft.commands.arguments import launchers_flags
from ft.faults.faults import Fault
from ft.faults.kinds import DMR, FILES
from ft.faults.table import row_of

if TYPE_CHECKING:
    from ft.job.agent.options import Script
    from megatron.training.arguments import Options

HOT_SWAP, REPLICAS, NOTHING, UNKNOWN = "hot-swap", "replicas", "nothing", "unknown"

_TRAINER = CHECKOUT / "pretrain_gpt.py"


@dataclass(frozen=True)
class Asked:
    """The options that ``ft run`` was started with.

    Attributes:
        world_size: number of logical ranks, of one replica if there are replicas.
        nodes: number of nodes that train.
        flags: given flags that need a protected run, as they were written.
        replicas: number of replicas; 0: none.
    """

    world_size: int
    nodes: int
    flags: Sequence[str] = ()
    replicas: int = 0


@dataclass(frozen=True)
class Protection:
    """What protects the run. ``by``: one of the constants above. ``copies``: copies of each state beyond its own."""

    by: str
    copies: int = 0


def is_trainer(script: "Script") -> bool:
    """Return whether every worker runs the fork's own ``pretrain_gpt.py``, or a copy of it."""
    path = Path(script.target)
    if script.is_module:
        found = importlib.util.find_spec(script.target) if script.target == _TRAINER.stem else None
        path = Path(found.origin) if found is not None and found.origin else path
    try:
        return path.samefile(_TRAINER) or path.read_bytes() == _TRAINER.read_bytes()
    except OSError:
        return False


def trainers_flags() -> list[str]:
    """Return the flags of the fork's trainer."""
    from megatron.training.arguments import all_flags

    return all_flags()


def examine(script: "Script", asked: Asked | None, faults: Sequence[Fault] = ()) -> tuple[Protection, list[Problem]]:
    """Return what protects the run, and the problems of the trainer's flags and of those in ``asked`` that need
    protection.

    Args:
        script: the script that workers run.
        asked: options of ``ft run``; None: unknown, because its flags are invalid.
        faults: all planned faults.
    """
    if not is_trainer(script) or {"-h", "--help"} & set(script.args):
        others = asked.replicas - 1 if asked is not None else -1
        return (Protection(REPLICAS, others) if others >= 0 else Protection(UNKNOWN)), []
    from megatron.training.arguments import may_have_te, refusals

    world_size, replicas = (asked.world_size, asked.replicas) if asked is not None else (None, 0)
    options, problems = refusals(script.args, world_size, has_te=may_have_te(), replicas=replicas)
    problems = [_belongs_before(problem) or (problem, fix) for problem, fix in problems]
    if options is None or asked is None:
        return Protection(UNKNOWN), problems
    if asked.replicas:
        found = Protection(REPLICAS, asked.replicas - 1)
    elif options.fault_tolerance.ft_hot_swap:
        found = Protection(HOT_SWAP, options.fault_tolerance.ft_snapshot_peers)
    else:
        return Protection(NOTHING), problems + _never_act(asked.flags)
    return found, problems + [problem for fault in faults for problem in _cannot_act(fault, options)]


def announcement(protection: Protection, nodes: int) -> str:
    """Describe what protects the run, in one or two sentences that are printed at its start."""
    if protection.by == NOTHING:
        return "nothing protects this run: if a worker dies, it ends (--ft-hot-swap behind pretrain_gpt.py protects it)"
    if protection.by == UNKNOWN:
        return (
            "nothing protects this run before its script has joined it (ft.attach, ft.protect): until then it ends if "
            "a worker dies"
        )
    if protection.by == REPLICAS:
        lone = "with one replica, nothing protects this run"
        text = "protected by replicas: if one loses a worker, the others train on"
        text = lone if protection.copies == 0 else text
    else:
        text = f"protected by hot-swap: {protection.copies} other worker(s) hold a copy of each worker's state"
    return text + _where(nodes) if protection.copies else text


def has_joined(nodes: int) -> str:
    """Return the message for a script of unknown protection that has joined the run."""
    return f"the script has joined the run: protected by hot-swap from here on{_where(nodes)}"


def _where(nodes: int) -> str:
    return "" if nodes > 1 else "; all copies are on this host, and only a checkpoint outlives it"


def _belongs_before(problem: str) -> Problem | None:
    """Return the refusal of a flag of ``ft run`` that was given to the trainer; None for any other problem."""
    flag = problem.removeprefix("unknown flag ")
    if flag == problem or flag not in launchers_flags():
        return None
    return problem, "it is a flag of ft run: give it before the script's name"


def _never_act(flags: Sequence[str]) -> list[Problem]:
    if not flags:
        return []
    problem = f"{', '.join(flags)} can never act: nothing protects a run of pretrain_gpt.py without --ft-hot-swap"
    names = ", ".join(dict.fromkeys(flag.split()[0] for flag in flags))
    return [(problem, f"add --ft-hot-swap behind pretrain_gpt.py, or drop {names}")]


def _cannot_act(fault: Fault, options: "Options") -> list[Problem]:
    """Return the reasons why ``fault`` cannot have an effect in a protected run of the trainer."""
    row, last = row_of(fault), options.training.train_iters
    found = []
    if row.needs == DMR and options.fault_tolerance.ft_dmr is None and options.fault_tolerance.ft_dmr_plan is None:
        problem = f"the fault {fault} can never act: bits are flipped by DMR, which is off"
        found.append((problem, "add --ft-dmr piggyback behind pretrain_gpt.py, or drop the fault"))
    if row.where == FILES and not options.checkpoint.save:
        problem = f"the fault {fault} can never act: there is no checkpoint to damage"
        found.append((problem, "add --save FOLDER behind pretrain_gpt.py, or drop the fault"))
    if fault.step is not None and last is not None and fault.step > last:
        problem = f"the fault {fault} can never act: the run ends with step {last} (--train-iters)"
        found.append((problem, f"a step from 1 to {last}, or drop the fault"))
    return found
