"""Configure a stage's model as the first or the last place on a microbatch's route, or as neither."""

from collections.abc import Callable
from typing import Any

import torch

from megatron.core.utils import get_attr_wrapped_model


class Ends:
    """A stage's model that can be the first or the last place on a microbatch's route, or neither.

    Args:
        chunk: the stage's model of core, wrapped or not.
    """

    def __init__(self, chunk: torch.nn.Module):
        self._model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        self._block = self._model.decoder
        self._norm = self._block.final_layernorm

    def become(self, *, first: bool, last: bool) -> None:
        """Configure the model. ``first``: it embeds tokens. ``last``: it applies final norm and output layer, and
        computes the loss."""
        for module in (self._model, self._block):
            module.pre_process, module.post_process = first, last
        self._block._modules["final_layernorm"] = self._norm if last else None

    def rest(self) -> None:
        """Activate all modules that the stage has, for the reduction of gradients and for checkpoints."""
        self.become(first=hasattr(self._model, "embedding"), last=hasattr(self._model, "output_layer"))


def in_place(chunk: torch.nn.Module, stage: int, stages: int, run: Callable[[], Any]) -> Any:
    """Run one of core's schedules, in which only the first stage embeds and only the last one computes the loss."""
    ends = Ends(chunk)
    ends.become(first=stage == 0, last=stage == stages - 1)
    try:
        return run()
    finally:
        ends.rest()
