"""Examine a launch line of the trainer, or of a Megatron-LM checkout, without importing torch."""

import copy
import math
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ft.adapters.megatron_lm import tree
from ft.base.errors import Problem, UserError
from ft.commands import checkouts
from ft.commands.check_memory import memory
from ft.commands.protection import TRAINER
from ft.job.agent.options import Script
from ft.protection import table
from megatron.training.arguments import Options, read
from megatron.training.arguments.check import examine
from megatron.training.arguments.layout import Layout
from megatron.training.arguments.needs import in_words, needs

_FLAG = re.compile(r"--[a-zA-Z][\w-]*")


@dataclass
class Answer:
    """The result of ``ft check`` for one launch line.

    Attributes:
        program: "trainer" or "checkout" (of Megatron-LM).
        refused: the problems, each with ``flag``, ``reason`` and ``fix``.
        needs: what the line requires of the machine that runs it: "GPU", "transformer-engine", names of packages.
        layout: sizes of the parallel groups; None if they cannot be determined.
        batch: sizes of the batch; None if they cannot be determined.
        memory: bytes per GPU, see :func:`ft.commands.check_memory.memory`; None if they cannot be estimated.
        protections: for each protection, whether it can be added to this line, and the problems that prevent it.
        notices: sentences about flags without effect.
        seams: for a checkout, each function of its trainer that protections depend on: ``file``, ``symbol``, ``status``
            ("fits", "missing" or "changed"), ``differs`` and ``why``. Only runs with ``--ft-*`` flags
            depend on these functions.
    """

    program: str
    refused: list[dict[str, str]] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    layout: dict[str, int] | None = None
    batch: dict[str, int] | None = None
    memory: dict[str, Any] | None = None
    protections: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    seams: list[dict[str, str]] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        return not self.refused

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as a JSON object."""
        return {"accepted": self.accepted, **asdict(self)}


def answer_for(script: Path, words: list[str], gpus: int | None) -> Answer:
    """Examine a launch line.

    Args:
        script: the training script.
        words: its arguments.
        gpus: number of GPUs; None: the fewest that the layout needs.

    Raises:
        UserError: the script is neither this project's trainer nor that of a Megatron-LM checkout.
    """
    program = program_of(script)
    defaults = ["--transformer-impl", "transformer_engine"] if program == "checkout" else []
    options, problems, doubtful = read([*defaults, *words])
    answer = Answer(program)
    world = None if options is None else gpus or smallest_world(options)
    of_checkout = None
    if program == "checkout":
        own = flags_of_checkout(script.parent)
        problems = [entry for entry in problems if _flag_of(*entry) not in own and not entry[0].startswith("--ft-")]
        of_checkout = Script(str(script), False, words)
        answer.seams = checkouts.manifest(of_checkout.target)
        if checkouts.is_protected_checkout(of_checkout):
            problems += checkouts.examine(of_checkout, world, 0)[1]
    if options is not None:
        grid, found = examine(
            options, world, has_te=True, has_gpu=True, shapes_are_known=not doubtful, assumes_machine=True
        )
        problems += [
            entry
            for entry in found
            if not set(doubtful) & set(_FLAG.findall(f"{entry[0]} {entry[1]}"))
            and (of_checkout is None or not _is_limit_of_trainer(entry))
        ]
        answer.needs, answer.notices = in_words(needs(options, grid)), list(options.notices)
        if grid is not None:
            _describe(answer, options, grid, of_checkout)
    answer.refused = [
        {"flag": _flag_of(problem, fix), "reason": problem, "fix": fix or ""}
        for problem, fix in dict.fromkeys(problems)
    ]
    return answer


def program_of(script: Path) -> str:
    """Return "trainer" for this project's trainer, and "checkout" for a script of a Megatron-LM checkout.

    Raises:
        UserError: the script is neither.
    """
    if not script.is_file() and script.name != TRAINER.name:
        raise UserError(f"there is no script {script}", "give the path of pretrain_gpt.py")
    if not script.is_file() or script.samefile(TRAINER) or script.read_bytes() == TRAINER.read_bytes():
        return "trainer"
    if tree.root_of(str(script)) is not None:
        return "checkout"
    raise UserError(
        f"{script} is neither this project's pretrain_gpt.py nor a script of a Megatron-LM checkout (no "
        "megatron/training/training.py beside it)",
        "give one of these",
    )


def flags_of_checkout(root: Path) -> set[str]:
    """Return the flags that are written in the sources of a checkout's own parser, which is not imported."""
    found: set[str] = set()
    for file in (root / "megatron" / "training").rglob("*.py"):
        found |= set(re.findall(r"""['"](--[a-zA-Z][\w-]*)['"]""", file.read_text(encoding="utf-8", errors="replace")))
    return found


