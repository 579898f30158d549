"""Functions whose kernels bypass torch's dispatcher, with what real ones do besides returning a result.

The kernels are in C and numba. Each function of ``FUNCTIONS`` has one property of those of Transformer Engine,
flash-attention or Apex.
"""

import ctypes
import subprocess
import tempfile
from collections import deque
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numba
import torch
import torch.distributed as dist

_C = """
void scale(const float *in, float factor, float *out, long n) { for (long i = 0; i < n; i++) out[i] = in[i] * factor; }
void add(const float *in, float factor, float *out, long n) { for (long i = 0; i < n; i++) out[i] += in[i] * factor; }
"""


@cache
def library() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    (folder / "kernels.c").write_text(_C)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", folder / "kernels.so", folder / "kernels.c"], check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


def _run(kernel: str, source: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    pointers = ctypes.c_void_p(source.data_ptr()), ctypes.c_float(factor), ctypes.c_void_p(out.data_ptr())
    getattr(library(), kernel)(*pointers, ctypes.c_long(out.numel()))


@numba.njit
def _largest(values):
    most = 0.0
    for value in values:
        most = max(most, abs(value))
    return most


class Fault:
    """Flips a bit of what execution number ``due`` of ``place`` has computed; knows nothing of DMR.

    Attributes:
        seen: place -> number of executions since ``arm``.
        is_lasting: whether every second execution of ``place`` is hit, from ``due`` on.
    """

    is_lasting = False

    def __init__(self):
        self.arm()

    def arm(self, place: str = "", due: int = -1) -> None:
        self.place, self.due, self.seen = place, due, {}

    def __call__(self, place: str, tensor: torch.Tensor) -> None:
        count = self.seen.get(place, 0)
        self.seen[place] = count + 1
        lasts = self.is_lasting and count >= self.due >= 0 and (count - self.due) % 2 == 0
        if place == self.place and (count == self.due or lasts):
            word = ctypes.c_int32.from_address(tensor.data_ptr())
            word.value ^= 1 << 20


fault = Fault()
STATE = SimpleNamespace()


def forget() -> None:
    """Begin anew with the state that functions keep between calls."""
    STATE.amax, STATE.scale, STATE.next_scale = torch.zeros(4), torch.full((1,), 1.25), torch.ones(1)
    STATE.late, STATE.is_late = torch.zeros(8), getattr(STATE, "is_late", False)
    Flags.is_first, Flags.updates, Flags.scale = True, 0, torch.ones(1)
    STATE.recent, STATE.calls, STATE.cache = deque(maxlen=3), 0, {}


def kept() -> list:
    """Return what functions have kept between calls."""
    return [
        STATE.amax.tolist(),
        STATE.next_scale.tolist(),
        list(STATE.recent),
        STATE.calls,
        sorted(STATE.cache),
        Flags.updates,
    ]


class Passing(torch.autograd.Function):
    """Passes gradients on as they come."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone(), None


class Scaled(torch.autograd.Function):
    """Keeps a tensor for the backward pass that it does not return."""

    @staticmethod
    def forward(ctx, x, weight):
        x = x.contiguous()
        out, aside = torch.empty_like(x), torch.empty_like(x)
        _run("scale", x, 0.5, out)
        _run("scale", x, 2.0, aside)
        fault("result", out)
        fault("saved", aside)
        ctx.save_for_backward(aside)
        ctx.factor = 0.5
        return out

    @staticmethod
    def backward(ctx, gradient):
        (aside,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        out = torch.empty_like(gradient)
        _run("scale", gradient, ctx.factor, out)
        _run("add", aside, 1e-3, out)
        fault("gradient", out)
        return out, None


class Accumulating(torch.autograd.Function):
    """Adds to a gradient buffer in place and frees what it has saved, as fused layers do."""

    @staticmethod
    def forward(ctx, x, weight):
        x = x.contiguous()
        mine = torch.empty_like(x)
        _run("scale", x, 0.25, mine)
        ctx.save_for_backward(mine)
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (mine,) = ctx.saved_tensors
        buffer = ctx.weight.main_grad
        count = min(mine.numel(), buffer.numel())
        _run("add", mine.reshape(-1)[:count].contiguous(), 1e-2, buffer.view(-1)[:count])
        fault("buffer", buffer)
        mine.untyped_storage().resize_(0)
        mine.data = torch.empty(0)
        ctx.weight = None
        return gradient.clone(), None


class WithHistory(Passing):
    """Moves a history of maxima, the next step's scale, a counter and a cache with each call, as fp8 does."""

    @staticmethod
    def forward(ctx, x, state):
        x = x.contiguous()
        out = torch.empty_like(x)
        _run("scale", x, float(state.scale), out)
        most = _largest(x.detach().reshape(-1).numpy())
        state.amax.copy_(torch.roll(state.amax, 1))
        state.amax[0] = most
        fault("history", state.amax)
        state.next_scale.fill_(1.0 + 1e-3 * float(state.amax.max()))
        state.recent.append(round(float(most), 3))
        state.calls += 1
        state.cache.setdefault(state.calls % 2, out.shape)
        return out


class Random(torch.autograd.Function):
    """Draws random numbers."""

    @staticmethod
    def forward(ctx, x, weight):
        out = x.contiguous() * (torch.rand_like(x) < 0.9)
        fault("drawn", out)
        ctx.save_for_backward(out != 0)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


class Gathering(Passing):
    """Computes something, communicates it to the other ranks, and computes with that."""

    @staticmethod
    def forward(ctx, x, weight):
        mine = torch.empty_like(x)
        _run("scale", x.contiguous(), 1.5, mine)
        fault("part", mine)
        everybody = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, mine)
        out = torch.empty_like(x)
        _run("scale", torch.stack(everybody).mean(0), 1.0, out)
        fault("gathered", out)
        return out


