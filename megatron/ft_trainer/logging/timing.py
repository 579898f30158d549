"""Times the phases of a step with megatron-core's timers (--timing-log-level)."""

from megatron.core.timers import Timers
from megatron.ft_trainer.arguments.logging import LoggingOptions
from megatron.ft_trainer.model import Trainee

PHASES = (
    "forward-backward",
    "forward-compute",
    "backward-compute",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "all-grads-sync",
    "embedding-grads-all-reduce",
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
)
"""Names of the timers in megatron-core's schedules, gradient finalisation and optimizer.

Reading the timers is collective, so all ranks read this same list.
"""


def attach_timers(options: LoggingOptions, trainee: Trainee) -> Timers | None:
    """Create the timers and make megatron-core's schedules and optimizer use them; None for --timing-log-level 0."""
    if options.timing_log_level == 0:
        return None
    timers = Timers(options.timing_log_level, options.timing_log_option)
    trainee.config.timers = trainee.optimizer.config.timers = timers
    return timers


def phase_times(timers: Timers, steps: int) -> str | None:
    """Return milliseconds per step of every phase over the last ``steps`` steps, as text, and reset the timers.

    All ranks have to call it.
    """
    return timers.get_all_timers_string(list(PHASES), normalizer=steps, reset=True)
