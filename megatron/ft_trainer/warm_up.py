"""Compiles megatron-core's fused functions before the first step."""

import torch

from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
from megatron.core.fusions.fused_bias_gelu import bias_gelu
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu
from megatron.core.transformer import TransformerConfig

_CALLS = 5
_DROPOUT = 0.1


def compile_fused_functions(config: TransformerConfig, seq_length: int, micro_batch_size: int, *, gated: bool) -> None:
    """Call the fused activation and the fused dropout as the layers will, with and without gradients.

    Megatron-LM does the same after it has set the seeds. The inputs and the dropout are drawn from the device's default
    random numbers, from which later the dropout outside of tensor-parallel regions is drawn (on a CPU also some initial
    weights). So the same draws are needed here for the losses to equal Megatron-LM's.

    Args:
        config: the model's configuration.
        seq_length: tokens of a sample.
        micro_batch_size: samples of a microbatch.
        gated: whether the MLPs have a gated activation (--swiglu).
    """
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    width, rows = config.ffn_hidden_size // tp, seq_length // cp

    bias, inputs = _random(config, width), _random(config, rows, micro_batch_size, width)
    for needs_input_gradient in (False, True):
        bias.requires_grad, inputs.requires_grad = True, needs_input_gradient
        for _ in range(_CALLS):
            bias_swiglu(inputs, bias) if gated else bias_gelu(bias, inputs)

    rows = (seq_length // tp if config.sequence_parallel else seq_length) // cp
    shape = rows, micro_batch_size, config.hidden_size
    inputs, residual = _random(config, *shape), _random(config, *shape)
    bias = _random(config, config.hidden_size).expand_as(residual)
    for needs_input_gradient in (False, True):
        inputs.requires_grad, bias.requires_grad, residual.requires_grad = needs_input_gradient, True, True
        for _ in range(_CALLS):
            bias_dropout_add_fused_train([inputs, bias], residual, _DROPOUT)


def _random(config: TransformerConfig, *shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
