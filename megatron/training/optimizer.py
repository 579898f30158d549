"""Builds megatron-core's optimizer and learning-rate schedule from the options."""

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training.arguments import Options
from megatron.training.arguments.batch import train_steps
from megatron.training.config import params_dtype


def build_optimizer(options: Options, chunks: list[DistributedDataParallel]):
    """Return the optimizer over all chunks of this rank."""
    o, s, precision = options.optimizer, options.schedule, options.precision
    config = OptimizerConfig(
        optimizer=o.optimizer,
        lr=s.lr if s.lr is not None else 0.0,
        min_lr=s.min_lr,
        decoupled_lr=s.decoupled_lr,
        decoupled_min_lr=s.decoupled_min_lr,
        weight_decay=o.weight_decay,
        apply_wd_to_qk_layernorm=o.apply_wd_to_qk_layernorm,
        fp16=precision.fp16,
        bf16=precision.bf16,
        params_dtype=params_dtype(options),
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_eps=o.adam_eps,
        sgd_momentum=o.sgd_momentum,
        use_distributed_optimizer=options.parallel.use_distributed_optimizer,
        overlap_param_gather=options.parallel.overlap_param_gather,
        clip_grad=o.clip_grad,
        log_num_zeros_in_grad=options.logging.log_num_zeros_in_grad,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=options.parallel.create_gloo_process_groups)


def build_scheduler(options: Options, optimizer) -> OptimizerParamScheduler:
    """Return the schedule of learning rate and weight decay. It counts samples, not steps, as in megatron-core."""
    s, t, decay = options.schedule, options.training, options.optimizer.weight_decay
    if t.train_samples is not None:
        total = t.train_samples
        decay_steps, warmup = s.lr_decay_samples or total, s.lr_warmup_samples
        anneal = s.lr_wsd_decay_samples
    else:
        batch = t.global_batch_size
        total = (train_steps(t) or 1) * batch
        decay_steps, warmup = (s.lr_decay_iters * batch if s.lr_decay_iters else total), s.lr_warmup_iters * batch
        anneal = s.lr_wsd_decay_iters * batch if s.lr_wsd_decay_iters else None
    if s.lr_warmup_fraction is not None:
        warmup = s.lr_warmup_fraction * decay_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=s.lr_warmup_init,
        max_lr=s.lr if s.lr is not None else 0.0,
        min_lr=s.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay_steps,
        lr_decay_style=s.lr_decay_style,
        start_wd=decay if s.start_weight_decay is None else s.start_weight_decay,
        end_wd=decay if s.end_weight_decay is None else s.end_weight_decay,
        wd_incr_steps=total,
        wd_incr_style=s.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=s.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=s.override_opt_param_scheduler,
        wsd_decay_steps=anneal,
        lr_wsd_decay_style=s.lr_wsd_decay_style,
    )
