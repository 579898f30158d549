"""Examine a launch line of the trainer, or of a Megatron-LM checkout, without importing torch."""

import copy
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.commands.check_memory import memory
from ft.commands.protection import TRAINER
from ft.protection import table
from megatron.training.arguments import Options, read
from megatron.training.arguments.check import examine
from megatron.training.arguments.layout import Layout
from megatron.training.arguments.needs import in_words, needs

_FLAG = re.compile(r"--[a-zA-Z][\w-]*")
_MARK = Path("megatron/training/training.py")


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
    """

    program: str
    refused: list[dict[str, str]] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    layout: dict[str, int] | None = None
    batch: dict[str, int] | None = None
    memory: dict[str, Any] | None = None
    protections: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

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
    options, problems, doubtful = read(words)
    if program == "checkout":
        own = flags_of_checkout(script.parent)
        problems = [entry for entry in problems if not own & set(_FLAG.findall(entry[0])[:1])]
    answer = Answer(program)
    if options is not None:
        world = gpus or smallest_world(options)
        grid, found = examine(
            options, world, has_te=True, has_gpu=True, shapes_are_known=not doubtful, assumes_machine=True
        )
        problems += [entry for entry in found if not set(doubtful) & set(_FLAG.findall(f"{entry[0]} {entry[1]}"))]
        answer.needs, answer.notices = in_words(needs(options, grid)), list(options.notices)
        if grid is not None:
            _describe(answer, options, grid)
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
    if (script.parent / _MARK).is_file():
        return "checkout"
    raise UserError(
        f"{script} is neither this project's pretrain_gpt.py nor a script of a Megatron-LM checkout (no {_MARK} beside "
        "it)",
        "give one of these",
    )


def flags_of_checkout(root: Path) -> set[str]:
    """Return the flags that are written in the sources of a checkout's own parser, which is not imported."""
    found: set[str] = set()
    for file in (root / _MARK.parent).rglob("*.py"):
        found |= set(re.findall(r"""['"](--[a-zA-Z][\w-]*)['"]""", file.read_text(encoding="utf-8", errors="replace")))
    return found


def smallest_world(options: Options) -> int:
    """Return the smallest number of GPUs that the layout of the flags needs."""
    c = options.core
    tp, pp, cp = c.tensor_model_parallel_size, c.pipeline_model_parallel_size, c.context_parallel_size
    experts = (c.expert_tensor_parallel_size or tp) * c.expert_model_parallel_size * pp
    return math.lcm(tp * pp * cp, experts) * c.num_distributed_optimizer_instances


def _describe(answer: Answer, options: Options, grid: Layout) -> None:
    answer.layout = {name: size for name, size in asdict(grid).items() if size is not None}
    t = options.training
    answer.batch = {
        "micro_batch": t.micro_batch_size,
        "global_batch": t.global_batch_size,
        "microbatches": t.global_batch_size // (t.micro_batch_size * grid.dp),
        "sequence_length": options.data.seq_length,
    }
    answer.memory = memory(options, grid)
    answer.protections = [_protection(entry, options, grid) for entry in table.TABLE if entry.name != table.PROFILE]


_ASKS: dict[str, dict[str, Any]] = {
    table.HOT_SWAP: {"ft_hot_swap": True},
    table.STAGES: {"ft_hot_swap": True, "ft_checkfree": True},
    table.SWAPPED: {"ft_hot_swap": True, "ft_checkfree": True, "ft_checkfree_plus": True},
    table.DOUBLE: {"ft_dmr": "piggyback"},
}
"""The trainer's flags that ask for a protection and for those that it needs."""


def _protection(entry: table.Entry, options: Options, grid: Layout) -> dict[str, Any]:
    """Return whether a protection can be added to the line, and the problems that it would add."""
    asked = copy.deepcopy(options)
    for name, value in _ASKS.get(entry.name, {}).items():
        setattr(asked.fault_tolerance, name, value)
    replicas = 2 if entry.name in (table.REPLICAS, table.STACKS) else 0
    _, before = examine(copy.deepcopy(options), grid.world_size, has_te=True, assumes_machine=True)
    _, after = examine(asked, grid.world_size, has_te=True, replicas=replicas, assumes_machine=True)
    lacks = [(problem, fix) for problem, fix in after if (problem, fix) not in before]
    return {
        "name": entry.name,
        "asked_by": entry.asked_by,
        "fits": not lacks,
        "needs": [{"flag": _flag_of(*lack), "reason": lack[0], "fix": lack[1] or ""} for lack in lacks],
    }


def _flag_of(problem: str, fix: str | None) -> str:
    """Return the flag that causes a problem: the first flag in the problem's text or, if there is none, in that of its
    fix.
    """
    found = _FLAG.findall(problem) or _FLAG.findall(fix or "")
    return found[0] if found else ""
