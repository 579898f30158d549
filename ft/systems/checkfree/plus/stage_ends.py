"""Configure a pipeline stage's model as the first stage, the last stage, or one in between, for each microbatch.

In CheckFree+ (CheckFree, section 4.3), half of the microbatches take a route through the pipeline on which the first
two and the last two stages are swapped. A stage at an end of the pipeline is therefore the first (or last) one on the
route of some microbatches and not on that of the others.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron.core.utils import get_attr_wrapped_model


class StageEnds:
    """Configures the model of one stage.

    Args:
        chunk: the stage's megatron-core model, wrapped (for example in DDP) or not.
    """

    def __init__(self, chunk: torch.nn.Module):
        self._model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        self._block = self._model.decoder
        self._norm = self._block.final_layernorm

    def become(self, *, first: bool, last: bool) -> None:
        """Configure the model for the next forward.

        Args:
            first: whether the model embeds tokens.
            last: whether the model applies final norm and output layer, and computes the loss.
        """
        for module in (self._model, self._block):
            module.pre_process, module.post_process = first, last
        self._block._modules["final_layernorm"] = self._norm if last else None

    def rest(self) -> None:
        """Activate all modules that the stage has, as the reduction of gradients and checkpoints need."""
        self.become(first=hasattr(self._model, "embedding"), last=hasattr(self._model, "output_layer"))


def in_place(chunk: torch.nn.Module, stage: int, stages: int, run: Callable[[], Any]) -> Any:
    """Call ``run`` with the model configured for a schedule of megatron-core, and return its result.

    In such a schedule, only the first stage embeds tokens and only the last one computes the loss.

    Args:
        chunk: the model chunk of this rank.
        stage: number of this pipeline stage.
        stages: number of stages.
        run: function that trains or evaluates.
    """
    ends = StageEnds(chunk)
    ends.become(first=stage == 0, last=stage == stages - 1)
    try:
        return run()
    finally:
        ends.rest()
