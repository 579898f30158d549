"""The trainer's options, parsed from command-line flags with Megatron-LM's names: one small dataclass per topic.

``parse(argv)`` reads the command line. ``check(options, world_size)`` fills in defaults that depend on other flags, and
rejects combinations that cannot work. ``refusals`` collects the problems that these two would raise, without importing
torch. There is no global state: ``options.model.hidden_size``, ``options.parallel.tensor_model_parallel_size``, ... are
passed to the code that needs them.
"""

import argparse
import importlib.util
import json
import re
import shlex
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path

from ft.base.errors import Problem, Problems, UserError
from ft.base.flags import read_flags
from megatron.training.arguments import known, schema
from megatron.training.arguments.check import check, examine
from megatron.training.arguments.checkpoint import CheckpointOptions
from megatron.training.arguments.data import DataOptions, TokenizerOptions
from megatron.training.arguments.fault_tolerance import FaultToleranceOptions
from megatron.training.arguments.layout import Layout, layout
from megatron.training.arguments.logging import LoggingOptions
from megatron.training.arguments.model import KernelOptions, ModelOptions
from megatron.training.arguments.moe import MoeOptions
from megatron.training.arguments.optimizer import OptimizerOptions, ScheduleOptions
from megatron.training.arguments.parallel import ParallelOptions
from megatron.training.arguments.precision import PrecisionOptions, RecomputeOptions
from megatron.training.arguments.training import EvaluationOptions, TrainingOptions

_OF_A_NODE = ("metrics_file", "tensorboard_dir", "data_cache_path", "progress_bar")

__all__ = ["Layout", "Options", "all_flags", "check", "help_text", "layout", "may_have_te", "parse", "refusals"]

_FLAG = re.compile(r"--[a-z][\w-]*")


@dataclass
class Options:
    """All options of the command line, one dataclass per topic (model, data, checkpoint, ...)."""

    model: ModelOptions = field(default_factory=ModelOptions)
    moe: MoeOptions = field(default_factory=MoeOptions)
    kernels: KernelOptions = field(default_factory=KernelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    data: DataOptions = field(default_factory=DataOptions)
    tokenizer: TokenizerOptions = field(default_factory=TokenizerOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    logging: LoggingOptions = field(default_factory=LoggingOptions)
    fault_tolerance: FaultToleranceOptions = field(default_factory=FaultToleranceOptions)

    def as_dict(self) -> dict:
        """Return a nested plain dict, as stored in checkpoints and event files."""
        return json.loads(json.dumps(asdict(self), default=str))

    def given(self) -> dict[str, str]:
        """Return flag -> value of every option that differs from its default.

        Options of a single node (paths of logs and caches, the progress bar) are left out.
        """
        found = {}
        for concern in fields(self):
            options, defaults = getattr(self, concern.name), concern.default_factory()
            for f in fields(options):
                value = getattr(options, f.name)
                if value != getattr(defaults, f.name) and f.name not in _OF_A_NODE:
                    found["--" + f.name.replace("_", "-")] = str(value)
        return found

    @classmethod
    def from_dict(cls, stored: dict) -> "Options":
        """Return the options of which ``stored`` is the ``as_dict``. Ignore fields that this version does not have."""
        concerns = {}
        for f in fields(cls):
            known_names = {g.name for g in fields(f.default_factory)}
            given = {name: value for name, value in stored.get(f.name, {}).items() if name in known_names}
            concerns[f.name] = f.default_factory(**given)
        return cls(**concerns)


def parse(argv: list[str] | str) -> Options:
    """Parse a command line (words, or one string).

    Raises:
        UserError: flags are unknown, unsupported or have a wrong value; the message names the nearest known flag.
    """
    options, problems, _ = _read(argv)
    if problems:
        raise UserError.of(problems)
    return options


def refusals(
    argv: list[str] | str, world_size: int | None, *, has_te: bool, replicas: int = 0
) -> tuple[Options | None, list[Problem]]:
    """Find all problems of a command line: with single flags and, as far as their values are known, combinations.

    Args:
        argv: the command line (words, or one string).
        world_size: number of ranks of the job, or of one replica; None: unknown, so combinations are not checked.
        has_te: as for ``check``.
        replicas: number of replicas of the model (FT-HSDP); 0: the job has no replicas.

    Returns:
        (the options, or None if some cannot be determined; the problems, each with its fix).
    """
    options, problems, doubtful = _read(argv)
    if options is None or world_size is None:
        return options, problems
    _, found = examine(options, world_size, has_te=has_te, replicas=replicas, shapes_are_known=not doubtful)
    problems += [entry for entry in found if not set(doubtful) & set(_FLAG.findall(f"{entry[0]} {entry[1]}"))]
    return options, problems


def may_have_te() -> bool:
    """Return whether Transformer Engine is installed on a machine with a GPU, as far as is known without torch."""
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    return has_gpu and importlib.util.find_spec("transformer_engine") is not None


def _read(argv: list[str] | str) -> tuple[Options | None, list[Problem], list[str]]:
    """Return (the options, or None if a value is rejected; problems; flags whose values could not be read)."""
    words = shlex.split(argv) if isinstance(argv, str) else list(argv)
    parser, supported = _parser()
    explain = partial(known.explain, supported=supported)
    namespace, problems, doubtful = read_flags(parser, _without_accepted(words), supported, explain)
    concerns, refused = {}, Problems()
    for f in fields(Options):
        with refused:
            concerns[f.name] = schema.build(f.default_factory, namespace)
    problems += refused.found
    return (None if refused.found else Options(**concerns)), problems, doubtful


def all_flags() -> list[str]:
    """Return every flag of the trainer."""
    return _parser()[1]


def help_text() -> str:
    return _parser()[0].format_help()


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message.removeprefix("argument "), "see --help")


@cache
def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser, and all its flags."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        description="Pretrain a GPT with megatron-core. Flags carry Megatron-LM's names and meanings.",
        allow_abbrev=False,
    )
    supported = []
    for concern in fields(Options):
        schema.add_flags(parser, concern.default_factory)
        supported += schema.all_spellings(concern.default_factory)
    return parser, supported


def _without_accepted(words: list[str]) -> list[str]:
    """Remove the Megatron-LM flags that request something that this trainer always does."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in known.ACCEPTED:
            skip = word in known.ACCEPTED_WITH_VALUE
        else:
            kept.append(word)
    return kept
