"""The interface of a checkout's trainer to the systems that protect it: :class:`ft.protection.contract.Trainer`."""

import random
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ft.adapters.megatron_lm import passes, saves, step
from ft.adapters.megatron_lm.loader import StreamLoader
from ft.adapters.megatron_lm.position import CheckoutPosition
from ft.adapters.megatron_lm.state import Run
from megatron.core import parallel_state, tensor_parallel

_STEP_SEEDS = 1_000_003
"""What a step's number is multiplied by in a seed, so that the seeds of steps and ranks differ."""


class CheckoutTrainer:
    """Provides the parts of a :class:`Run` through the interface that :mod:`ft.protection.contract` documents."""

    def __init__(self, run: Run):
        self._run, self.position = run, CheckoutPosition(run)
        args = run.args
        self.seed, self.clip_grad, self.draws_apart = args.seed, args.clip_grad, args.data_parallel_random_init
        self.steps, self.batch = args.train_iters, args.global_batch_size
        self.saves = args.save is not None
        self.save_interval = args.save_interval if self.saves else None

    @property
    def chunks(self) -> list:
        return self._run.chunks

    @property
    def optimizer(self) -> Any:
        return self._run.optimizer

    @property
    def scheduler(self) -> Any:
        return self._run.scheduler

    @property
    def loaders(self) -> list[StreamLoader]:  # only in a run whose training data are divided
        return self._run.iterators.loaders

    @property
    def extra(self) -> dict[str, Any]:
        return self._run.extra

    @property
    def step(self) -> int:  # committed steps
        return self._run.step

    @property
    def samples(self) -> int:
        return self._run.args.consumed_train_samples

    @property
    def batch_now(self) -> int:
        from megatron.core.num_microbatches_calculator import get_current_global_batch_size

        return get_current_global_batch_size()

    def microbatches(self, samples: int) -> int:
        return samples // (self._run.args.micro_batch_size * self._run.args.data_parallel_size)

    def fingerprint(self) -> dict[str, str | int]:
        return step.fingerprint(self._run)

    def reseed(self, step: int) -> None:
        args = self._run.args
        seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank() + _STEP_SEEDS * step
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed, args.te_rng_tracker, args.inference_rng_tracker)

    def rehearse(self, samples: int) -> None:
        passes.rehearse(self._run, samples)

    def newest_checkpoint(self) -> Path | None:
        return saves.newest(self._run.args.save)

    def is_saved(self, step: int) -> bool:
        found = self.newest_checkpoint()
        return found is not None and found.name == f"iter_{step:07d}"

    def load(self) -> bool:
        is_loaded = saves.load(self._run)
        if is_loaded:
            self.position.set(self.position.get())
        return is_loaded

    def save(self) -> None:
        saves.save(self._run)

    def rewind(self) -> None:
        self._run.log.rewind(self.step)

    def end(self, reason: str) -> None:
        self._run.is_ended = True
        if dist.get_rank() == 0:
            print(f"the run ends after step {self.step + 1}: {reason}", flush=True)
