"""The trained objects: megatron-core's GPT model inside data parallelism, with its optimizer and schedule."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ft.protection.contract import ModelEnds
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.ft_trainer.arguments import Layout, Options
from megatron.ft_trainer.arguments.topics import train_steps
from megatron.ft_trainer.config import data_parallel_config, params_dtype, same_names, transformer_config, uses_te
from megatron.patches.releases import optimizer_of


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
    ends: ModelEnds | None = None,
    verified: bool = False,
) -> Trainee:
    """Build model, optimizer and schedule on this rank. The process groups must exist.

    Args:
        options: options of the run.
        layout: sizes of the parallel groups.
        padded_vocab_size: vocabulary size, padded for tensor parallelism.
        initialize: whether to initialize the weights; if not, the weights are undefined, which is sufficient on a rank
            that receives its weights from others.
        ends: whether this stage has embedding and output layer; None: the first and the last stage have.
        verified: whether a protection verifies operators; then gradients are not checked for NaN during the backward
            pass, because a NaN may come from a computation error that the protection corrects.
    """
    config, chunks = build_model(options, layout, padded_vocab_size, initialize=initialize, ends=ends)
    if ends is not None:
        ends.built(chunks[0])
    chunks = _in_data_parallel(options, config, chunks, verified)
    optimizer = build_optimizer(options, chunks)
    _connect(options, config, chunks, optimizer)
    if ends is not None:
        ends.connected(chunks[0])
    return Trainee(config, chunks, optimizer, build_scheduler(options, optimizer))


def build_model(
    options: Options,
    layout: Layout,
    padded_vocab_size: int,
    *,
    initialize: bool = True,
    ends: ModelEnds | None = None,
) -> tuple[TransformerConfig, list[torch.nn.Module]]:
    """Return the configuration and the model chunks of this rank, on its device and in the training precision.

    Args:
        options: options of the run.
        layout: sizes of the parallel groups.
        padded_vocab_size: vocabulary size, padded for tensor parallelism.
        initialize: as in :func:`build`.
        ends: whether this stage has embedding and output layer; None: the first and the last stage have.
    """
    config = transformer_config(options, layout)
    if ends is not None and ends.embeds and ends.holds_copy and not options.core.untie_embeddings_and_output_weights:
        config.embedding_init_method = _zero  # core sums all copies of a tied weight to make them equal
    if not initialize:
        # Not perform_initialization=False: this also skips the marks on tensor-parallel parameters, and without these
        # marks core counts their gradients wrongly in the norm.
        config.init_method = config.output_layer_init_method = config.embedding_init_method = _leave_as_it_is
    chunks = _gpt_chunks(options, layout, config, padded_vocab_size, ends)
    for chunk in chunks:
        for param in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
        chunk.cuda(torch.cuda.current_device())
    if options.core.fp16 or options.core.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return config, chunks


def _zero(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.zeros_(weight)


def _leave_as_it_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _layer_spec(options: Options, config: TransformerConfig, vp_stage: int | None):
    c, use_te = options.core, uses_te(options)
    if c.num_experts:
        return specs.get_gpt_decoder_block_spec(
            config, use_te, normalization=c.normalization, qk_l2_norm=c.qk_l2_norm, vp_stage=vp_stage
        )
    return _plain_layer_spec(options, config)


def _plain_layer_spec(options: Options, config: TransformerConfig):
    """Return the specification of a layer without experts."""
    c = options.core
    common = {"multi_latent_attention": c.multi_latent_attention, "qk_l2_norm": c.qk_l2_norm}
    if uses_te(options):
        return specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=c.qk_layernorm, **common)
    return specs.get_gpt_layer_local_spec(qk_layernorm=c.qk_layernorm, normalization=c.normalization, **common)


def _prediction_spec(options: Options, config: TransformerConfig, vp_stage: int | None):
    """Return the specification of the multi-token prediction behind the last layer; None if there is none."""
    if options.core.mtp_num_layers is None:
        return None
    use_te = uses_te(options)
    layers = specs.get_gpt_decoder_layer_specs(
        config, use_te, normalization=options.core.normalization, qk_l2_norm=options.core.qk_l2_norm, vp_stage=vp_stage
    )
    return specs.get_gpt_mtp_block_spec(config, layers[-1], use_transformer_engine=use_te, vp_stage=vp_stage)


def _gpt_chunks(
    options: Options, layout: Layout, config: TransformerConfig, vocab_size: int, ends: ModelEnds | None
) -> list[GPTModel]:
    m = options.core
    chunks = []
    for index in range(layout.vpp or 1):
        vp_stage = index if layout.vpp else None
        embeds = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        heads = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        if ends is not None:
            embeds, heads = ends.embeds, ends.heads
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=_layer_spec(options, config, vp_stage),
            vocab_size=vocab_size,
            max_sequence_length=m.max_position_embeddings,
            pre_process=embeds,
            post_process=heads,
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
    t = options.training
    parameters = sum(param.numel() for chunk in chunks for param in chunk.parameters())
    scales_loss = options.core.fp16 and options.core.loss_scale is None  # then NaN is an expected result
    ddp_config = data_parallel_config(
        options,
        parameters,
        interleaved=config.virtual_pipeline_model_parallel_size is not None,
        checks_nan=t.check_for_nan_in_loss_and_grad and not scales_loss and not verified,
    )
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if t.data_parallel_random_init:
        for chunk in wrapped:
            chunk.broadcast_params()
    return wrapped


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
    config = OptimizerConfig(**given)
    return optimizer_of(config, chunks, with_gloo=options.core.create_gloo_process_groups)


def build_scheduler(options: Options, optimizer) -> OptimizerParamScheduler:
    """Return the schedule of learning rate and weight decay. It counts samples, not steps, as in megatron-core."""
    s, t, decay = options.schedule, options.training, options.core.weight_decay
    if t.train_samples is not None:
        total = t.train_samples
        decay_steps, warmup = s.lr_decay_samples or total, s.lr_warmup_samples
    else:
        batch = t.global_batch_size
        total = (train_steps(t) or 1) * batch
        decay_steps, warmup = (s.lr_decay_iters * batch if s.lr_decay_iters else total), s.lr_warmup_iters * batch
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.core.lr or 0.0,
        min_lr=options.core.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay_steps,
        lr_decay_style=s.lr_decay_style,
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=total,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=s.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=s.override_opt_param_scheduler,
    )
