"""The training loop."""

from megatron.ft_trainer.arguments import Options
from megatron.ft_trainer.arguments.batch import train_steps
from megatron.ft_trainer.checkpoints import save
from megatron.ft_trainer.evaluate import validate
from megatron.ft_trainer.job import Job
from megatron.ft_trainer.step import train_step


def train(job: Job) -> None:
    """Train to the end of the run, or until ``job.ending`` is a reason to end earlier."""
    options, state, last = job.options, job.state, train_steps(job.options.training)
    while state.step < last and job.ending is None:
        report = train_step(job)
        job.ending = job.exits.answer(state.step)
        evaluates = job.ending is None and job.valid_loaders and evaluation_is_due(options, state.step, last)
        if evaluates:
            job.protection.at("evaluate")
            report.validation_loss = validate(job)
        job.log.step(report)
        ends = job.ending is not None or state.step == last
        due = save_is_due(options, state.step, ends=ends)
        if job.protection.saves(state.step, is_due=due, ends=ends) or job.checkpointer.owes_a_save:
            job.protection.at("save")
            save(job)
        job.checkpointer.maybe_finalize()
        job.protection.committed()


def evaluation_is_due(options: Options, step: int, last: int) -> bool:
    """Return whether to evaluate after ``step``; ``last`` is the last step of the run."""
    e = options.evaluation
    return e.eval_iters > 0 and (step == last or (e.eval_interval is not None and step % e.eval_interval == 0))


def save_is_due(options: Options, step: int, *, ends: bool) -> bool:
    """Return whether to save a checkpoint after ``step``; ``ends``: whether the run ends with this step."""
    c = options.checkpoint
    return c.save is not None and (ends or (c.save_interval is not None and step % c.save_interval == 0))
