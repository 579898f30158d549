"""The trainer's options: one small dataclass per concern, parsed from Megatron-LM's flags, and nothing global.

``parse(argv)`` reads the command line, ``check(options, world_size)`` fills in dependent defaults and refuses what
cannot work. ``options.model.hidden_size``, ``options.parallel.tensor_model_parallel_size``, ... are passed on to
whoever needs them.
"""

import argparse
import json
import shlex
from dataclasses import asdict, dataclass, field, fields
from functools import cache

from ft.errors import UserError
from megatron.training.arguments import known, schema
from megatron.training.arguments.check import check
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

__all__ = ["Layout", "Options", "check", "help_text", "layout", "parse"]


@dataclass
class Options:
    """Everything the command line says, by concern."""

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
        """Nested plain dict, as stored in checkpoints and event files."""
        return json.loads(json.dumps(asdict(self), default=str))

    def given(self) -> dict[str, str]:
        """Flag -> value of every option that is not at its default, less those that say where a node logs or caches."""
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
        """The inverse of ``as_dict``; fields that this version does not know are left out."""
        concerns = {}
        for f in fields(cls):
            known_names = {g.name for g in fields(f.default_factory)}
            given = {name: value for name, value in stored.get(f.name, {}).items() if name in known_names}
            concerns[f.name] = f.default_factory(**given)
        return cls(**concerns)


def parse(argv: list[str] | str) -> Options:
    """The options that a command line (words, or one string) asks for.

    Raises:
        UserError: for a flag that is unknown, unsupported or given a wrong value; the message names the nearest
            known flag.
    """
    words = shlex.split(argv) if isinstance(argv, str) else list(argv)
    parser, supported = _parser()
    namespace, rest = parser.parse_known_args(_without_accepted(words))
    flags = [word.split("=")[0] for word in rest if word.startswith("--")]
    if flags:
        problems = [known.explain(flag, supported) for flag in flags]
        if len(problems) == 1:
            raise UserError(*problems[0])
        raise UserError("\n".join(f"{problem} ({fix})" for problem, fix in problems))
    if rest:
        raise UserError(f"unexpected word {rest[0]!r} on the command line", "quote values that contain spaces")
    return Options(**{f.name: schema.build(f.default_factory, namespace) for f in fields(Options)})


def help_text() -> str:
    return _parser()[0].format_help()


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message, "see --help")


@cache
def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser and all flags it knows."""
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
    """The command line less the flags that ask for what is always so."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in known.ACCEPTED:
            skip = word in known.ACCEPTED_WITH_VALUE
        else:
            kept.append(word)
    return kept
