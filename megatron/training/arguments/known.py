"""Explains flags that no option dataclass defines: obsolete, renamed, misspelt or unsupported ones."""

from functools import cache
from pathlib import Path

from ft.base.errors import Problem
from ft.base.flags import nearest

ACCEPTED = {
    "--use-mcore-models": "megatron-core's models are the only ones",
    "--use-dist-ckpt": "distributed checkpoints are the only ones",
    "--dist-ckpt-format": "torch_dist is the only format",
    "--auto-detect-ckpt-format": "torch_dist is the only format",
    "--log-throughput": "throughput is always logged",
    "--log-timers-to-tensorboard": "timers go to TensorBoard whenever both are on",
    "--no-one-logger": "there is no one-logger",
    "--disable-msc": "there is no multi-storage client",
    "--lazy-mpu-init": "long gone from Megatron-LM",
    "--no-scatter-gather-tensors-in-pipeline": "long gone from Megatron-LM",
}
"""Megatron-LM flags that are accepted without effect, because the trainer always does what they request, with the
reason. A flag's value is read and ignored."""

ACCEPTED_WITH_VALUE = {"--dist-ckpt-format"}

RENAMED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations",
}
"""Flags that Megatron-LM itself rejects, with their replacements."""


@cache
def megatron_lm_flags() -> frozenset[str]:
    """Return the flags of Megatron-LM's own parser, core releases 0.16.1 to 0.19.0."""
    return frozenset((Path(__file__).parent / "megatron_lm_flags.txt").read_text().split())


def explain(unknown: str, supported: list[str]) -> tuple[Problem, str | None]:
    """Explain what is wrong with ``unknown``, and what to write instead.

    Args:
        unknown: a command-line word that starts with ``--``, without ``=value``.
        supported: every flag of the parser.

    Returns:
        ((problem, fix), the flag that was probably meant, None if there is no candidate).
    """
    if unknown in RENAMED:
        return (f"{unknown} is no longer a Megatron-LM flag", f"use {RENAMED[unknown]}"), RENAMED[unknown]
    if unknown in megatron_lm_flags():
        return (f"{unknown} is a Megatron-LM flag that is not supported here", "remove it from the command"), None
    meant = nearest(unknown, supported)
    return (f"unknown flag {unknown}", f"did you mean {meant}?" if meant else "see --help"), meant
