"""Builds megatron-core's ``TransformerConfig`` from the options."""

import torch
import torch.nn.functional as F

from ft.base.errors import UserError
from megatron import patches
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.training.arguments import Layout, Options


def transformer_config(options: Options, layout: Layout) -> TransformerConfig:
    """Return megatron-core's configuration for ``options``.

    Raises:
        UserError: megatron-core rejects the combination; the error has megatron-core's message.
    """
    try:
        return TransformerConfig(
            **_network(options),
            **_kernels(options),
            **_experts(options),
            **_parallelism(options, layout),
            **_recomputation(options),
        )
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise UserError(f"megatron-core refuses this configuration: {error}", "change the flags it names") from error


def params_dtype(options: Options) -> torch.dtype:
    return torch.bfloat16 if options.precision.bf16 else torch.float16 if options.precision.fp16 else torch.float32


def _network(options: Options) -> dict:
    m = options.model
    activation = {}
    if m.swiglu:
        activation = {"activation_func": F.silu, "gated_linear_unit": True}
    elif m.quick_geglu:
        activation = {"activation_func": quick_gelu, "gated_linear_unit": True}
    elif m.squared_relu:
        activation = {"activation_func": squared_relu}
    return {
        "num_layers": m.num_layers,
        "hidden_size": m.hidden_size,
        "ffn_hidden_size": m.ffn_hidden_size,
        "num_attention_heads": m.num_attention_heads,
        "kv_channels": m.kv_channels,
        "num_query_groups": m.num_query_groups if m.group_query_attention else None,
        "normalization": m.normalization,
        "layernorm_epsilon": m.norm_epsilon,
        "layernorm_zero_centered_gamma": m.apply_layernorm_1p,
        "apply_residual_connection_post_layernorm": m.apply_residual_connection_post_layernorm,
        "fp32_residual_connection": m.fp32_residual_connection,
        "add_bias_linear": m.add_bias_linear,
        "add_qkv_bias": m.add_qkv_bias,
        "qk_layernorm": m.qk_layernorm,
        "rotary_interleaved": m.rotary_interleaved,
        "attention_dropout": m.attention_dropout,
        "hidden_dropout": m.hidden_dropout,
        "init_method_std": m.init_method_std,
        "apply_query_key_layer_scaling": m.apply_query_key_layer_scaling,
        "calculate_per_token_loss": options.training.calculate_per_token_loss,
        **activation,
    }


def _kernels(options: Options) -> dict:
    k, m, platform = options.kernels, options.model, patches.platform()
    sees_all = options.fault_tolerance.follows_operators  # DMR executes each operator twice: no fused kernels
    use_te, has_apex = uses_te(options), platform.offers("apex") and not sees_all
    has_softmax = platform.offers("scaled_masked_softmax_cuda") and not sees_all
    # megatron-core fuses GELU and SwiGLU in dense layers, and in experts only the latter
    fused = k.bias_swiglu_fusion if m.swiglu else k.bias_gelu_fusion and not options.moe.num_experts
    fused = fused and not (m.squared_relu or m.quick_geglu)
    return {
        "transformer_impl": "transformer_engine" if use_te else "local",
        "attention_backend": AttnBackend[k.attention_backend],
        "attention_softmax_in_fp32": options.precision.attention_softmax_in_fp32 or m.apply_query_key_layer_scaling,
        "masked_softmax_fusion": has_softmax and k.masked_softmax_fusion,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": k.bias_dropout_fusion,
        "apply_rope_fusion": use_te and k.rope_fusion and m.position_embedding_type == "rope",
        "persist_layer_norm": has_apex and k.persist_layer_norm,
        "gradient_accumulation_fusion": (use_te or has_apex) and k.gradient_accumulation_fusion,
        "cross_entropy_loss_fusion": k.cross_entropy_loss_fusion,
        "cross_entropy_fusion_impl": k.cross_entropy_fusion_impl,
        "deterministic_mode": k.deterministic_mode,
        "use_cpu_initialization": k.use_cpu_initialization,
        "perform_initialization": k.perform_initialization,
    }


def _experts(options: Options) -> dict:
    moe = options.moe
    if moe.num_experts is None:
        return {}
    plain = {name: value for name, value in vars(moe).items() if name.startswith("moe_")}
    return {
        "num_moe_experts": moe.num_experts,
        **plain,
        "moe_token_dropping": False,
    }


def _parallelism(options: Options, layout: Layout) -> dict:
    p, dtype = options.parallel, params_dtype(options)
    interleaved = layout.vpp is not None
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": p.sequence_parallel,
        "num_layers_in_first_pipeline_stage": p.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": p.decoder_last_pipeline_num_layers,
        "account_for_embedding_in_pipeline_split": p.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": p.account_for_loss_in_pipeline_split,
        "microbatch_group_size_per_vp_stage": p.microbatch_group_size_per_virtual_pipeline_stage,
        "cp_comm_type": p.cp_comm_type[0] if len(p.cp_comm_type) == 1 else p.cp_comm_type,
        "overlap_p2p_comm": interleaved and p.overlap_p2p_communication,
        # With --ft-hot-swap, process groups can be interrupted by a recovery. Torch then launches NCCL messages one by
        # one; without batch_p2p_comm core uses an order in which they cannot deadlock.
        "batch_p2p_comm": not (interleaved and p.overlap_p2p_communication) and not options.fault_tolerance.ft_hot_swap,
        "deallocate_pipeline_outputs": True,
        "fp16": options.precision.fp16,
        "bf16": options.precision.bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }


def _recomputation(options: Options) -> dict:
    r = options.recompute
    return {
        "recompute_granularity": r.recompute_granularity,
        "recompute_method": r.recompute_method,
        "recompute_num_layers": r.recompute_num_layers,
        "recompute_modules": r.recompute_modules,
        "distribute_saved_activations": r.distribute_saved_activations,
    }


def uses_te(options: Options) -> bool:
    """Return whether the layers are Transformer Engine's: it is installed, and not excluded by a flag or by DMR.

    DMR (dual modular redundancy) executes every operator a second time. It intercepts operators in torch's dispatcher,
    which Transformer Engine's kernels bypass.
    """
    if options.fault_tolerance.follows_operators:
        return False
    return options.kernels.transformer_impl != "local" and patches.platform().offers("transformer_engine")
