"""Builds megatron-core's configurations from the options.

A field gets the value of the option of the same name. The code sets explicitly only the fields that follow from other
options, and those that depend on this process (whether it has a GPU, Transformer Engine, Apex).
"""

from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F

from ft.base.errors import UserError
from megatron import patches
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.ft_trainer.arguments import Layout, Options

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8, "auto": None}


def transformer_config(options: Options, layout: Layout) -> TransformerConfig:
    """Return megatron-core's configuration for ``options``.

    Raises:
        UserError: megatron-core rejects the combination; the error has megatron-core's message.
    """
    config = MLATransformerConfig if options.core.multi_latent_attention else TransformerConfig
    given = {
        **same_names(config, options),
        **_network(options),
        **_kernels(options),
        **_parallelism(options, layout),
    }
    try:
        return config(**{name: value for name, value in given.items() if name in {f.name for f in fields(config)}})
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise UserError(f"megatron-core refuses this configuration: {error}", "change the flags it names") from error


def data_parallel_config(
    options: Options, parameters: int, *, interleaved: bool, checks_nan: bool
) -> DistributedDataParallelConfig:
    """Return megatron-core's configuration of data parallelism.

    Args:
        options: options of the run.
        parameters: number of parameters of this rank.
        interleaved: whether the interleaved pipeline schedule is used.
        checks_nan: whether NaN in gradients ends the run.
    """
    c = options.core
    given = {
        **same_names(DistributedDataParallelConfig, options),
        "grad_reduce_in_fp32": c.accumulate_allreduce_grads_in_fp32,
        "align_param_gather": c.align_param_gather and interleaved,
        "check_for_nan_in_grad": checks_nan,
        "bucket_size": parameters // c.ddp_num_buckets if c.ddp_num_buckets else c.ddp_bucket_size,
    }
    return DistributedDataParallelConfig(**given)


def same_names(config: type, options: Options) -> dict[str, Any]:
    """Return field -> value for the fields of a configuration of megatron-core that have an option of their name."""
    values = vars(options.core)
    given = {f.name: values[f.name] for f in fields(config) if f.name in values}
    # The fields that take a torch.dtype. Others, such as moe_router_dtype, take the name of a dtype.
    of_torch = {f.name for f in fields(config) if "torch.dtype" in str(f.type)}
    return given | {name: _DTYPES[given[name]] for name in of_torch & set(given) if given[name] in _DTYPES}


def params_dtype(options: Options) -> torch.dtype:
    """Return the dtype of the model parameters."""
    return torch.bfloat16 if options.core.bf16 else torch.float16 if options.core.fp16 else torch.float32


def _network(options: Options) -> dict[str, Any]:
    c = options.core
    found: dict[str, Any] = {
        "num_query_groups": c.num_query_groups if c.group_query_attention else None,
        "num_moe_experts": c.num_experts,
        "add_qkv_bias": c.add_qkv_bias or c.add_bias_linear,
        "fp8_param": c.fp8_param_gather,
        "fp4_param": getattr(c, "fp4_param_gather", False),  # megatron-core has it since 0.17
        "inference_sampling_seed": options.training.seed,
        "calculate_per_token_loss": c.calculate_per_token_loss,
    }
    if c.swiglu:
        found |= {"activation_func": F.silu, "gated_linear_unit": True}
    elif c.quick_geglu:
        found |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    elif c.squared_relu:
        found |= {"activation_func": squared_relu}
    return found


def _kernels(options: Options) -> dict[str, Any]:
    c, platform = options.core, patches.platform()
    # with DMR, megatron-core takes torch's norms instead of Apex's (megatron.patches.plain_kernels)
    has_apex = platform.offers("apex") and not options.fault_tolerance.intercepts_operators
    use_te, has_softmax = uses_te(options), platform.offers("scaled_masked_softmax_cuda")
    # An extension of Apex. Transformer Engine's layers can do without it, but megatron-core's own output layer needs it
    # (tensor_parallel/layers.py refuses the fusion if the import fails), and Apex is often built without it.
    accumulates = platform.imports("fused_weight_gradient_mlp_cuda")
    # megatron-core fuses GELU and SwiGLU in dense layers, and in experts only the latter
    fused = c.bias_swiglu_fusion if c.swiglu else c.bias_gelu_fusion and c.add_bias_linear and not c.num_experts
    fused = fused and not (c.squared_relu or c.quick_geglu)
    return {
        "transformer_impl": "transformer_engine" if use_te else "local",
        "attention_backend": AttnBackend[c.attention_backend or "auto"],
        "attention_softmax_in_fp32": c.attention_softmax_in_fp32 or c.apply_query_key_layer_scaling,
        "masked_softmax_fusion": has_softmax and c.masked_softmax_fusion,
        "bias_activation_fusion": fused,
        "apply_rope_fusion": use_te and c.apply_rope_fusion and c.position_embedding_type == "rope",
        "persist_layer_norm": has_apex and c.persist_layer_norm,
        "gradient_accumulation_fusion": accumulates and c.gradient_accumulation_fusion,
        "use_cpu_initialization": bool(c.use_cpu_initialization),
    }


def _parallelism(options: Options, layout: Layout) -> dict[str, Any]:
    c, dtype = options.core, params_dtype(options)
    overlaps = layout.vpp is not None and c.overlap_p2p_comm
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "num_layers_in_first_pipeline_stage": c.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": c.decoder_last_pipeline_num_layers,
        "cp_comm_type": c.cp_comm_type[0] if len(c.cp_comm_type) == 1 else c.cp_comm_type,
        "overlap_p2p_comm": overlaps,
        "batch_p2p_comm": not overlaps,
        "deallocate_pipeline_outputs": True,
        "cpu_offloading": bool(c.cpu_offloading_num_layers),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }


def uses_te(options: Options) -> bool:
    """Return whether the layers are Transformer Engine's: whether it is installed, and no flag excludes it."""
    return options.core.transformer_impl != "local" and patches.platform().offers("transformer_engine")
