"""The training loop."""

import gc

from ft.base.errors import FtError
from megatron.core.utils import check_param_hashes_across_dp_replicas
from megatron.ft_trainer.arguments import Options
from megatron.ft_trainer.arguments.batch import train_steps
from megatron.ft_trainer.checkpoints import save
from megatron.ft_trainer.evaluate import validate
from megatron.ft_trainer.job import Job
from megatron.ft_trainer.logging.timing import phase_times
from megatron.ft_trainer.step import train_step


class DifferentWeights(FtError):
    """Data-parallel ranks have different weights, although they should have copies of the same weights."""


def train(job: Job) -> None:
    """Train to the end of the run, or until ``job.ending`` is a reason to end earlier."""
    options, state, last = job.options, job.state, train_steps(job.options.training)
    while state.step < last and job.ending is None:
        job.profiler.before(state.step + 1)
        report = train_step(job)
        job.profiler.after(state.step)
        if weights_are_compared(options, state.step):
            compare_weights(job)
        job.ending = job.exits.answer(state.step)
        evaluates = job.ending is None and job.valid_loaders and evaluation_is_due(options, state.step, last)
        if evaluates:
            job.protection.at("evaluate")
            report.validation_loss = validate(job)
        job.log.step(report)
        if job.timers and state.step % options.logging.log_interval == 0:
            job.log.line(phase_times(job.timers, options.logging.log_interval))
        ends = job.ending is not None or state.step == last
        due = save_is_due(options, state.step, ends=ends)
        if job.protection.saves(state.step, is_due=due, ends=ends) or job.checkpointer.owes_a_save:
            job.protection.at("save")
            save(job)
        job.checkpointer.maybe_finalize()
        if garbage_is_due(options, state.step, evaluates):
            gc.collect()
        job.protection.committed()


def weights_are_compared(options: Options, step: int) -> bool:
    """Return whether data-parallel ranks compare their weights after ``step``."""
    interval = options.training.check_weight_hash_across_dp_replicas_interval
    return interval is not None and step % interval == 0


def compare_weights(job: Job) -> None:
    """Compare the weights of all data-parallel ranks. All ranks have to call it.

    Raises:
        DifferentWeights: the weights are not equal.
    """
    with job.trainee.whole_params():
        if not check_param_hashes_across_dp_replicas(job.trainee.chunks, cross_check=True):
            raise DifferentWeights(f"the data-parallel ranks have different weights after step {job.state.step}")


def evaluation_is_due(options: Options, step: int, last: int) -> bool:
    """Return whether to evaluate after ``step``; ``last`` is the last step of the run."""
    e = options.evaluation
    return e.eval_iters > 0 and (step == last or (e.eval_interval is not None and step % e.eval_interval == 0))


def save_is_due(options: Options, step: int, *, ends: bool) -> bool:
    """Return whether to save a checkpoint after ``step``; ``ends``: whether the run ends with this step."""
    c = options.checkpoint
    return c.save is not None and (ends or (c.save_interval is not None and step % c.save_interval == 0))


def garbage_is_due(options: Options, step: int, evaluated: bool) -> bool:
    """Return whether to collect garbage. With --manual-gc all ranks collect garbage at the same steps, so that no rank
    waits for another.

    Args:
        options: options of the run.
        step: number of the committed step.
        evaluated: whether an evaluation has followed this step.
    """
    t = options.training
    if not t.manual_gc:
        return False
    return (evaluated and t.manual_gc_eval) or (t.manual_gc_interval > 0 and step % t.manual_gc_interval == 0)
