"""The trained objects: megatron-core's configurations for the options, and its GPT model inside data parallelism, with
its optimizer and schedule.

A field of a configuration gets the value of the option of the same name. The code sets explicitly only the fields that
follow from other options, and those that depend on this process (whether it has a GPU, Transformer Engine, Apex).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F

from ft.base.errors import UserError
from megatron import patches
from megatron.core import parallel_state, tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.ft_trainer.arguments import Layout, Options
from megatron.patches.releases import optimizer_of

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
    with judged_by_core():
        return config(**{name: value for name, value in given.items() if name in {f.name for f in fields(config)}})


@contextmanager
def judged_by_core() -> Iterator[None]:
    """In this context, what megatron-core rejects is a UserError with its words."""
    try:
        yield
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise UserError(f"megatron-core refuses this configuration: {error}", "change the flags it names") from error


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
    }


def _parallelism(options: Options, layout: Layout) -> dict[str, Any]:
    c, dtype = options.core, params_dtype(options)
    overlaps = layout.vpp is not None and c.overlap_p2p_comm
    return {
        "virtual_pipeline_model_parallel_size": layout.vpp,
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


@dataclass
class Trainee:
    """The model chunks of this rank (one, or one for each virtual stage), their optimizer and schedule."""

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @contextmanager
    def whole_params(self):
        """Return a context in which every rank has all parameters, without forward hooks (--overlap-param-gather).

        Evaluation and checkpoints need this context, because between steps the newest parameters exist only in their
        owners' shards.
        """
        if not self.chunks[0].ddp_config.overlap_param_gather:
            yield
            return
        sync_func, self.config.param_sync_func = self.config.param_sync_func, None
        without_hooks = []
        try:
            for chunk in self.chunks:
                without_hooks.append(chunk)
                chunk.disable_forward_pre_hook()
            yield
        finally:
            for chunk in without_hooks:
                chunk.enable_forward_pre_hook()
            self.config.param_sync_func = sync_func


def build(
    options: Options,
    layout: Layout,
    padded_vocab_size: int,
    *,
    initialize: bool = True,
    verified: bool = False,
) -> Trainee:
    """Build model, optimizer and schedule on this rank. The process groups must exist.

    Args:
        options: options of the run.
        layout: sizes of the parallel groups.
        padded_vocab_size: vocabulary size, padded for tensor parallelism.
        initialize: whether to initialize the weights; if not, the weights are undefined, which is sufficient on a rank
            that receives its weights from others.
        verified: whether a protection verifies operators; then gradients are not checked for NaN during the backward
            pass, because a NaN may come from a computation error that the protection corrects.

    Raises:
        UserError: megatron-core rejects the combination of options.
    """
    config, chunks = build_model(options, layout, padded_vocab_size, initialize=initialize)
    chunks = _in_data_parallel(options, config, chunks, verified)
    optimizer = build_optimizer(options, chunks)
    _connect(options, config, chunks, optimizer)
    return Trainee(config, chunks, optimizer, build_scheduler(options, optimizer))


def build_model(
    options: Options,
    layout: Layout,
    padded_vocab_size: int,
    *,
    initialize: bool = True,
) -> tuple[TransformerConfig, list[torch.nn.Module]]:
    """Return the configuration and the model chunks of this rank, on its device and in the training precision.

    Arguments and errors are those of :func:`build`.
    """
    config = transformer_config(options, layout)
    if not initialize:
        # Not perform_initialization=False: this also skips the marks on tensor-parallel parameters, and without these
        # marks core counts their gradients wrongly in the norm.
        config.init_method = config.output_layer_init_method = config.embedding_init_method = _leave_as_it_is
    with judged_by_core():
        chunks = _gpt_chunks(options, layout, config, padded_vocab_size)
    for chunk in chunks:
        for param in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
        chunk.cuda(torch.cuda.current_device())
    if options.core.fp16 or options.core.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return config, chunks


def _leave_as_it_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _layer_spec(options: Options, config: TransformerConfig, vp_stage: int | None):
    c, use_te = options.core, uses_te(options)
    if c.num_experts:
        return specs.get_gpt_decoder_block_spec(
            config, use_te, normalization=c.normalization, qk_l2_norm=c.qk_l2_norm, vp_stage=vp_stage
        )
    common = {name: getattr(c, name) for name in ("multi_latent_attention", "qk_l2_norm", "qk_layernorm")}
    if use_te:
        return specs.get_gpt_layer_with_transformer_engine_spec(**common)
    return specs.get_gpt_layer_local_spec(normalization=c.normalization, **common)


def _prediction_spec(options: Options, config: TransformerConfig, vp_stage: int | None):
    """Return the specification of the multi-token prediction behind the last layer; None if there is none."""
    if options.core.mtp_num_layers is None:
        return None
    use_te = uses_te(options)
    layers = specs.get_gpt_decoder_layer_specs(
        config, use_te, normalization=options.core.normalization, qk_l2_norm=options.core.qk_l2_norm, vp_stage=vp_stage
    )
    return specs.get_gpt_mtp_block_spec(config, layers[-1], use_transformer_engine=use_te, vp_stage=vp_stage)


def _gpt_chunks(options: Options, layout: Layout, config: TransformerConfig, vocab_size: int) -> list[GPTModel]:
    m = options.core
    chunks = []
    for index in range(layout.vpp or 1):
        vp_stage = index if layout.vpp else None
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=_layer_spec(options, config, vp_stage),
            vocab_size=vocab_size,
            max_sequence_length=m.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=not m.untie_embeddings_and_output_weights,
            position_embedding_type=m.position_embedding_type,
            rotary_percent=m.rotary_percent,
            rotary_base=m.rotary_base,
            rope_scaling=m.use_rope_scaling,
            rope_scaling_factor=m.rope_scaling_factor,
            seq_len_interpolation_factor=m.rotary_seq_len_interpolation_factor,
            mtp_block_spec=_prediction_spec(options, config, vp_stage),
            vp_stage=vp_stage,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        if vp_stage is not None:
            chunk.vp_stage = vp_stage
        chunks.append(chunk)
    return chunks


def _in_data_parallel(
    options: Options, config: TransformerConfig, chunks: list[torch.nn.Module], verified: bool
) -> list[DistributedDataParallel]:
    c, check_nan = options.core, options.training.check_for_nan_in_loss_and_grad
    parameters = sum(param.numel() for chunk in chunks for param in chunk.parameters())
    interleaved = config.virtual_pipeline_model_parallel_size is not None
    scales_loss = c.fp16 and c.loss_scale is None  # then NaN is an expected result
    given = {
        **same_names(DistributedDataParallelConfig, options),
        "grad_reduce_in_fp32": c.accumulate_allreduce_grads_in_fp32,
        "align_param_gather": c.align_param_gather and interleaved,
        "check_for_nan_in_grad": check_nan and not scales_loss and not verified,
        "bucket_size": parameters // c.ddp_num_buckets if c.ddp_num_buckets else c.ddp_bucket_size,
    }
    ddp_config = DistributedDataParallelConfig(**given)
    return [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def _connect(options: Options, config: TransformerConfig, chunks: list[DistributedDataParallel], optimizer) -> None:
    """Set the callbacks that megatron-core's schedules look up in the configuration."""

    def one_or_all(functions):
        return functions[0] if len(functions) == 1 else functions

    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if options.core.overlap_grad_reduce:
        config.no_sync_func = one_or_all([chunk.no_sync for chunk in chunks])
        if options.core.align_grad_reduce:
            config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in chunks])
    if options.core.overlap_param_gather and chunks[0].ddp_config.align_param_gather:
        config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in chunks])


def build_optimizer(options: Options, chunks: list[DistributedDataParallel]):
    """Return the optimizer over all chunks of this rank."""
    given = same_names(OptimizerConfig, options)
    given |= {"lr": options.core.lr or 0.0, "params_dtype": params_dtype(options)}
    with judged_by_core():
        config = OptimizerConfig(**given)
    return optimizer_of(config, chunks, with_gloo=options.core.create_gloo_process_groups)


def build_scheduler(options: Options, optimizer) -> OptimizerParamScheduler:
    """Return the schedule of learning rate and weight decay. It counts samples, not steps, as in megatron-core."""
    s, t, decay = options.schedule, options.training, options.core.weight_decay
    batch, total = t.global_batch_size, t.train_iters * t.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.core.lr or 0.0,
        min_lr=options.core.min_lr,
        lr_warmup_steps=s.lr_warmup_iters * batch,
        lr_decay_steps=s.lr_decay_iters * batch if s.lr_decay_iters else total,
        lr_decay_style=s.lr_decay_style,
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=total,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=s.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=s.override_opt_param_scheduler,
    )