class WithSetup(torch.autograd.Function):
    """Has its context set up apart from the forward pass."""

    @staticmethod
    def forward(x, weight):
        out = torch.empty_like(x)
        _run("scale", x.contiguous(), 1.5, out)
        fault("apart", out)
        return out

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = 1.5

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class IntoLastingMemory(torch.autograd.Function):
    """Writes its result into the same memory each time, as kernels with communication buffers do."""

    buffers: ClassVar[dict] = {}

    @staticmethod
    def forward(ctx, x, weight):
        buffer = IntoLastingMemory.buffers.setdefault(tuple(x.shape), torch.empty_like(x).contiguous())
        out = buffer.view_as(buffer)
        _run("scale", x.contiguous(), 1.25, out)
        fault("buffered", out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.25, None


class NotReproducible(Passing):
    """Computes something else each time."""

    executions = 0

    @staticmethod
    def forward(ctx, x, weight):
        NotReproducible.executions += 1
        return x * (1.0 + 2.0**-20 * NotReproducible.executions)


class Late(Passing):
    """Begins to change a buffer that it has only read before."""

    @staticmethod
    def forward(ctx, x, state):
        if state.is_late:
            state.late.add_(1)
        return x + float(state.late[0] > 1e9)


class Flags:
    """State of a class, as fp8 has: the first call of a step has the scale updated after its backward pass."""

    is_first, updates, scale = True, 0, torch.ones(1)

    @classmethod
    def update(cls):
        cls.updates += 1
        cls.scale.mul_(1.25)


class First(torch.autograd.Function):
    """Takes a flag of a class in the forward pass, and changes what it has read at the end of the backward pass."""

    @staticmethod
    def forward(ctx, x, flags):
        ctx.scale, ctx.is_first = Flags.scale, Flags.is_first
        Flags.is_first = False
        return x * Flags.scale

    @staticmethod
    def backward(ctx, gradient):
        out = gradient * ctx.scale
        if ctx.is_first:
            Flags.update()
        return out, None


class Placeholder(Passing):
    """Keeps memory that it does not write, with other contents each time."""

    @staticmethod
    def forward(ctx, x, weight):
        NotReproducible.executions += 1
        torch.full((64,), float(NotReproducible.executions))  # its memory is taken by the next one
        ctx.save_for_backward(torch.empty(64))
        return x.clone()


@torch.library.custom_op("planted::rows", mutates_args=())
def rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An operator of another package: the second result is memory that it does not write."""
    NotReproducible.executions += 1
    torch.full((64,), float(NotReproducible.executions))  # its memory is taken by the next one
    return x.clone(), torch.empty(64)


rows.register_autograd(lambda ctx, gradient, _: gradient.clone())


class Unwritten(Passing):
    """Calls the operator, and keeps what it does not write for the backward pass."""

    @staticmethod
    def forward(ctx, x, weight):
        out, map_ = torch.ops.planted.rows(x)
        ctx.save_for_backward(map_)
        return out


class Loose:
    """Not a function: the operator is called by itself."""

    @staticmethod
    def apply(x, weight):
        return torch.ops.planted.rows(x)[0]


class OfLayer(torch.autograd.Function):
    """Gets the layer, as those of Transformer Engine up to 2.14; all of a run can be reached from its configuration."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        out = torch.empty_like(x)
        _run("scale", x.contiguous(), 1.5, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.5, None


_KINDS = (
    *(Unwritten, Loose, OfLayer),
    *(First, Placeholder, Scaled, Accumulating, WithHistory, Random, Gathering, WithSetup, IntoLastingMemory),
    *(NotReproducible, Late),
)
FUNCTIONS = {kind.__name__: kind for kind in _KINDS}
PLACES = {
    "Scaled": ("result", "saved", "gradient"),
    "Accumulating": ("buffer",),
    "WithHistory": ("history",),
    "Random": ("drawn",),
    "Gathering": ("part", "gathered"),
    "WithSetup": ("apart",),
    "IntoLastingMemory": ("buffered",),
}
"""Function -> what it computes, by the names that ``Fault`` knows."""


def plant(chunks: list, name: str) -> None:
    """Pass the output of the MLP of every layer through a function."""
    forget()
    for chunk in chunks:
        for module in chunk.modules():
            if type(module).__name__ == "TransformerLayer":
                layer = module.mlp.linear_fc1
                module.mlp.register_forward_hook(_hook(FUNCTIONS[name], layer if name == "OfLayer" else layer.weight))


def _hook(kind, given):
    def after(module, inputs, outputs):
        out, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
        made = kind.apply(out, STATE if kind in (WithHistory, Late) else given)
        return (made, *rest) if rest else made

    return after
