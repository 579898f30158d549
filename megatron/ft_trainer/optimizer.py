"""Builds megatron-core's optimizer and learning-rate schedule from the options."""

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.ft_trainer.arguments import Options
from megatron.ft_trainer.arguments.batch import train_steps
from megatron.ft_trainer.config import params_dtype, same_names
from megatron.patches.releases import optimizer_of


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
        max_lr=options.core.lr or 0.0,
        min_lr=options.core.min_lr,
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
