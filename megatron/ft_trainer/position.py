"""Gives fault-tolerance systems the position of a training run, to put into snapshots and to restore in a recovery."""

from dataclasses import asdict
from typing import Any

from megatron.ft_trainer.checkpointing import TrainState
from megatron.ft_trainer.job import Job


class JobPosition:
    """Reads and writes the state of a job that changes from step to step: counters, data position and log position.

    Model, optimizer, schedule and random generators are not part of this state.
    """

    def __init__(self, job: Job):
        self._job = job

    def get(self) -> dict[str, Any]:
        """Return the position: the step, the ``TrainState`` as a dict, and the reason to end the run, if any."""
        return {"step": self._job.state.step, "state": asdict(self._job.state), "ending": self._job.ending}

    def set(self, position: dict[str, Any]) -> None:
        """Restore a position that ``get`` has returned.

        All ranks have to call it, because they also agree on which steps are saved.
        """
        job, state = self._job, TrainState(**position["state"])
        for name, value in vars(state).items():
            setattr(job.state, name, value)
        job.ending = position["ending"]
        for loaders, consumed in (
            (job.train_loaders, state.consumed_train_samples),
            (job.valid_loaders, state.consumed_valid_samples),
            (job.test_loaders, 0),
        ):
            for loader in filter(None, loaders or []):
                loader.seek(consumed)
        for chunk in job.trainee.chunks:
            chunk.train()
        job.log.rewind(state.step)
        job.checkpointer.rejoin()
