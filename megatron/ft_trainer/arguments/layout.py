"""Computes the parallel layout (the sizes TP, CP, EP, DP and PP of the rank grid) from the flags and the world size."""

import re
from dataclasses import asdict, dataclass

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.core_options import CoreOptions


@dataclass(frozen=True)
class Layout:
    """Sizes of all parallel dimensions. ``vpp`` is None without the interleaved schedule."""

    world_size: int
    tp: int
    cp: int
    ep: int
    etp: int
    dp: int
    pp: int
    vpp: int | None

    def __str__(self) -> str:
        sizes = {k: v for k, v in asdict(self).items() if k not in ("world_size", "etp") and v not in (None, 1)}
        ranks = f"{self.world_size} rank" + "s" * (self.world_size > 1)
        return ": ".join(filter(None, (ranks, " x ".join(f"{k.upper()}{v}" for k, v in sizes.items()))))


def layout(options: CoreOptions, num_layers: int, world_size: int) -> Layout:
    """Return the layout. Sizes that do not divide are rounded down (``check`` rejects them before)."""
    tp, pp, cp = (
        options.tensor_model_parallel_size,
        options.pipeline_model_parallel_size,
        options.context_parallel_size,
    )
    return Layout(
        world_size=world_size,
        tp=tp,
        cp=cp,
        ep=options.expert_model_parallel_size,
        etp=options.expert_tensor_parallel_size or tp,
        dp=world_size // (tp * pp * cp),
        pp=pp,
        vpp=_virtual_stages(options, num_layers),
    )


def _virtual_stages(options: CoreOptions, num_layers: int) -> int | None:
    """Return the number of model chunks per rank; None if that is one."""
    chunks = options.num_virtual_stages_per_pipeline_rank
    if options.pipeline_model_parallel_layout:
        chunks = len(expanded(options.pipeline_model_parallel_layout)) // options.pipeline_model_parallel_size
    if options.num_layers_per_virtual_pipeline_stage:
        extra = options.account_for_embedding_in_pipeline_split + options.account_for_loss_in_pipeline_split
        slots = num_layers + extra
        chunks = slots // options.pipeline_model_parallel_size // options.num_layers_per_virtual_pipeline_stage
    return chunks if chunks and chunks > 1 else None


def expanded(text: str) -> list[str]:
    """Return the parts of each stage of a --pipeline-model-parallel-layout such as ``Et*2|(tt|)*5L``.

    A part is one letter: E embedding, t transformer layer, m multi-token prediction, L loss.

    Raises:
        UserError: the layout cannot be read.
    """
    plain = text.replace(",", "")
    while "(" in plain or "*" in plain:
        shorter = re.sub(r"\(([^()]*)\)\*(\d+)|([EtmL])\*(\d+)|\(([^()]*)\)", _repeated, plain)
        if shorter == plain:
            break
        plain = shorter
    if not re.fullmatch(r"[EtmL|]*", plain):
        raise UserError(f"--pipeline-model-parallel-layout {text!r} cannot be read", "write stages as in Et*2|(tt|)*5L")
    return plain.split("|")


def _repeated(found: re.Match) -> str:
    group, times, letter, letters, alone = found.groups()
    if group is not None:
        return group * int(times)
    return letter * int(letters) if letter is not None else alone
