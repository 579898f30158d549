"""A protection of one's own in one file: a step that is an outlier is undone, and its batch is skipped.

    ft run --nproc-per-node 4 --standby 1 --run-dir runs/spikes examples/own_protection.py <flags> --ft-hot-swap
    ft report runs/spikes

A step is an outlier if its loss or its gradient norm is more than SPIKE_FACTOR (an environment variable, default 3)
times the median of the last 32 steps. Its update is taken back from a copy in host memory, which is made while forward
and backward run; the step counts, its samples are used up, and the parameters are those before it.
"""

import math
import os
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import pretrain_gpt
from ft.base import events
from ft.protection.contract import Layer, Protection, Trainer, Update
from ft.protection.table import ProtectionEntry, register
from ft.protection.training_state import TrainingState
from ft.protection.undo import Undo

FACTOR, WINDOW, LEAST = float(os.environ.get("SPIKE_FACTOR", "3")), 32, 4


class SkipSpikes(Protection):
    """The protection that is registered below; the trainer asks it for a layer."""

    def connected(self, session) -> None:
        self._session = session

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        return SpikeLayer(trainer, self._session)


class SpikeLayer(Layer):
    """Layer that undoes outlier steps. The trainer saves its history, so that workers that join later decide alike."""

    def __init__(self, trainer: Trainer, session):
        self._trainer, self._session = trainer, session
        self._undo = Undo(TrainingState(trainer.chunks, trainer.optimizer, trainer.scheduler), trainer.position)

    def update(self, step: Callable[[], Any]) -> Any:
        self._undo.wait()  # the copy has to be whole before the optimizer changes anything
        return step()

    def compute(self, work: Callable[[], Update]) -> Update:
        self._undo.begin()
        samples, update = self._trainer.batch_now, work()
        loss = torch.tensor(-math.inf if math.isnan(update.loss) else update.loss, device=torch.cuda.current_device())
        dist.all_reduce(loss, op=dist.ReduceOp.MAX)  # the last pipeline stage alone knows it
        figures = {"loss": loss.item(), "grad_norm": float(update.grad_norm or 0.0)}
        history = self._trainer.extra.setdefault("spikes", {name: [] for name in figures})
        for name, value in figures.items():
            past = history[name][-WINDOW:]
            if len(past) >= LEAST and not value <= FACTOR * median(past):
                return self._skip(update, samples, f"{name} {value:.4g} after a median of {median(past):.4g}")
        for name, value in figures.items():
            history[name] = [*history[name][-WINDOW:], value]
        return update

    def _skip(self, update: Update, samples: int, why: str) -> Update:
        self._undo.roll_back()
        self._trainer.skip(samples)
        update.applied = False
        if self._session is not None:
            what = f"undone, and its batch skipped: {why}"
            self._session.observe(events.PROTECTION_ACTED, step=self._trainer.step + 1, protection="spikes", what=what)
        return update


if __name__ == "__main__":
    register(
        ProtectionEntry("spikes", "undoes a step that is an outlier", "none", "__main__:SkipSpikes", "this script")
    )
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
