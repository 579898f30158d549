"""Adapter that gives fault-tolerance systems access to a training job.

It implements :class:`ft.protection.contract.Trainer`, the interface that hot-swap recovery, FT-HSDP, DMR and the other
systems in ``ft`` use. That class documents the attributes and methods.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ft.protection import training_state
from megatron.ft_trainer.arguments import Layout, Options
from megatron.ft_trainer.checkpointing import inventory
from megatron.ft_trainer.checkpointing.content import TrainState
from megatron.ft_trainer.data.loader import Loaders
from megatron.ft_trainer.initialize import seed_everything
from megatron.ft_trainer.job import Job, load, save
from megatron.ft_trainer.loop import rehearse


class JobTrainer:
    """The interface of one :class:`Job` to the fault-tolerance systems that protect it. Most members delegate to it."""

    def __init__(self, job: Job):
        self._job, self.position = job, JobPosition(job)
        options, trainee = job.options, job.trainee
        self.chunks, self.optimizer, self.scheduler = trainee.chunks, trainee.optimizer, trainee.scheduler
        self.loaders: Loaders = job.train_loaders or []
        self.seed, self.clip_grad = options.training.seed, options.core.clip_grad
        self.draws_apart = False
        self.steps, self.batch = options.training.train_iters, options.training.global_batch_size
        self.batch_now = self.batch
        self.saves = options.checkpoint.save is not None
        self.save_interval = options.checkpoint.save_interval if self.saves else None

    @property
    def extra(self) -> dict[str, Any]:
        return self._job.state.extra

    @property
    def step(self) -> int:
        return self._job.state.step

    @property
    def samples(self) -> int:
        return self._job.state.consumed_train_samples

    def microbatches(self, samples: int) -> int:
        return self._job.microbatches(samples)

    def fingerprint(self) -> dict[str, str | int]:
        return fingerprint(self._job.options, self._job.layout)

    def reseed(self, step: int) -> None:
        seed_everything(self._job.options, step)

    def rehearse(self, samples: int) -> None:
        rehearse(self._job, samples)

    def skip(self, samples: int) -> None:
        for loader in filter(None, self.loaders):
            loader.seek(self.samples + samples)

    def newest_checkpoint(self) -> Path | None:
        folder = self._job.options.checkpoint.save
        if folder is None or not Path(folder).is_dir():
            return None
        newest = inventory.newest_complete(inventory.scan(Path(folder)))
        return None if newest is None else Path(folder) / newest.name

    def is_saved(self, step: int) -> bool:
        try:
            found = inventory.scan(Path(self._job.options.checkpoint.save))
        except OSError:
            return False
        return any(each.complete and each.step == step for each in found)

    def load(self) -> bool:
        job = self._job
        return load(job.checkpointer, job.options, job.trainee, job.state, is_restart=True)

    def save(self) -> None:
        save(self._job)

    def rewind(self) -> None:
        self._job.log.rewind(self.step)

    def end(self, reason: str) -> None:
        self._job.exits.end(reason)


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


_NOT_DECIDING = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),  # in the grid
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "distributed_backend", "local_rank"),
    *("distributed_timeout_minutes", "use_tp_pp_dp_mapping", "log_num_zeros_in_grad"),
)
"""Options of megatron-core that do not change the operators of a step, or that the layout contains."""


def fingerprint(options: Options, layout: Layout) -> dict[str, str | int]:
    """Return the fingerprint of a run: property -> value."""
    values, training = options.as_dict()["core"], options.training
    settings = {name: value for name, value in values.items() if name not in _NOT_DECIDING}
    return training_state.fingerprint(
        {**settings, "seq_length": options.data.seq_length},
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp or 1,
        dp=layout.dp,
        ep=layout.ep,
        micro_batch=training.micro_batch_size,
        global_batch=training.global_batch_size,
    )
