"""The trainer's position in the run, which a recovery saves and restores."""

from dataclasses import asdict
from typing import Any

from megatron.training.checkpointing import TrainState
from megatron.training.job import Job


class JobPosition:
    """All state of a job that changes from step to step, except model, optimizer, schedule and random generators."""

    def __init__(self, job: Job):
        self._job = job

    def get(self) -> dict[str, Any]:
        return {"step": self._job.state.step, "state": asdict(self._job.state), "ending": self._job.ending}

    def set(self, position: dict[str, Any]) -> None:
        """Restore a position. Collective: the checkpointer agrees with other ranks on what is saved."""
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
