"""Examine a launch line of the trainer, or of a Megatron-LM checkout, without importing torch."""

import copy
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ft.adapters.megatron_lm.seams import Finding
from ft.base.errors import Problem, UserError
from ft.commands import checkouts
from ft.commands.arguments import misplaced
from ft.commands.check_memory import memory
from ft.commands.protection import TRAINER, is_trainer
from ft.job.agent.options import Script
from ft.protection import table
from megatron.ft_trainer.arguments import Options, read
from megatron.ft_trainer.arguments.check import examine
from megatron.ft_trainer.arguments.layout import Layout
from megatron.ft_trainer.arguments.needs import in_words, is_here, needs

_FLAG = re.compile(r"--[a-zA-Z][\w-]*")


@dataclass
class Answer:
    """The result of ``ft check`` for one launch line.

    Attributes:
        program: "trainer" or "checkout" (of Megatron-LM).
        refused: the problems, each with ``flag``, ``reason`` and ``fix``.
        needs: what the line requires of the machine that runs it: "GPU", "transformer-engine", names of packages.
        missing: those of ``needs`` that this machine does not have; empty if the question is about another machine.
        layout: sizes of the parallel groups; None if they cannot be determined.
        batch: sizes of the batch; None if they cannot be determined.
        memory: bytes per GPU, see :func:`ft.commands.check_memory.memory`; None if they cannot be estimated.
        protections: for each protection, whether it can be added to this line, and the problems that prevent it.
        notices: sentences about flags that have no effect in this project's trainer.
        seams: for a checkout, each function of its trainer that protections depend on: ``file``, ``symbol``, ``status``
            ("fits", "missing" or "changed"), ``differs`` and ``why``. Only runs with ``--ft-*`` flags
            depend on these functions.
    """

    program: str
    refused: list[dict[str, str]] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    layout: dict[str, int] | None = None
    batch: dict[str, int] | None = None
    memory: dict[str, Any] | None = None
    protections: list[dict[str, Any]] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    seams: list[dict[str, str]] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        return not self.refused and not self.missing

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as a JSON object."""
        return {"accepted": self.accepted, **asdict(self)}


def answer_for(script: Path, words: list[str], gpus: int | None) -> Answer:
    """Examine a launch line.

    Args:
        script: the training script.
        words: its arguments.
        gpus: number of GPUs of a machine that has all that the line needs; None: the question is about this machine,
            and the fewest GPUs that the layout needs.

    Raises:
        UserError: the script is neither this project's trainer nor that of a Megatron-LM checkout.
    """
    given = Script(str(script), False, words)
    program = program_of(given)
    defaults = ["--transformer-impl", "transformer_engine"] if program == "checkout" else []
    options, problems, doubtful = read([*defaults, *words])
    problems = [misplaced(problem) or (problem, fix) for problem, fix in problems]
    answer = Answer(program)
    world = None if options is None else gpus or smallest_world(options)
    of_files: list[Problem] = []
    if program == "checkout":
        own = checkouts.parsers_flags(given)
        problems = [entry for entry in problems if _flag_of(*entry) not in own and not entry[0].startswith("--ft-")]
        findings, of_files = checkouts.examine_files(given.target)
        answer.seams = [_described(finding) for finding in findings]
        if checkouts.is_protected_checkout(given):
            problems += [*of_files, *checkouts.examine_flags(given, world, 0)[1]]
    if options is not None:
        grid, found = examine(
            options, world, has_te=True, has_gpu=True, shapes_are_known=not doubtful, assumes_machine=True
        )
        problems += [
            entry
            for entry in found
            if not set(doubtful) & set(_FLAG.findall(f"{entry[0]} {entry[1]}"))
            and (program == "trainer" or not _is_limit_of_trainer(entry))
        ]
        pattern = options.core.hybrid_layer_pattern or options.core.hybrid_override_pattern
        of_model = checkouts.needs_of_model(given, pattern) if program == "checkout" else []
        answer.needs = in_words([*needs(options, grid), *of_model])
        answer.missing = [] if gpus else [name for name in answer.needs if not is_here(name)]
        answer.notices = list(options.notices)
        if program == "checkout":
            answer.notices = [] if of_files else checkouts.notices(given.target)
        if grid is not None:
            _describe(answer, options, grid)
            of_checkout = (given, of_files) if program == "checkout" else None
            answer.protections = _protections(options, grid, of_checkout)
    answer.refused = _as_dicts(dict.fromkeys(problems))
    return answer


def program_of(script: Script) -> str:
    """Return "trainer" for this project's trainer, and "checkout" for a script of a Megatron-LM checkout.

    A missing file with the name of the trainer counts as the trainer.

    Raises:
        UserError: the script is neither.
    """
    file = Path(script.target)
    if is_trainer(script) or (not file.is_file() and file.name == TRAINER.name):
        return "trainer"
    if not file.is_file():
        raise UserError(f"there is no script {file}", "give the path of pretrain_gpt.py")
    if checkouts.is_checkout(script):
        return "checkout"
    if (below := checkouts.below_a_checkout(file)) is not None:
        raise UserError(*below)
    raise UserError(
        f"{file} is neither this project's pretrain_gpt.py nor a script of a Megatron-LM checkout (no "
        "megatron/training/training.py beside it)",
        "give one of these",
    )


def smallest_world(options: Options) -> int:
    """Return the smallest number of GPUs that the layout of the flags needs."""
    c = options.core
    tp, pp, cp = c.tensor_model_parallel_size, c.pipeline_model_parallel_size, c.context_parallel_size
    experts = (c.expert_tensor_parallel_size or tp) * c.expert_model_parallel_size * pp
    return math.lcm(tp * pp * cp, experts) * c.num_distributed_optimizer_instances


def _described(finding: Finding) -> dict[str, str]:
    seam = finding.seam
    found = {"status": finding.status, "differs": finding.differs}
    return {"file": seam.file, "symbol": seam.symbol, **found, "why": seam.why}


def _describe(answer: Answer, options: Options, grid: Layout) -> None:
    """Fill in the sizes of ``answer``: layout, batch and memory."""
    answer.layout = {name: size for name, size in asdict(grid).items() if size is not None}
    t = options.training
    answer.batch = {
        "micro_batch": t.micro_batch_size,
        "global_batch": t.global_batch_size,
        "microbatches": t.global_batch_size // (t.micro_batch_size * grid.dp),
        "sequence_length": options.data.seq_length,
    }
    answer.memory = memory(options, grid)


_ENABLED_BY: dict[str, dict[str, Any]] = {
    table.HOT_SWAP: {"ft_hot_swap": True},
    table.STAGES: {"ft_hot_swap": True, "ft_checkfree": True},
    table.SWAPPED: {"ft_hot_swap": True, "ft_checkfree": True, "ft_checkfree_plus": True},
    table.DOUBLE: {"ft_dmr": "piggyback"},
}
"""Name of a protection -> values of the flags that enable it and the protections that it requires.
Protections that ``ft run`` enables (replicas, stacked shards) are not in it."""

_REPLICAS = {table.REPLICAS: 2, table.STACKS: 2}
"""Name of a protection -> the number of replicas with which it is tried."""


def _protections(
    options: Options, grid: Layout, of_checkout: tuple[Script, list[Problem]] | None
) -> list[dict[str, Any]]:
    """Return for each protection whether it can be added to the line, as in ``Answer.protections``.

    Args:
        options: the options of the line.
        grid: sizes of the parallel groups.
        of_checkout: the script of a checkout and the problems of the checkout's files; None for this project's trainer.
    """
    entries = [entry for entry in table.TABLE if entry.name != table.PROFILE]
    if of_checkout is None:
        _, before = examine(copy.deepcopy(options), grid.world_size, has_te=True, assumes_machine=True)
        found = [[each for each in _with(entry, options, grid) if each not in before] for entry in entries]
    else:
        script, of_files = of_checkout
        found = [[*of_files, *_with_in_checkout(entry, script, grid)] for entry in entries]
    return [
        {"name": entry.name, "asked_by": entry.asked_by, "fits": not problems, "needs": _as_dicts(problems)}
        for entry, problems in zip(entries, found, strict=True)
    ]


def _with(entry: table.Entry, options: Options, grid: Layout) -> list[Problem]:
    """Return the problems of a line of this project's trainer with a protection added."""
    asked = copy.deepcopy(options)
    for name, value in _ENABLED_BY.get(entry.name, {}).items():
        setattr(asked.fault_tolerance, name, value)
    replicas = _REPLICAS.get(entry.name, 0)
    return examine(asked, grid.world_size, has_te=True, replicas=replicas, assumes_machine=True)[1]


def _with_in_checkout(entry: table.Entry, script: Script, grid: Layout) -> list[Problem]:
    """Return the problems of the flags of a checkout's trainer with a protection added, and no other protection."""
    flags = [
        word
        for name, value in _ENABLED_BY.get(entry.name, {}).items()
        for word in (f"--{name.replace('_', '-')}", *([] if value is True else [value]))
    ]
    asking = replace(script, args=[*checkouts.flags_of_trainer(script), *flags])
    return checkouts.examine_flags(asking, grid.world_size, _REPLICAS.get(entry.name, 0))[1]


def _as_dicts(problems: Iterable[Problem]) -> list[dict[str, str]]:
    return [{"flag": _flag_of(*each), "reason": each[0], "fix": each[1] or ""} for each in problems]


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
