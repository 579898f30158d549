"""The protections of CheckFree and CheckFree+; see :mod:`ft.protection.contract`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ft.protection.contract import Layer, Protection, Trainer
from ft.systems.checkfree.plus import ReplicatedEnds, install
from ft.systems.checkfree.rebuild import Boost
from ft.systems.checkfree.rebuilder import CheckFreeRebuilder, Settings
from ft.systems.hot_swap.layer import RebuildsStages
from ft.systems.schedule.choose import BEST, Shape, plan
from ft.systems.schedule.program import Program
from ft.worker.session import Session
from megatron.core import parallel_state
from megatron.patches import swapped_pipeline
from megatron.patches.manifest import WITH_CHECKFREE, WITH_SWAPPED_ENDS

KEY = "checkfree"
"""Key in the trainer's extra values that holds the step at which each stage was last rebuilt."""


class StageRebuild(Protection):
    """Rebuild a pipeline stage that is lost with all its copies from its neighbour stages (CheckFree, section 4.2)."""

    features = frozenset({WITH_CHECKFREE})

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        ends = next((layer.ends for layer in inner if isinstance(layer, SwappedEndsLayer)), None)
        settings = settings_of(self.asked.flags, trainer, ends)
        return RebuildsStages(partial(CheckFreeRebuilder, settings=settings))


class SwappedEnds(Protection):
    """Swap the first two and the last two stages for half of the microbatches (CheckFree+, section 4.3)."""

    features = frozenset({WITH_SWAPPED_ENDS})

    def connected(self, session: Session | None) -> None:
        swapped_pipeline.build_with(self._replicate)

    def layer(self, trainer: Trainer, inner: Sequence[Layer]) -> Layer:
        """Have the pipeline run the cheapest CheckFree+ schedule within the bound of --ft-checkfree-most-in-flight."""
        install(trainer.chunks[0], self.replicated, self._planned)
        return SwappedEndsLayer(self.replicated)

    def _replicate(self) -> ReplicatedEnds:
        self.replicated = ReplicatedEnds()
        return self.replicated

    def _planned(self, microbatches: int) -> Program:
        stages, bound = self.replicated.stages, self.asked.flags.ft_checkfree_most_in_flight
        return plan(BEST, Shape(stages, microbatches, most_in_flight=bound)).program


class SwappedEndsLayer(Layer):
    """Marks a run whose first and last stages can be rebuilt. ``ends``: the replicas of embedding and output layer."""

    def __init__(self, ends: ReplicatedEnds):
        self.ends = ends


def settings_of(flags: Any, trainer: Trainer, ends: ReplicatedEnds | None = None) -> Settings:
    """Return the settings for rebuilding stages. ``ends``: replicas of embedding and output layer, with CheckFree+."""
    return Settings(
        flags.ft_checkfree_strategy,
        Boost(flags.ft_checkfree_lr_factor, flags.ft_checkfree_lr_decay_iters),
        trainer.clip_grad if flags.ft_checkfree_norms == "clipped" else None,
        trainer.reseed,
        lambda: _rebuilt_stages(trainer.extra, parallel_state.get_pipeline_model_parallel_world_size()),
        ends,
        trainer.draws_apart,
    )


def _rebuilt_stages(extra: dict[str, Any], stages: int) -> dict[str, int]:
    """Return pipeline stage -> step of its last rebuild; entries of a checkpoint of another layout are dropped."""
    kept = extra.get(KEY)
    if kept is None or kept["stages"] != stages:
        kept = extra[KEY] = {"stages": stages, "rebuilt_at": {}}
    return kept["rebuilt_at"]
