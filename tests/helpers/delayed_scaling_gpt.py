"""pretrain_gpt.py whose linear layers round as fp8 with delayed scaling does, without Transformer Engine and a GPU.

The stand-in has what makes Transformer Engine's state hard to restore: scales and histories come to be in the first
forward pass and are no buffers; quantizers keep views of them; layers are listed in the order of their first calls;
leaving the context and ending a backward pass exchange the maxima of all listed layers, and a rank with another list
would exchange something else; recomputed layers take copies from a queue; an interrupted step leaves all of it as it
was.
"""

import sys
import types
from collections import deque
from dataclasses import dataclass, field
from functools import partialmethod

import torch
import torch.distributed as dist

from ft.base.errors import FallbackError
from megatron.core import fp8_utils, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers

LARGEST = 8.0
HISTORY = 3


@dataclass
class State:
    fp8_enabled: bool = False
    autocast_depth: int = 0
    is_first: bool = False
    global_amax_buffer: dict = field(default_factory=dict)
    global_amax_history_buffer: dict = field(default_factory=dict)
    global_scale_buffer: dict = field(default_factory=dict)
    fp8_tensors_recompute_buffer: list = field(default_factory=list)


class FP8GlobalStateManager:
    quantization_state = State()

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, meta):
        if "buffer_index_and_autocast_key" in meta:
            return
        place, state = [], cls.quantization_state
        for name, key in (("scaling_fwd", "forward_one"), ("scaling_bwd", "backward_one")):
            held = meta[name]
            state.global_amax_buffer.setdefault(key, []).append(held.amax_history[0])
            state.global_amax_history_buffer.setdefault(key, []).append(held.amax_history)
            state.global_scale_buffer.setdefault(key, []).append(held.scale)
            place += [len(state.global_amax_buffer[key]) - 1, key]
        meta["buffer_index_and_autocast_key"] = place

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward):
        state, key = cls.quantization_state, "forward_one" if forward else "backward_one"
        listed = state.global_amax_buffer.get(key, [])
        if not listed:
            return
        maxima, group = torch.cat(listed), parallel_state.get_amax_reduction_group(with_context_parallel=True)
        counts = torch.tensor([len(maxima), -len(maxima)])
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
        if counts[0] != -counts[1]:
            raise FallbackError(f"ranks exchange the maxima of {-counts[1]} to {counts[0]} tensors")
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        for kept, amax in zip(listed, maxima.split([len(each) for each in listed]), strict=True):
            kept.copy_(amax)
        for history, scale in zip(state.global_amax_history_buffer[key], state.global_scale_buffer[key], strict=True):
            amax = history.max(0).values
            scale.copy_(torch.where(amax > 0, LARGEST / amax, scale))
            history.copy_(torch.roll(history, -1, 0))
            history[0].zero_()


class Autocast:
    def __enter__(self):
        state = FP8GlobalStateManager.quantization_state
        state.fp8_enabled = True
        state.is_first |= state.autocast_depth == 0
        state.autocast_depth += 1

    def __exit__(self, *_):
        state = FP8GlobalStateManager.quantization_state
        state.fp8_enabled = False
        state.autocast_depth -= 1
        if state.autocast_depth == 0 and torch.is_grad_enabled():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


class Scaling:
    def __init__(self, count):
        self.scale, self.amax_history = torch.ones(count), torch.zeros(HISTORY, count)


class Quantizer:
    def __init__(self, scaling, index):
        self.scale, self.amax = scaling.scale[index], scaling.amax_history[0][index]

    def __call__(self, tensor):
        self.amax.copy_(torch.maximum(self.amax, tensor.detach().abs().max()))
        return (tensor.detach() * self.scale).clamp(-LARGEST, LARGEST).round() / self.scale


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, quantize, quantize_gradient, ends):
        ctx.quantize, ctx.ends = quantize_gradient, ends
        return quantize(tensor)

    @staticmethod
    def backward(ctx, gradient):
        rounded = gradient if ctx.quantize is None else ctx.quantize(gradient * 1000) / 1000
        if ctx.ends:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return rounded, None, None, None


class Layer:
    """What Transformer Engine's base module adds to a linear layer."""

    def init_fp8_metadata(self, num_gemms=1):
        if self.fp8_initialized or not FP8GlobalStateManager.quantization_state.fp8_enabled:
            return
        self.fp8_meta |= {"num_gemms": num_gemms, "scaling_fwd": Scaling(2), "scaling_bwd": Scaling(1)}
        forward, backward = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
        self.quantizers = [Quantizer(forward, 0), Quantizer(forward, 1), Quantizer(backward, 0)]
        self.fp8_initialized = True

    def reset_fp8_meta_tensors(self):
        for name in ("scaling_fwd", "scaling_bwd"):
            self.fp8_meta[name].scale.fill_(1.0)
            self.fp8_meta[name].amax_history.zero_()


def initialized(self, init, *args, **kwargs):
    init(self, *args, **kwargs)
    self.fp8_meta, self.fp8_initialized = {}, False


def called(self, forward, input_, *args, **kwargs):
    state = FP8GlobalStateManager.quantization_state
    if not state.fp8_enabled or self.weight is None:
        return forward(self, input_, *args, **kwargs)
    self.init_fp8_metadata()
    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
    of_input, of_weight, of_gradient = self.quantizers
    is_first, state.is_first = state.is_first, False
    if "kept" not in self.fp8_meta:
        self.fp8_meta["kept"] = len(state.fp8_tensors_recompute_buffer)
        state.fp8_tensors_recompute_buffer.append(deque())
    if torch.is_grad_enabled():
        queue = state.fp8_tensors_recompute_buffer[self.fp8_meta["kept"]]
        queue.append(of_input.scale.clone())
        input_ = Taken.apply(input_, queue)
    rounded = Rounded.apply(input_, of_input, None, is_first and torch.is_grad_enabled())
    of_weight(self.weight)
    output, bias = forward(self, rounded, *args, **kwargs)
    return Rounded.apply(output, torch.clone, of_gradient, False), bias


class Taken(torch.autograd.Function):
    """Checks, in the backward pass, that the copy of the forward pass is the only one that is left."""

    @staticmethod
    def forward(ctx, tensor, queue):
        ctx.queue = queue
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        ctx.queue.popleft()
        if len(ctx.queue) > 4:
            raise FallbackError("copies of an interrupted step are left")
        return gradient, None


def plant():
    """Put the stand-in in the place of Transformer Engine, and have every linear layer of core use it."""
    module = types.ModuleType("transformer_engine.pytorch.quantization")
    module.FP8GlobalStateManager = FP8GlobalStateManager
    sys.modules[module.__name__] = module
    fp8_utils.get_fp8_context = lambda config: Autocast()
    for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        kind.init_fp8_metadata, kind.reset_fp8_meta_tensors = Layer.init_fp8_metadata, Layer.reset_fp8_meta_tensors
        kind.__init__ = partialmethod(initialized, kind.__init__)
        kind.forward = partialmethod(called, kind.forward)
    call = GPTModel.forward

    def forward(self, *args, **kwargs):
        with fp8_utils.get_fp8_context(self.config):
            return call(self, *args, **kwargs)

    GPTModel.forward = forward


if __name__ == "__main__":
    import pretrain_gpt

    plant()
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