def smallest_world(options: Options) -> int:
    """Return the smallest number of GPUs that the layout of the flags needs."""
    c = options.core
    tp, pp, cp = c.tensor_model_parallel_size, c.pipeline_model_parallel_size, c.context_parallel_size
    experts = (c.expert_tensor_parallel_size or tp) * c.expert_model_parallel_size * pp
    return math.lcm(tp * pp * cp, experts) * c.num_distributed_optimizer_instances


def _describe(answer: Answer, options: Options, grid: Layout, of_checkout: Script | None) -> None:
    answer.layout = {name: size for name, size in asdict(grid).items() if size is not None}
    t = options.training
    answer.batch = {
        "micro_batch": t.micro_batch_size,
        "global_batch": t.global_batch_size,
        "microbatches": t.global_batch_size // (t.micro_batch_size * grid.dp),
        "sequence_length": options.data.seq_length,
    }
    answer.memory = memory(options, grid)
    for entry in table.TABLE:
        if entry.name != table.PROFILE:
            lacks = _lacks(entry, options, grid) if of_checkout is None else _lacks_there(entry, of_checkout, grid)
            needs_of_it = [{"flag": _flag_of(*lack), "reason": lack[0], "fix": lack[1] or ""} for lack in lacks]
            described = {"name": entry.name, "asked_by": entry.asked_by, "fits": not lacks, "needs": needs_of_it}
            answer.protections.append(described)


_ASKS: dict[str, dict[str, Any]] = {
    table.HOT_SWAP: {"ft_hot_swap": True},
    table.STAGES: {"ft_hot_swap": True, "ft_checkfree": True},
    table.SWAPPED: {"ft_hot_swap": True, "ft_checkfree": True, "ft_checkfree_plus": True},
    table.DOUBLE: {"ft_dmr": "piggyback"},
}
"""The trainer's flags that ask for a protection and for those that it needs."""


def _lacks(entry: table.Entry, options: Options, grid: Layout) -> list[Problem]:
    """Return the problems that adding a protection to a line of this project's trainer would cause."""
    asked = copy.deepcopy(options)
    for name, value in _ASKS.get(entry.name, {}).items():
        setattr(asked.fault_tolerance, name, value)
    replicas = 2 if entry.name in (table.REPLICAS, table.STACKS) else 0
    _, before = examine(copy.deepcopy(options), grid.world_size, has_te=True, assumes_machine=True)
    _, after = examine(asked, grid.world_size, has_te=True, replicas=replicas, assumes_machine=True)
    return [problem for problem in after if problem not in before]


def _lacks_there(entry: table.Entry, script: Script, grid: Layout) -> list[Problem]:
    """Return the problems that adding a protection to a line of a checkout's trainer would cause."""
    flags = [
        word
        for name, value in _ASKS.get(entry.name, {}).items()
        for word in (f"--{name.replace('_', '-')}", *([] if value is True else [value]))
    ]
    replicas = 2 if entry.name in (table.REPLICAS, table.STACKS) else 0
    asking = replace(script, args=[*checkouts.flags_of_trainer(script), *flags])
    return checkouts.examine(asking, grid.world_size, replicas)[1]


def _is_limit_of_trainer(problem: Problem) -> bool:
    """Return whether only this project's trainer has this problem: its text says "this trainer", or names a protection,
    which :func:`ft.commands.checkouts.examine` judges for a checkout."""
    return "this trainer" in problem[0] or "--ft-" in problem[0]


def _flag_of(problem: str, fix: str | None) -> str:
    """Return the flag that causes a problem: the first flag in the problem's text or, if there is none, in that of its
    fix.
    """
    found = _FLAG.findall(problem) or _FLAG.findall(fix or "")
    return found[0] if found else ""
