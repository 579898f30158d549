"""Estimate from the flags of a run how much GPU memory and how much host memory the largest rank needs."""

import copy
from typing import Any

from ft.base.errors import UserError
from ft.lab.plan.snapshot.shards import from_flags, shards
from megatron.ft_trainer.arguments import Layout, Options

_VOCABULARIES = {"ByteLevelTokenizer": 259, "GPT2BPETokenizer": 50257, None: 259}
_ANY_VOCABULARY = 128_000


def memory(options: Options, grid: Layout) -> dict[str, Any] | None:
    """Return the estimate for the rank that needs most memory; None if the flags do not determine the size of the
    model.

    Returns:
        ``gpu``: bytes of weights, gradients, optimizer state and activations, and what DMR adds; ``host``: bytes that
        snapshots and peer copies take with --ft-hot-swap; ``assumes``: the assumptions of the estimate.
    """
    if options.core.hybrid_override_pattern or options.core.hybrid_layer_pattern:
        return None
    assumed, assumes = copy.deepcopy(options), "vocabulary as given"
    if not (assumed.tokenizer.vocab_size or assumed.tokenizer.padded_vocab_size):
        assumed.tokenizer.vocab_size = _VOCABULARIES.get(assumed.tokenizer.tokenizer_type, _ANY_VOCABULARY)
        assumes = f"vocabulary of {assumed.tokenizer.vocab_size}"
    try:
        stages = from_flags(assumed, grid)
    except UserError:
        return None
    c = options.core
    width = 2 if c.bf16 or c.fp16 else 4
    snapshots = shards(stages, assumed, grid)
    largest = max(range(grid.pp), key=lambda stage: stages[stage].dense + stages[stage].expert)
    held = stages[largest].dense + stages[largest].expert
    own = snapshots[largest]
    moved = _activations(options, grid)
    peers = options.fault_tolerance.ft_snapshot_peers
    gpu = {
        "weights": width * held,
        "gradients": (4 if c.accumulate_allreduce_grads_in_fp32 else width) * held,
        "optimizer": own.owned + own.replicated - (0 if width == 2 else 4 * held * _share(own, held)),
        "activations": moved,
    }
    gpu["total"] = sum(gpu.values())
    gpu["total_with_double_execution"] = gpu["total"] + width * _widest(options, grid)
    host = {
        "without_protection": 0.0,
        "snapshots_of_hot_swap": 2 * (own.owned + own.replicated),
        "peer_copies_of_hot_swap": 2 * peers * own.owned,
    }
    return {"gpu": gpu, "host": host, "assumes": assumes}


def _share(own: Any, held: float) -> float:
    """Return the fraction of this rank's parameters whose optimizer state is on this rank."""
    return min(1.0, (own.owned + own.replicated) / (12 * held)) if held else 0.0


def _activations(options: Options, grid: Layout) -> float:
    """Return the bytes of the activations that a rank holds at once (Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models")."""
    c, t = options.core, options.training
    tokens = options.data.seq_length * t.micro_batch_size / grid.cp
    layers = c.num_layers / grid.pp
    if c.recompute_granularity == "full":
        layer = 2.0 * tokens * c.hidden_size
    else:
        split = 34 / grid.tp if c.sequence_parallel else 10 + 24 / grid.tp
        layer = tokens * c.hidden_size * split
        if c.transformer_impl == "local" and c.recompute_granularity is None:
            layer += 5 * c.num_attention_heads * options.data.seq_length * tokens / grid.tp
    in_flight = min(grid.pp, max(1, t.global_batch_size // (t.micro_batch_size * grid.dp)))
    return layer * layers * in_flight * (1 if c.bf16 or c.fp16 else 2)


def _widest(options: Options, grid: Layout) -> float:
    """Return the number of elements of the largest operator result that double execution stores a second time."""
    c, t = options.core, options.training
    tokens = options.data.seq_length * t.micro_batch_size / grid.cp
    return tokens * max(c.ffn_hidden_size * (2 if c.swiglu else 1), c.hidden_size * 4) / grid.tp
