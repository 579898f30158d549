"""Figures of a run: the summary before its first step, and the FLOPs of a step.

FLOPs count forward and backward matrix products, without recomputation.
"""

from importlib.metadata import PackageNotFoundError, version

import torch

from megatron import patches
from megatron.core import parallel_state
from megatron.ft_trainer.arguments import Layout, Options
from megatron.ft_trainer.arguments.core_options import CoreOptions
from megatron.ft_trainer.model import params_dtype, uses_te


def startup_summary(options: Options, layout: Layout, parameters: int, tokenizer) -> str:
    """Return a summary of model, data and platform, in a few lines. ``parameters``: those of the whole model."""
    m, t = options.core, options.training
    experts = f", {options.core.num_experts} experts" if options.core.num_experts else ""
    rows = {
        "megatron-core": f"{version('megatron-core')}, torch {torch.__version__}, {_installed('transformer-engine')}, "
        f"{_installed('apex')}",
        "platform": f"{patches.platform().name}, {layout}",
        "layers": "transformer_engine" if uses_te(options) else "local (torch)",
        "model": f"{m.num_layers} layers, hidden {m.hidden_size}, {m.num_attention_heads} heads{experts}, "
        f"{parameters / 1e6:.2f} M parameters, {str(params_dtype(options)).removeprefix('torch.')}",
        "tokenizer": f"{type(tokenizer).__name__}, vocabulary {tokenizer.vocab_size}",
        "batch": f"{t.global_batch_size} samples of {options.data.seq_length} tokens, micro batch {t.micro_batch_size}",
        "length": f"{t.train_iters} steps",
    }
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())


def count_parameters(chunks: list[torch.nn.Module]) -> int:
    """Return the number of parameters of the whole model, each counted once.

    All ranks have to call it, and get the same result.
    """
    counts = torch.zeros(2, dtype=torch.int64, device=torch.cuda.current_device())
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for param in (p for chunk in chunks for p in chunk.parameters()):
        if getattr(param, "shared", False):
            continue
        if not getattr(param, "allreduce", True):
            counts[1] += param.numel()
        elif getattr(param, "tensor_model_parallel", False) or tp_rank == 0:
            counts[0] += param.numel()
    torch.distributed.all_reduce(counts[:1], group=parallel_state.get_model_parallel_group())
    torch.distributed.all_reduce(counts[1:], group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return int(counts.sum())


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


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
