"""Saves and restores what fp8 with delayed scaling keeps from step to step (Transformer Engine's ``DelayedScaling``).

A layer scales a tensor by the largest values of earlier steps: it has a scale and a history of maxima for each tensor.
They are no buffers of the module, and Transformer Engine changes them after each forward and each backward pass. To do
so it joins the maxima of all layers that have been called so far, in the order of their first calls, and takes the
maximum over the ranks of a group. So the order belongs to the state as well: a layer that is missing in the list of one
rank shifts what the ranks exchange.

The names are those of ``FP8GlobalStateManager`` and ``TransformerEngineBaseModule`` in the releases 2.0 to 2.18.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core import fp8_utils

BLOB = "fp8"
_MANAGER = "FP8GlobalStateManager"
_MODULES = "transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"
_PLACE = "buffer_index_and_autocast_key"
_DIRECTIONS, _HELD = ("scaling_fwd", "scaling_bwd"), ("scale", "amax_history")
_LISTS = ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer")
_DEPTHS = ("autocast_depth", "FP8_AUTOCAST_DEPTH")
_RECOMPUTED = "fp8_tensors_recompute_buffer"


class DelayedScaling:
    """The scales and histories of one rank's layers. Without Transformer Engine, there are none.

    Args:
        chunks: model chunks.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self._layers: dict[str, tuple[Any, Any]] = {
            f"{i}/{path}": (layer, getattr(chunk, "config", None))
            for i, chunk in enumerate(chunks)
            for path, layer in chunk.named_modules()
            if isinstance(getattr(layer, "fp8_meta", None), dict)
        }

    def order(self) -> dict[str, int]:
        """Return the layers that were called with delayed scaling, in the order of their first calls.

        Returns:
            name of a layer -> number of its matrix products.
        """
        manager = _manager()
        if manager is None:
            return {}
        keys = list(_of(manager, _LISTS[0]))
        placed = []
        for name, (layer, _) in self._layers.items():
            if place := layer.fp8_meta.get(_PLACE):
                number, key = place[:2]
                placed.append((keys.index(key), number, name))
        return {name: self._layers[name][0].fp8_meta["num_gemms"] for *_, name in sorted(placed)}

    def encoded(self, order: Mapping[str, int]) -> bytes:
        """Return the scales and histories of these layers, one after another."""
        found = [tensor.detach().flatten() for tensor in self._tensors(order)]
        return torch.cat(found).cpu().numpy().tobytes() if found else b""

    def restore(self, order: Mapping[str, int], data: bytes) -> None:
        """Restore what :meth:`order` and :meth:`encoded` returned, on the same rank or on one with the same layers."""
        manager = _manager()
        if manager is None:
            return
        with torch.no_grad():  # leaving the context would exchange maxima otherwise
            if list(self.order()) != list(order):
                self._register(manager, order)
            saved, at = torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.empty(0), 0
            for tensor in self._tensors(order):  # in place: quantizers have views of them
                tensor.copy_(saved[at : at + tensor.numel()].view(tensor.shape))
                at += tensor.numel()

    def abandon_step(self) -> None:
        """Leave the fp8 context of an interrupted step, and drop the scales that it kept to recompute its layers."""
        manager = _manager()
        if manager is None:
            return
        for kept in _of(manager, _RECOMPUTED):
            kept.clear()
        state = _state(manager)
        for name in _DEPTHS:
            if hasattr(state, name):
                setattr(state, name, 0)

    def _register(self, manager: Any, order: Mapping[str, int]) -> None:
        """Make Transformer Engine know these layers, in this order, and no others."""
        for name in _LISTS:
            _of(manager, name).clear()
        for layer, _ in self._layers.values():
            layer.fp8_meta.pop(_PLACE, None)
            with contextlib.suppress(KeyError, AttributeError):  # not called yet, or by another recipe
                layer.reset_fp8_meta_tensors()
        for name, products in order.items():
            layer, config = self._layers[name]
            with fp8_utils.get_fp8_context(config):
                layer.init_fp8_metadata(num_gemms=products)
                manager.add_fp8_tensors_to_global_buffer(layer.fp8_meta)

    def _tensors(self, order: Mapping[str, int]) -> Iterator[torch.Tensor]:
        for name in order:
            meta = self._layers[name][0].fp8_meta
            for direction in _DIRECTIONS:
                for held in _HELD if direction in meta else ():
                    yield getattr(meta[direction], held)


def _manager() -> Any:
    """Return Transformer Engine's manager of fp8, None if this process has not imported it."""
    return next((getattr(sys.modules[name], _MANAGER) for name in _MODULES if name in sys.modules), None)


def _state(manager: Any) -> Any:
    """Return what has the manager's state: an object of its own in newer releases, the class itself before."""
    return getattr(manager, "quantization_state", manager)


def _of(manager: Any, name: str) -> Any:
    return getattr(_state(manager), name)
