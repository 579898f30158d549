"""Collects a rank's training state from megatron-core's objects for a snapshot, and writes a restored state back.

A snapshot has two sections of tensors: ``owned``, which no other rank has, and ``replicated``, which all data-parallel
peers have too. Only ``owned`` is sent to peers. Values that are no tensors are in the envelope (JSON) or in blobs (byte
strings).

===========================  ======================================================================================
part of the state            where a snapshot has it
===========================  ======================================================================================
main parameters and          ``owned``: shards of the distributed optimizer, experts under expert parallelism, and
optimizer state              everything if there is no data parallelism; otherwise ``replicated``
frozen parameters            ``replicated`` (``owned`` without data parallelism)
module buffers, scales of    blobs: forward passes change them, so they are copied at once
fp8 (delayed scaling)
numbers of the optimizer     envelope: values of parameter groups, step counts that are Python numbers
schedule, loss scaler        envelope
random number generators     blobs
===========================  ======================================================================================

Model parameters are not copied if an optimizer has a main copy or a shard of them: after a restore, megatron-core's own
cast and all-gather recompute them bit for bit.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ft.base.errors import UserError
from ft.state.snapshot import optimizers, rng
from ft.state.snapshot.state import RankState
from megatron.core import fp8_utils, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_BUFFER = "buffer/"


class Capture:
    """Provides the live state of one rank as a :class:`RankState`.

    The list of tensors is made once and used again until tensors are replaced; numbers are read at every step.

    The constructor allocates the optimizer's state if there is none yet, which does not change training results.

    Args:
        chunks: model chunks.
        optimizer: an optimizer of megatron-core.
        scheduler: an object with ``state_dict`` and ``load_state_dict``, or None.
        alone: whether no other rank holds the same part of the model, so that the whole state has to be sent to peers.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: Any, scheduler: Any = None, *, alone: bool):
        self._parts = optimizers.parts(optimizer)
        self._scheduler, self._alone = scheduler, alone
        for part in self._parts:
            optimizers.allocate(part.optimizer)
        modules = list(enumerate(chunks))
        self._frozen = {
            f"frozen/{i}/{name}": optimizers.local(p.detach())
            for i, chunk in modules
            for name, p in chunk.named_parameters()
            if not p.requires_grad
        }
        # where the buffers are, and not the tensors: a forward pass may put another tensor there
        self._buffers = {
            f"{_BUFFER}{i}/{path}.{key}": (part, key)
            for i, chunk in modules
            for path, part in chunk.named_modules()
            for key, held in part._buffers.items()
            if held is not None
        }
        self._scales = DelayedScaling(chunks)
        self._layout = _layout()
        self._owned: dict[str, torch.Tensor] = {}
        self._replicated: dict[str, torch.Tensor] = {}
        self._counters: dict[str, tuple[dict[str, Any], str]] = {}
        self._storages: list[int] | None = None

    @property
    def copies_are_complete(self) -> bool:
        """Return whether a peer copy holds the whole state, so that a restore needs nothing else from data-parallel
        peers.
        """
        if self._storages is None:
            self._find()
        return not any(tensor.numel() for tensor in self._replicated.values())

    def state(self, extra: dict[str, Any]) -> RankState:
        """Return the live tensors with the present numbers.

        As long as no tensor was replaced, successive results share the same mapping objects.

        Args:
            extra: further JSON values, from the trainer.
        """
        if self._storages is None or self._storages != self._find_storages():
            self._find()
        scaled = self._scales.order()
        envelope = {
            "layout": self._layout,
            "fp8": scaled,
            "groups": [
                [optimizers.numbers(group) for group in optimizers.groups(part.optimizer)] for part in self._parts
            ],
            "counters": {name: holder[key] for name, (holder, key) in self._counters.items()},
            "scalers": [optimizers.scaler_state(part) for part in self._parts],
            "scheduler": None if self._scheduler is None else optimizers.numbers(self._scheduler.state_dict()),
            "extra": extra,
        }
        blobs = rng.blobs() | {_FP8: self._scales.encoded(scaled)}
        for name, (part, key) in self._buffers.items():
            blobs[name] = part._buffers[key].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return RankState(self._owned, self._replicated, envelope, blobs)

    def apply(self, restored: RankState) -> dict[str, Any]:
        """Write everything except the tensors back to megatron-core's objects, and return ``extra``.

        Raises:
            UserError: the snapshot belongs to another model or optimizer.
        """
        envelope, blobs = restored.envelope, restored.blobs
        if envelope["layout"] != self._layout or len(envelope["groups"]) != len(self._parts):
            raise UserError(
                f"the snapshot is of layout {envelope['layout']}, this worker of {self._layout}",
                "start all workers with the same flags",
            )
        for part, groups, scaler in zip(self._parts, envelope["groups"], envelope["scalers"], strict=True):
            for group, numbers in zip(optimizers.groups(part.optimizer), groups, strict=True):
                optimizers.set_numbers(group, numbers)
            optimizers.set_scaler(part, scaler)
        for name, value in envelope["counters"].items():
            state, key = self._counters[name]
            state[key] = value
        if self._scheduler is not None:
            optimizers.set_schedule(self._scheduler, envelope["scheduler"])
        with torch.no_grad():
            for name, (part, key) in self._buffers.items():
                buffer = part._buffers[key]
                if len(blobs[name]) != buffer.nbytes and key in part._non_persistent_buffers_set:
                    continue  # a cache, such as YaRN's cosines: a forward pass that needs a longer one makes it anew
                saved = torch.frombuffer(bytearray(blobs[name]), dtype=torch.uint8) if blobs[name] else None
                if saved is not None:
                    buffer.copy_(saved.view(buffer.dtype).view(buffer.shape))
        self._scales.restore(envelope["fp8"], blobs[_FP8])
        rng.restore(blobs)
        extra: dict[str, Any] = envelope["extra"]
        return extra

    def adopt(self, envelope: dict[str, Any]) -> dict[str, Any]:
        """Take over the values that all pipeline stages have in common from another stage's envelope; return ``extra``.

        These are the states of the schedule and of the loss scaler. The optimizer's moments and step counts are reset
        to zero.
        """
        for part, scaler in zip(self._parts, envelope["scalers"], strict=False):
            optimizers.set_scaler(part, scaler)
        if self._scheduler is not None:
            optimizers.set_schedule(self._scheduler, envelope["scheduler"])
        for part in self._parts:
            optimizers.forget(part.optimizer)
        extra: dict[str, Any] = envelope["extra"]
        return extra

    def unsharded(self) -> dict[str, torch.Tensor]:
        """Return the live tensors of those optimizers that are not sharded, by name: all ranks with the same parameters
        have them bit for bit.
        """
        if self._storages is None or self._storages != self._find_storages():
            self._find()
        live = {**self._owned, **self._replicated}
        return {
            name: tensor for name, tensor in live.items() if name not in self._frozen and not self._is_sharded(name)
        }

    def take_over(self, envelope: dict[str, Any], unsharded: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Continue with the state of a data-parallel peer; return ``extra`` of its envelope.

        Sharded optimizers, of which the peer has another shard, begin with new moments and step counts.

        Args:
            envelope: the peer's envelope.
            unsharded: the peer's :meth:`unsharded`.
        """
        extra = self.adopt(envelope)
        for part, groups in zip(self._parts, envelope["groups"], strict=True):
            sharded = isinstance(part, DistributedOptimizer)
            for group, given in zip(optimizers.groups(part.optimizer), groups, strict=True):
                optimizers.set_numbers(group, {k: v for k, v in given.items() if not (sharded and k == "step")})
        with torch.no_grad():
            for name, tensor in self.unsharded().items():
                tensor.copy_(unsharded[name])
        for name, value in envelope["counters"].items():
            if not self._is_sharded(name) and name in self._counters:
                state, key = self._counters[name]
                state[key] = value
        return extra

    def _is_sharded(self, name: str) -> bool:
        """Return whether the value of this name belongs to an optimizer of which each rank has a shard."""
        return isinstance(self._parts[int(name.partition("/")[0])], DistributedOptimizer)

    def _find(self) -> None:
        """Classify all tensors as owned or replicated, at the first use and after tensors were replaced (by loading a
        checkpoint).
        """
        self._owned, self._replicated, self._counters = {}, {}, {}
        for number, part in enumerate(self._parts):
            sharded = isinstance(part, DistributedOptimizer)
            for name, group, holder, key in optimizers.entries(part.optimizer):
                value, name = holder[key], f"{number}/{name}"
                if isinstance(value, torch.Tensor):
                    is_split = sharded or isinstance(value, DTensor)
                    mine = self._alone or is_split or group.get("is_expert_parallel", False)
                    (self._owned if mine else self._replicated)[name] = optimizers.local(value.detach())
                elif value is not None:
                    self._counters[name] = (holder, key)
        (self._owned if self._alone else self._replicated).update(self._frozen)
        self._storages = self._find_storages()

    def _find_storages(self) -> list[int]:
        """Return the addresses of the optimizer's tensors. A changed list means that tensors were replaced."""
        return [
            optimizers.local(value).data_ptr()
            for part in self._parts
            for holder in optimizers.holders(part.optimizer)
            for group in holder.param_groups
            for parameter in group["params"]
            if parameter is not None
            for value in (parameter, *holder.state.get(parameter, {}).values())
            if isinstance(value, torch.Tensor)
        ]


def _layout() -> dict[str, int]:
    """Return the rank's position in the grid of parallel groups. A snapshot fits only a rank with the same position."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "tp_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "pp_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_rank(),
        "cp_size": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_rank(),
        "dp_size": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_rank(),
        "ep_size": parallel_state.get_expert_model_parallel_world_size(),
    }


_FP8 = "fp8"
_MANAGER = "FP8GlobalStateManager"
_MODULES = "transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"
_PLACE = "buffer_index_and_autocast_key"
_DIRECTIONS, _HELD = ("scaling_fwd", "scaling_bwd"), ("scale", "amax_history")
_LISTS = ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer")
_DEPTHS = ("autocast_depth", "FP8_AUTOCAST_DEPTH")
_RECOMPUTED = "fp8_tensors_recompute_buffer"


class DelayedScaling:
    """Saves and restores what fp8 with delayed scaling keeps from step to step (Transformer Engine's class of this
    name): the scales and histories of one rank's layers. Without Transformer Engine, there are none.

    A layer scales a tensor by the largest values of earlier steps: it has a scale and a history of maxima for each
    tensor. They are no buffers of the module, and Transformer Engine changes them after each forward and each backward
    pass. To do so it joins the maxima of all layers that have been called so far, in the order of their first calls,
    and takes the maximum over the ranks of a group. So the order belongs to the state as well: a layer that is missing
    in the list of one rank shifts what the ranks exchange.

    The names are those of ``FP8GlobalStateManager`` and ``TransformerEngineBaseModule`` in the releases 2.0 to 2.18.

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
