"""The trainer's options, parsed from command-line flags with Megatron-LM's names: one small dataclass per topic.

``parse(argv)`` reads the command line. ``check(options, world_size)`` fills in defaults that depend on other flags, and
rejects combinations that cannot work. ``refusals`` collects the problems that these two would raise, without importing
torch. There is no global state: ``options.core.hidden_size``, ``options.core.tensor_model_parallel_size``, ... are
passed to the code that needs them.
"""

import argparse
import difflib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from ft.base import bounded_json
from ft.base.errors import Problem, Problems, UserError
from ft.base.flags import Parser, nearest, read_flags
from ft.base.options import add_flags, all_spellings, build
from ft.protection.flags import FaultToleranceOptions
from megatron.ft_trainer.arguments.check import check, examine
from megatron.ft_trainer.arguments.core_options import CoreOptions
from megatron.ft_trainer.arguments.layout import Layout, layout
from megatron.ft_trainer.arguments.topics import (
    CheckpointOptions,
    DataOptions,
    EvaluationOptions,
    LoggingOptions,
    ScheduleOptions,
    TokenizerOptions,
    TrainingOptions,
)

_OF_A_NODE = ("metrics_file", "data_cache_path")

__all__ = [
    "Layout",
    "Options",
    "all_flags",
    "check",
    "explain",
    "help_text",
    "layout",
    "parse",
    "read",
    "refusals",
]

_FLAG = re.compile(r"--[a-z][\w-]*")
_ALIKE = 0.85
"""Similarity of an unknown flag to a known one, from which on it is taken for a misspelling."""


@dataclass
class Options:
    """All options of the command line: those of megatron-core, and one dataclass per topic (data, checkpoint, ...)."""

    core: Any = field(default_factory=CoreOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    data: DataOptions = field(default_factory=DataOptions)
    tokenizer: TokenizerOptions = field(default_factory=TokenizerOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    logging: LoggingOptions = field(default_factory=LoggingOptions)
    fault_tolerance: FaultToleranceOptions = field(default_factory=FaultToleranceOptions)

    @property
    def notices(self) -> list[str]:
        """Return sentences about flags that have no effect, which a run prints once."""
        c = self.checkpoint
        if c.save is not None or c.save_interval is None:
            return []
        return [f"without effect here: --save-interval {c.save_interval}: without --save no checkpoints are written"]

    def as_dict(self) -> dict:
        """Return a nested plain dict, as stored in checkpoints and event files."""
        values = {f.name: vars(getattr(self, f.name)) for f in fields(self)}
        return bounded_json.loads(json.dumps(values, default=str), non_finite=True)

    def given(self) -> dict[str, str]:
        """Return flag -> value of every option that differs from its default.

        Options of a single node (paths of logs and caches, the progress bar) are left out.
        """
        found = {}
        for concern in fields(self):
            defaults = vars(concern.default_factory())
            for name, value in vars(getattr(self, concern.name)).items():
                if value != defaults.get(name) and name not in _OF_A_NODE:
                    found["--" + name.replace("_", "-")] = str(value)
        return found


def parse(argv: list[str] | str) -> Options:
    """Parse a command line (words, or one string).

    Raises:
        UserError: flags are unknown or have a wrong value; the message names the nearest known flag.
    """
    options, problems, _ = read(argv)
    if problems:
        raise UserError.of(problems)
    return options


def refusals(
    argv: list[str] | str, world_size: int | None, *, has_te: bool, has_gpu: bool | None = None, replicas: int = 0
) -> tuple[Options | None, list[Problem]]:
    """Find all problems of a command line: with single flags and, as far as their values are known, combinations.

    Args:
        world_size: number of ranks of the job, or of one replica; None: unknown, so combinations are not checked.
        has_te, has_gpu, replicas: as for ``check``.

    Returns:
        (the options, or None if some cannot be determined; the problems, each with its fix).
    """
    options, problems, doubtful = read(argv)
    if options is None or world_size is None:
        return options, problems
    _, found = examine(
        options, world_size, has_te=has_te, has_gpu=has_gpu, replicas=replicas, shapes_are_known=not doubtful
    )
    problems += [entry for entry in found if not set(doubtful) & set(_FLAG.findall(f"{entry[0]} {entry[1]}"))]
    return options, problems


NVIDIAS = (
    "NVIDIA's trainer has all flags of Megatron-LM: --nvidia-trainer (megatron-core >= 0.19 on Python >= 3.12), or ft "
    "run with the script of a Megatron-LM checkout"
)
"""What to do with a flag that only NVIDIA's trainer has."""


def explain(unknown: str, supported: Sequence[str]) -> tuple[Problem, str | None]:
    """Return ((problem, fix), the flag that was probably meant, None if there is no candidate) of an unknown flag.

    ``supported``: every flag of the parser.
    """
    if unknown.startswith(("--ft-hsdp-", "--ft-spare-", "--ft-transport")):
        return (f"{unknown} is an option of ft run", f"give it before the script: ft run {unknown} ... SCRIPT"), None
    meant = nearest(unknown, supported)
    if meant is not None and difflib.SequenceMatcher(None, unknown, meant).ratio() < _ALIKE:
        meant = None
    return (f"unknown flag {unknown}", f"did you mean {meant}? {NVIDIAS}" if meant else NVIDIAS), meant


def read(argv: list[str] | str, *, guesses: bool = True) -> tuple[Options | None, list[Problem], list[str]]:
    """Read a command line.

    Returns:
        (the options, or None if a value is rejected; the problems of single flags; flags whose values could not be
        read). With ``guesses``, an unknown flag is read as the one that was probably meant.
    """
    words = shlex.split(argv) if isinstance(argv, str) else list(argv)
    parser, supported = _parser()

    def about(unknown: str) -> tuple[Problem, str | None]:
        problem, meant = explain(unknown, supported)
        return problem, meant if guesses else None

    namespace, problems, doubtful = read_flags(parser, words, supported, about)
    for name, given in vars(namespace).items():
        if any(value != value for value in (given if isinstance(given, list) else [given])):  # true of NaN only
            problems.append((f"--{name.replace('_', '-')} is not a number", "give a number"))
    concerns: dict[str, Any] = {}
    refused = Problems()
    for f in fields(Options):
        with refused:
            concerns[f.name] = build(f.default_factory, vars(namespace))
    problems += refused.found
    if refused.found:
        return None, problems, doubtful
    return Options(**concerns), problems, doubtful


def all_flags() -> list[str]:
    """Return every flag of the trainer."""
    return _parser()[1]


def help_text() -> str:
    """Return the help text of all flags."""
    return _parser()[0].format_help()


@cache
def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser, and all its flags."""
    parser = Parser(
        prog="pretrain_gpt.py",
        description="Pretrain a GPT with megatron-core. Flags carry Megatron-LM's names and meanings; " + NVIDIAS,
    )
    supported: list[str] = []
    for concern in fields(Options):
        add_flags(parser, concern.default_factory)
        supported += all_spellings(concern.default_factory)
    return parser, supported
