"""Computes the number of samples in a step, which is constant, or grows in a ramp during training."""

from megatron.ft_trainer.arguments.training import TrainingOptions


def global_batch_size(options: TrainingOptions, consumed_samples: int) -> int:
    """Return the number of samples in the step that begins after ``consumed_samples``.

    With a ramp (START INCREMENT SAMPLES), the batch grows by INCREMENT at equal distances in samples, and reaches the
    full size after SAMPLES.
    """
    if options.rampup_batch_size is None:
        return options.global_batch_size
    start, increment, ramp_samples = options.rampup_batch_size
    rungs = (options.global_batch_size - start) // increment
    if consumed_samples > ramp_samples or rungs == 0:
        return options.global_batch_size
    return min(start + int(consumed_samples / (ramp_samples / rungs)) * increment, options.global_batch_size)


def batch_sizes(options: TrainingOptions) -> set[int]:
    """Return all global batch sizes of the run."""
    if options.rampup_batch_size is not None:
        start, increment, _ = options.rampup_batch_size
        return set(range(start, options.global_batch_size + 1, increment))
    return {options.global_batch_size}


def train_steps(options: TrainingOptions) -> int:
    """Return the number of steps of the whole run; 0 if it has no length (--skip-train)."""
    if options.train_iters is not None or options.train_samples is None:
        return options.train_iters or 0
    steps = consumed = 0
    if options.rampup_batch_size is None:
        return options.train_samples // options.global_batch_size
    while consumed <= options.rampup_batch_size[2] and consumed < options.train_samples:
        consumed += global_batch_size(options, consumed)
        steps += 1
    return steps + max(options.train_samples - consumed, 0) // options.global_batch_size
