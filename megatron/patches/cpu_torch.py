"""Replacements for `torch.cuda` on machines without a GPU, so that megatron-core (core) trains on the CPU.

Tensors live in host memory, all streams run in program order, and the CUDA random generator is the CPU's.
"""

import functools
import sys
import time
from contextlib import contextmanager

import torch
from torch.utils._device import _device_constructors

from megatron.patches.manifest import TENSOR_MAKERS
from megatron.patches.replace import replace

CPU = torch.device("cpu")
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


def shadow_tensors() -> None:
    """Let constructors and methods of tensors take a CUDA device for the CPU."""
    # torch caches, by identity, which functions honour `with torch.device(...)`: it has to see the original functions.
    _device_constructors()
    for name in TENSOR_MAKERS:
        replace("torch", name, _on_cpu(getattr(torch, name)))

    move, pick_type = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(move)
    def to(self, *args, **kwargs):
        if args and _names_cuda(args[0]):
            args = (CPU, *args[1:])
        elif kwargs and _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return move(self, *args, **kwargs)

    @functools.wraps(torch.Tensor.cuda)
    def cuda(self, device=None, non_blocking=False, memory_format=torch.preserve_format):
        return self

    @functools.wraps(torch.Tensor.pin_memory)
    def pin_memory(self, device=None):
        return self

    @functools.wraps(torch.Tensor.record_stream)
    def record_stream(self, stream):
        return None

    @functools.wraps(pick_type)
    def type_(self, dtype=None, non_blocking=False, **kwargs):
        if dtype is None:
            # Core's optimizers group parameters by these names; all other callers get the true name.
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("megatron.core.optimizer") and self.dtype in _CORE_TYPE_NAMES:
                return _CORE_TYPE_NAMES[self.dtype]
            return pick_type(self)
        return pick_type(self, dtype, non_blocking, **kwargs)

    for name, shadow in (
        ("to", to),
        ("cuda", cuda),
        ("pin_memory", pin_memory),
        ("record_stream", record_stream),
        ("type", type_),
    ):
        replace("torch", f"Tensor.{name}", shadow)


# ------------------------------------------------------------------------------------- streams and events


class Event:
    """Replacement for `torch.cuda.Event`: a point in program order, before which all work is complete."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self._recorded_at: float | None = None

    def record(self, stream=None) -> None:
        self._recorded_at = time.perf_counter()

    def wait(self, stream=None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event to `end`.

        Raises:
            RuntimeError: one of the two events was not recorded.
        """
        if self._recorded_at is None or end._recorded_at is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        return (end._recorded_at - self._recorded_at) * 1e3


class Stream:
    """Replacement for `torch.cuda.Stream` that is always empty: work on the CPU is done when the call returns."""

    device = CPU
    cuda_stream = 0

    def __init__(self, device=None, priority=0, **kwargs):
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, stream) -> None:
        pass

    def wait_event(self, event) -> None:
        pass

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


def shadow_streams() -> None:
    """Replace streams, events, the current device and memory statistics of `torch.cuda`."""
    default = Stream()
    current = [default]

    class StreamContext:
        """Context that makes `stream` (None: no change) the current one. It can be entered any number of times."""

        def __init__(self, stream):
            self.stream, self._outer = stream, []

        def __enter__(self):
            self._outer.append(current[0])
            set_stream(self.stream)
            return self

        def __exit__(self, *exc_info):
            current[0] = self._outer.pop()

    def set_stream(stream):
        if stream is not None:
            current[0] = stream

    @contextmanager
    def nvtx_range(msg, *args, **kwargs):
        yield

    for name, shadow in {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "set_stream": set_stream,
        "current_stream": lambda device=None: current[0],
        "default_stream": lambda device=None: default,
        "synchronize": _nothing(),
        "current_device": lambda: CPU,
        "set_device": _nothing(),
        "empty_cache": _nothing(),
        "reset_peak_memory_stats": _nothing(),
        "is_current_stream_capturing": lambda: False,
    }.items():
        replace("torch.cuda", name, shadow)
    for name in ("range_push", "range_pop", "mark"):
        replace("torch.cuda.nvtx", name, _nothing())
    replace("torch.cuda.nvtx", "range", nvtx_range)


# ----------------------------------------------------------------------------------------- communication


def shadow_sends() -> None:
    """Let an asynchronous send keep its data when megatron-core frees the tensor before the send is complete."""
    send = torch.distributed.isend

    @functools.wraps(send)
    def isend(tensor, *args, **kwargs):
        # Send an alias with its own reference to the storage: core frees a sent activation by pointing the tensor at
        # another storage (`deallocate_output_tensor`). On a GPU the stream orders this after the send, but not here.
        return send(tensor.detach(), *args, **kwargs)

    for module in ("torch.distributed", "torch.distributed.distributed_c10d"):
        replace(module, "isend", isend)


# ---------------------------------------------------------------------------------------- random numbers


def shadow_generator() -> None:
    """Replace the CUDA random generators by torch's generator of the CPU."""
    generator = torch.default_generator

    def get_rng_state(device="cuda"):
        return generator.get_state()

    def set_rng_state(new_state, device="cuda"):
        generator.set_state(new_state)

    def manual_seed(seed):
        generator.manual_seed(int(seed))

    for module in ("torch.cuda", "torch.cuda.random"):
        replace(module, "get_rng_state", get_rng_state)
        replace(module, "set_rng_state", set_rng_state)
        replace(module, "manual_seed", manual_seed)
        replace(module, "manual_seed_all", manual_seed)
    replace("torch.cuda", "get_rng_state_all", lambda: [get_rng_state()])
    replace("torch.cuda", "set_rng_state_all", lambda new_states: set_rng_state(new_states[0]))
