"""Replacements for `torch.cuda` on machines without a GPU, so that megatron-core (core) trains on the CPU.

Tensors live in host memory, all streams run in program order, and the CUDA random generator is the CPU's.
"""

import functools
import sys
import time
from contextlib import contextmanager

import torch
from torch.utils._device import _device_constructors

from megatron.patches.manifest import Patch

CPU = torch.device("cpu")
TENSOR_MAKERS = (
    *("tensor", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "zeros", "zeros_like"),
    *("ones", "ones_like", "full", "full_like", "arange", "linspace", "logspace", "eye", "normal"),
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
    *("tril_indices", "triu_indices"),
)
_CORE_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


# ---------------------------------------------------------------------------------------------- tensors


def _names_cuda(device: object) -> bool:
    """Return whether `device` (string, torch.device or CUDA ordinal) is a CUDA device."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(make):
    """Wrap the tensor constructor `make`, so that a CUDA `device=` means the CPU and `pin_memory=` has no effect."""

    @functools.wraps(make)
    def made_on_cpu(*args, **kwargs):
        if kwargs:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return made_on_cpu


_move, _pick_type = torch.Tensor.to, torch.Tensor.type


@functools.wraps(_move)
def to(self, *args, **kwargs):
    if args and _names_cuda(args[0]):
        args = (CPU, *args[1:])
    elif kwargs and _names_cuda(kwargs.get("device")):
        kwargs["device"] = CPU
    return _move(self, *args, **kwargs)


@functools.wraps(torch.Tensor.cuda)
def cuda(self, device=None, non_blocking=False, memory_format=torch.preserve_format):
    return self


@functools.wraps(torch.Tensor.pin_memory)
def pin_memory(self, device=None):
    return self


@functools.wraps(torch.Tensor.record_stream)
def record_stream(self, stream):
    return None


@functools.wraps(_pick_type)
def type_(self, dtype=None, non_blocking=False, **kwargs):
    if dtype is None:
        # Core's optimizers group parameters by these names; all other callers get the true name.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("megatron.core.optimizer") and self.dtype in _CORE_TYPE_NAMES:
            return _CORE_TYPE_NAMES[self.dtype]
        return _pick_type(self)
    return _pick_type(self, dtype, non_blocking, **kwargs)


# ------------------------------------------------------------------------------------- streams and events


class Event(torch.cpu.Event):
    """Replacement for `torch.cuda.Event`: a point in program order, before which all work is complete."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self._recorded_at: float | None = None

    def record(self, stream=None) -> None:
        self._recorded_at = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event to `end`.

        Raises:
            RuntimeError: one of the two events was not recorded.
        """
        if self._recorded_at is None or end._recorded_at is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        return (end._recorded_at - self._recorded_at) * 1e3


class Stream(torch.cpu.Stream):
    """Replacement for `torch.cuda.Stream` that is always empty: work on the CPU is done when the call returns."""

    device = CPU
    cuda_stream = 0

    def __init__(self, device=None, priority=0, **kwargs):
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def _nothing():
    """Return a new function that does nothing. Every use needs its own, as torch's compiler compares identities."""

    def nothing(*args, **kwargs):
        return None

    return nothing


_default = Stream()
_current = [_default]


class StreamContext:
    """Context that makes `stream` (None: no change) the current one. It can be entered any number of times."""

    def __init__(self, stream):
        self.stream, self._outer = stream, []

    def __enter__(self):
        self._outer.append(_current[0])
        set_stream(self.stream)
        return self

    def __exit__(self, *exc_info):
        _current[0] = self._outer.pop()


def set_stream(stream):
    if stream is not None:
        _current[0] = stream


@contextmanager
def nvtx_range(msg, *args, **kwargs):
    yield


# ----------------------------------------------------------------------------------------- communication


_send = torch.distributed.isend


@functools.wraps(_send)
def isend(tensor, *args, **kwargs):
    # Send an alias with its own reference to the storage: core frees a sent activation by pointing the tensor at
    # another storage (`deallocate_output_tensor`). On a GPU the stream orders this after the send, but not here.
    return _send(tensor.detach(), *args, **kwargs)


# ---------------------------------------------------------------------------------------- random numbers


def get_rng_state(device="cuda"):
    return torch.default_generator.get_state()


def set_rng_state(new_state, device="cuda"):
    torch.default_generator.set_state(new_state)


def manual_seed(seed):
    torch.default_generator.manual_seed(int(seed))


_GENERATOR = {
    "get_rng_state": get_rng_state,
    "set_rng_state": set_rng_state,
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed,
}


def _patches(module: str, why: str, replacements: dict) -> tuple[Patch, ...]:
    return tuple(Patch(module, symbol, why, new=new) for symbol, new in replacements.items())


# torch caches, by identity, which functions honour `with torch.device(...)`: it has to see the original functions.
_device_constructors()
PATCHES = (
    *_patches(
        "torch",
        'core makes tensors with device="cuda" and pin_memory=True',
        {name: _on_cpu(getattr(torch, name)) for name in TENSOR_MAKERS},
    ),
    *_patches(
        "torch",
        "core moves tensors to the GPU; here they stay on the CPU",
        {"Tensor.to": to, "Tensor.cuda": cuda},
    ),
    *_patches(
        "torch",
        "these functions support copies to the GPU, and raise an error without one",
        {"Tensor.pin_memory": pin_memory, "Tensor.record_stream": record_stream},
    ),
    *_patches(
        "torch", 'core\'s optimizers sort parameters by names like "torch.cuda.FloatTensor"', {"Tensor.type": type_}
    ),
    *_patches(
        "torch.cuda",
        "core orders communication and computation by streams and events; here the program order does",
        {
            "Stream": Stream,
            "Event": Event,
            "StreamContext": StreamContext,
            "stream": StreamContext,
            "set_stream": set_stream,
            "current_stream": lambda device=None: _current[0],
            "default_stream": lambda device=None: _default,
        },
    ),
    *_patches(
        "torch.cuda",
        "without a GPU there is nothing to wait for, to free or to capture, and the originals raise",
        {
            "synchronize": _nothing(),
            "empty_cache": _nothing(),
            "reset_peak_memory_stats": _nothing(),
            "is_current_stream_capturing": lambda: False,
        },
    ),
    *_patches(
        "torch.cuda",
        "core asks for the current device; the answer is the CPU",
        {"current_device": lambda: CPU, "set_device": _nothing()},
    ),
    *_patches(
        "torch.cuda.nvtx",
        "profiler marks need a CUDA library",
        {"range_push": _nothing(), "range_pop": _nothing(), "mark": _nothing(), "range": nvtx_range},
    ),
    *(
        Patch(
            module,
            "isend",
            "core frees a sent activation at once while gloo still reads it, so gloo gets an alias of the tensor",
            new=isend,  # torch compares it by identity
        )
        for module in ("torch.distributed", "torch.distributed.distributed_c10d")
    ),
    *_patches(
        "torch.cuda",
        "core's random states belong to the CUDA generator; here this is the CPU's generator",
        {
            **_GENERATOR,
            "get_rng_state_all": lambda: [get_rng_state()],
            "set_rng_state_all": lambda new_states: set_rng_state(new_states[0]),
        },
    ),
    *_patches("torch.cuda.random", "core imports the same functions from another module", _GENERATOR),
)
