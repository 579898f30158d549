"""Training configurations for the self-test of DMR (redundant execution) that together execute all operators of a GPT.

The operators are those of megatron-core's GPT model.
"""

from dataclasses import dataclass

_ALWAYS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size {vocab} --num-layers 2 --hidden-size {hidden} "
    "--num-attention-heads 8 --seq-length {length} --micro-batch-size 2 --lr 1e-3 --clip-grad 1.0"
)
_SIZES = {
    "small": {"vocab": 500, "hidden": 64, "length": 64},
    "large": {"vocab": 8000, "hidden": 256, "length": 256},
    "huge": {"vocab": 50000, "hidden": 2048, "length": 1024},
}
"""Sizes of the models. "huge" is for GPUs, where a varying order of summation shows only with many thread blocks."""

_KINDS = {
    "dense": "--position-embedding-type learned_absolute --hidden-dropout 0.1 --attention-dropout 0.1",
    "dense, full recomputation": "--position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --group-query-attention --num-query-groups 4 --qk-layernorm "
    "--untie-embeddings-and-output-weights --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --optimizer sgd --calculate-per-token-loss",
    "MoE, all to all": "--position-embedding-type rope --num-experts 4 --moe-router-topk 2 --swiglu "
    "--disable-bias-linear --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
    "--moe-shared-expert-intermediate-size 64 --hidden-dropout 0.1 --recompute-activations",
    "MoE, all gather": "--position-embedding-type rope --num-experts 4 --moe-router-topk 2 "
    "--disable-bias-linear --moe-token-dispatcher-type allgather --moe-aux-loss-coeff 1e-2 "
    "--attention-dropout 0.1 --use-distributed-optimizer",
}
_PRECISIONS = {"fp32": "", "bf16": "--bf16"}


@dataclass(frozen=True)
class Case:
    """One model that the self-test trains for a few steps.

    Attributes:
        flags: command-line flags for the trainer, ``pretrain_gpt.py``.
    """

    name: str
    flags: str


def cases(device: str, *, deterministic: bool = False) -> list[Case]:
    """Return the cases that are trained by default on a ``device`` ("cpu" or "cuda")."""
    sizes = ("small", "huge") if device == "cuda" else ("small", "large")
    extra = " --deterministic-mode" if deterministic else ""
    return [
        Case(f"{kind}, {precision}, {size}", f"{_ALWAYS.format(**_SIZES[size])} {flags} {more}{extra}")
        for size in sizes
        for kind, flags in _KINDS.items()
        for precision, more in _PRECISIONS.items()
    ]
