"""FLOPs of a training step, for throughput figures: forward and backward matrix products, without recomputation."""

from megatron.ft_trainer.arguments.core_options import CoreOptions

FORWARD_AND_BACKWARD = 3
"""FLOPs of forward and backward over those of the forward: the backward has two products for each forward product."""


def step_flops(model: CoreOptions, seq_length: int, padded_vocab_size: int, samples: int) -> float:
    """Return the FLOPs of one step over ``samples`` sequences, on all ranks together (a multiply-add counts as two).

    Attention scores count half, as the mask is causal; embeddings, norms and activations are left out.

    Args:
        model: options of the model.
        seq_length: tokens in a sequence.
        padded_vocab_size: rows of the output layer.
        samples: number of sequences.
    """
    moe_layers = _moe_layers(model)
    layers = model.num_layers * _attention(model, seq_length)
    layers += (model.num_layers - moe_layers) * _mlp(model, model.ffn_hidden_size)
    if moe_layers:
        routed = model.moe_router_topk * (model.moe_ffn_hidden_size or model.ffn_hidden_size)
        layers += moe_layers * _mlp(model, routed + (model.moe_shared_expert_intermediate_size or 0))
    logits = 2 * model.hidden_size * padded_vocab_size
    return FORWARD_AND_BACKWARD * samples * seq_length * (layers + logits)


def _attention(model: CoreOptions, seq_length: int) -> float:
    """Return the FLOPs per token and layer of the forward pass."""
    heads = model.num_attention_heads
    groups = model.num_query_groups if model.group_query_attention else heads
    width = model.kv_channels
    projections = 2 * model.hidden_size * width * (2 * heads + 2 * groups)
    scores = 2 * 2 * heads * width * seq_length / 2
    return projections + scores


def _mlp(model: CoreOptions, ffn_hidden_size: int) -> float:
    """Return the FLOPs per token and layer of the forward pass. A gated MLP has three matrices instead of two."""
    return 2 * model.hidden_size * ffn_hidden_size * (3 if model.swiglu or model.quick_geglu else 2)


def _moe_layers(model: CoreOptions) -> int:
    if model.num_experts is None:
        return 0
    if isinstance(model.moe_layer_freq, list):
        return sum(model.moe_layer_freq)
    return len(range(0, model.num_layers, model.moe_layer_freq))
