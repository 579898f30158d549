"""A model of CUDA's streams, events and pinned memory, on which code for GPUs runs on a machine without one.

``with Cuda(seed) as cuda`` replaces `torch.cuda` by the model. `cuda.tensor(values)` makes a tensor on the model's GPU:
every operation on it is queued on the current stream of the calling thread, and is executed later, in an order of the
streams that the seed draws. Independently of that order, vector clocks decide for every two accesses to the same bytes,
one of which writes, whether waits order them; two that are not ordered are a :class:`Race`, also if the drawn order was
harmless. The host is one agent with one clock: locks and queues between its threads are trusted.

What is imitated, in PyTorch's sources (2.13):

- Streams do not wait for the default stream, nor the default stream for them: they are made with
  `cudaStreamNonBlocking` (c10/cuda/CUDAStream.cpp, kDefaultFlags). The current stream belongs to the thread (same file,
  `static thread_local ... current_streams`), and so does the current device: that of a new thread is GPU 0.
- `Tensor.copy_` between host and device (aten/src/ATen/native/cuda/Copy.cu, copy_kernel_cuda) calls cudaMemcpyAsync on
  the current stream, and waits for the stream unless `non_blocking`. If the host memory is not pinned, cudaMemcpyAsync
  returns only when a copy to the host is complete, and when memory of the host has been read ("API synchronization
  behavior" of the CUDA runtime).
- `torch._foreach_copy_` between host and device is a loop over `copy_` (ForeachBinaryOpList.cu,
  foreach_tensor_copy_list_kernel_cuda_, the slow path).
- `torch.nonzero` waits for the stream, because the size of its result depends on the values (ATen/native/cuda/
  Nonzero.cu, nonzero_cuda_out_impl).
- A wait for an event that was never recorded waits for nothing (ATen/cuda/CUDAEvent.h, block, query, synchronize:
  `if (is_created_)`).
- Operations take no time, except `computes`; then `Event.elapsed_time` is the time between the events' places in
  their streams, in which a stream that waits for an event continues no earlier than that event has passed.
- NCCL runs on a stream of its own, which waits for the current stream of the caller. `Work.wait` makes only the
  stream wait that is current in the thread that calls it, and returns at once
  (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, WorkNCCL::synchronizeStream).

Not modelled: CUDA's memory allocator, so tensors that are freed while a stream uses them are not found.
"""

import contextlib
import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

Clock = dict[object, int]
HOST = "host"
_MOST_IDLE = 1000
_PAGE = 512
"""Bytes of memory whose accesses are kept together."""


class Race(AssertionError):
    """Two accesses to the same bytes that nothing orders."""


class Stuck(AssertionError):
    """The host waits for device work that can never run."""


@dataclass
class _Access:
    agent: object
    time: int
    writes: bool
    first: int
    end: int
    what: str


@dataclass
class _Mark:
    """A recorded event's place in a stream. ``at_ms``: the model's time at which the stream has come to it."""

    clock: Clock
    done: bool = False
    at_ms: float = 0.0


@dataclass
class _Operation:
    run: Callable[[], None]
    needs: _Mark | None = None


class Stream:
    """`torch.cuda.Stream` of the active model."""

    def __init__(self, device=None, priority=0, **kwargs):
        self.cuda = Cuda.active
        self.cuda.touch("Stream")
        self.device = self.cuda.device
        self.queue: deque[_Operation] = deque()
        self.clock: Clock = {}
        self.is_frozen = False
        self.now_ms = 0.0
        self.cuda.streams.append(self)
        self.cuda_stream = len(self.cuda.streams)  # torch gives the address of the driver's stream

    def wait_event(self, event: "Event") -> None:
        if self.cuda.waits("wait_event") and event.mark is not None:
            mark = event.mark
            _join(self.clock, mark.clock)
            self.cuda.put(self, _Operation(lambda: None, mark))

    def wait_stream(self, stream: "Stream") -> None:
        if self.cuda.waits("wait_stream"):
            event = Event()
            event.record(stream)
            mark = event.mark
            _join(self.clock, mark.clock)
            self.cuda.put(self, _Operation(lambda: None, mark))

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        if self.cuda.waits("Stream.synchronize"):
            self.record_event().wait_on_host()

    def __enter__(self):
        self._inside = Context(self)
        return self._inside.__enter__()

    def __exit__(self, *exc_info):
        return self._inside.__exit__(*exc_info)


class Event:
    """`torch.cuda.Event` of the active model."""

    def __init__(self, *args, **kwargs):
        self.cuda, self.mark = Cuda.active, None
        self.cuda.touch("Event")

    def record(self, stream: Stream | None = None) -> None:
        cuda = self.cuda
        cuda.touch("Event.record")
        stream = stream or cuda.current_stream()
        with cuda.lock:
            _join(stream.clock, cuda.host)
            self.mark = mark = _Mark(dict(stream.clock))
            cuda.put(stream, _Operation(lambda: _pass(mark, stream)))

    def elapsed_time(self, later: "Event") -> float:
        """Return the milliseconds between two events. On a GPU it fails before both have passed."""
        self.cuda.touch("Event.elapsed_time")
        assert self.mark.done and later.mark.done, "the events have not passed"
        return later.mark.at_ms - self.mark.at_ms

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.cuda.current_stream()).wait_event(self)

    def query(self) -> bool:
        self.cuda.touch("Event.query")
        if self.mark is None or not self.cuda.waits("Event.query"):
            return True
        self.cuda.breathe()
        if self.mark.done:
            _join(self.cuda.host, self.mark.clock)
        return self.mark.done

    def synchronize(self) -> None:
        if self.cuda.waits("Event.synchronize"):
            self.wait_on_host()

    def wait_on_host(self) -> None:
        self.cuda.touch("Event.synchronize")
        if self.mark is not None:
            self.cuda.run_until(self.mark)
            _join(self.cuda.host, self.mark.clock)


class Context:
    """`torch.cuda.stream` of the active model."""

    def __init__(self, stream: Stream | None):
        self._stream, self._outer = stream, []

    def __enter__(self):
        cuda = Cuda.active
        cuda.touch("stream")
        self._outer.append(cuda.current_stream())
        cuda.here.stream = self._stream or self._outer[-1]
        return self._stream

    def __exit__(self, *exc_info):
        Cuda.active.here.stream = self._outer.pop()


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Return a context in which a module cannot be imported: Triton compiles its kernels for real devices only."""
    before = sys.modules.get(module)
    sys.modules[module] = None
    try:
        yield
    finally:
        del sys.modules[module]
        if before is not None:
            sys.modules[module] = before


class NcclWork:
    """A collective of NCCL on the stream ``inside``: ``run`` is queued there after the caller's current stream."""

    def __init__(self, cuda: "Cuda", inside: Stream, run: Callable[[], None]):
        inside.wait_stream(cuda.current_stream())
        with Context(inside):
            run()
        self._end, self._cuda = inside.record_event(), cuda

    def wait(self, timeout=None) -> bool:
        self._cuda.current_stream().wait_event(self._end)
        return True


class DeviceTensor(torch.Tensor):
    """A tensor on the model's GPU. Its values are in `inner`, which the host cannot see before it waits."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, cuda: "Cuda"):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner, made.cuda_model = inner, cuda
        return made

    # Properties and methods of the class, and not of `__torch_function__`, hold within modes of the dispatcher as well.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        return self.cuda_model.device

    @property
    def is_cuda(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def numpy(self, **kwargs):
        raise TypeError("can't convert cuda device type tensor to numpy")

    def cpu(self) -> torch.Tensor:
        return self.cuda_model.to_host(self)

    def tolist(self) -> list:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Cuda.active.call(func, args, kwargs or {})

    def __repr__(self):
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


@dataclass
class _Thread:
    """What CUDA and torch know of a thread."""

    device: torch.device | None = None
    stream: Stream | None = None


class Cuda:
    """The model. See the module's docstring.

    Args:
        seed: draws the order in which the streams run, as far as waits leave it open.
        is_eager: run everything at once; for real threads.
        without: name of a function whose waits wait for nothing, which is how a mistake is planted.

    Attributes:
        device: the GPU, which is not number 0.
        default: its default stream.
        blocked: why the host had to wait in calls that should return at once -> how often.
        foreign: "thread: function" of calls in threads that have not selected their device.
        sites: names of the functions that wait, for events and streams.
    """

    active: "Cuda" = None

    def __init__(self, seed: int, *, is_eager: bool = False, without: str | None = None):
        self.random, self.device, self._without = random.Random(seed), torch.device("cuda", 1), without
        self.is_eager = is_eager
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.host: Clock = {HOST: 0}
        self.blocked: Counter[str] = Counter()
        self.foreign: list[str] = []
        self.sites: set[str] = set()
        self._log: dict[int, list[_Access]] = {}  # number of a page -> the last accesses to its bytes
        self._idle = 0
        self._pinned: list[tuple[int, int]] = []
        self._kept: list = []
        self._of_thread = threading.local()
        self._patches = contextlib.ExitStack()

    # --- installing it -----------------------------------------------------------------------------------------------

    def __enter__(self) -> "Cuda":
        Cuda.active = self
        self.here.device = self.device
        self.default = Stream()
        zeros, empty, to = torch.zeros, torch.empty, torch.Tensor.to
        cudart = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)
        fakes = {
            "Stream": Stream,
            "Event": Event,
            "StreamContext": Context,
            "stream": Context,
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: self.default,
            "synchronize": self.synchronize,
            "current_device": lambda: (self.touch("current_device"), self.device.index)[1],
            "set_device": self._set_device,
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "cudart": lambda: cudart,
            "check_error": _check,
        }
        for name, fake in fakes.items():
            self._patches.enter_context(mock.patch.object(torch.cuda, name, fake))
        for owner, name, fake in (
            (torch, "zeros", self._maker(zeros)),
            (torch, "empty", self._maker(empty)),
            (torch, "Event", Event),
            (torch, "Stream", Stream),
            (torch.accelerator, "current_stream", self.current_stream),
            (torch.Tensor, "to", lambda t, *args, **kwargs: self._to(to, t, *args, **kwargs)),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, fake))
        self._patches.enter_context(_without("ft.systems.hsdp.ring.fused"))
        return self

    def __exit__(self, *exc_info) -> None:
        self._patches.close()
        Cuda.active = None
        # The tensors name their model, and Python's collector does not see through torch's references to them.
        self._kept.clear()
        self._log.clear()

    @property
    def here(self) -> _Thread:
        if not hasattr(self._of_thread, "value"):
            self._of_thread.value = _Thread()
        return self._of_thread.value

    @contextlib.contextmanager
    def thread(self) -> Iterator[None]:
        """Return a context in which the calling thread plays another one, that has just begun."""
        outer, self._of_thread.value = self.here, _Thread()
        try:
            yield
        finally:
            self._of_thread.value = outer

    def tensor(self, values: torch.Tensor) -> DeviceTensor:
        """Return a tensor on the GPU with these values, there before everything else."""
        return self._wrap(values.clone())

    def values(self, tensor: DeviceTensor) -> torch.Tensor:
        """Return a copy of the values that a tensor has now, without an access."""
        return tensor.inner.clone()

    # --- queues ------------------------------------------------------------------------------------------------------

    def current_stream(self, device=None) -> Stream:
        self.touch("current_stream")
        return self.here.stream or self.default

    def synchronize(self, device=None) -> None:
        for stream in list(self.streams):
            stream.record_event().wait_on_host()

    def put(self, stream: Stream, operation: _Operation) -> None:
        with self.lock:
            stream.queue.append(operation)
            if self.is_eager:
                while self._step():
                    pass
        self.breathe()

    def breathe(self) -> None:
        """Let the streams run for a while, or not.

        Raises:
            Stuck: nothing can run, for many calls now.
        """
        for _ in range(self.random.choice((0, 0, 0, 1, 2, 5))):
            self._idle = 0 if self._step() or not any(each.queue for each in self.streams) else self._idle + 1
        if self._idle > _MOST_IDLE:
            self._idle = 0
            raise Stuck("the host waits for work that cannot run")

    def run_until(self, mark: _Mark) -> None:
        while not mark.done:
            if not self._step():
                raise Stuck("the host waits for an event behind work that cannot run")

    def _step(self) -> bool:
        with self.lock:
            able = [
                each
                for each in self.streams
                if each.queue and not each.is_frozen and (each.queue[0].needs is None or each.queue[0].needs.done)
            ]
            if not able:
                return False
            with _disable_current_modes():  # what runs on the device is no operator of the thread that lets it run
                stream = self.random.choice(able)
                operation = stream.queue.popleft()
                if operation.needs is not None:
                    stream.now_ms = max(stream.now_ms, operation.needs.at_ms)
                operation.run()
            return True

    def computes(self, milliseconds: float) -> None:
        """Keep the current stream busy for this time of the model."""
        stream = self.current_stream()
        self.put(stream, _Operation(lambda: setattr(stream, "now_ms", stream.now_ms + milliseconds)))

    def touch(self, what: str) -> None:
        """Note a call of CUDA."""
        if self.here.device is None:
            self.foreign.append(f"{threading.current_thread().name}: {what}")

    def waits(self, what: str) -> bool:
        """Note a wait; return whether it shall be done."""
        self.touch(what)
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__:
            frame = frame.f_back
        self.sites.add(frame.f_code.co_qualname)
        return frame.f_code.co_qualname != self._without

    # --- accesses ----------------------------------------------------------------------------------------------------

    def reads_on_host(self, memory, what: str = "the host") -> None:
        """Note that the host reads ``memory`` (memoryview or tensor)."""
        self._on_host(memory, False, what)

    def writes_on_host(self, memory, what: str = "the host") -> None:
        """Note that the host writes to ``memory`` (memoryview or tensor)."""
        self._on_host(memory, True, what)

    def _on_host(self, memory, writes: bool, what: str) -> None:
        first, end = _span(memory)
        with self.lock:
            self.host[HOST] += 1
            self._note(_Access(HOST, self.host[HOST], writes, first, end, what), self.host)

    def queue(self, what: str, reads: list, writes: list, run: Callable[[], None]) -> None:
        """Queue ``run`` on the current stream, with its accesses (tensors of host or device)."""
        stream = self.current_stream()
        with self.lock:
            _join(stream.clock, self.host)
            stream.clock[stream] = stream.clock.get(stream, 0) + 1
            for tensors, does_write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    first, end = _span(tensor)
                    name = f"{what} on stream {self.streams.index(stream)}"
                    self._note(_Access(stream, stream.clock[stream], does_write, first, end, name), stream.clock)
            self._kept.append((reads, writes))
            self.put(stream, _Operation(run))

    def _note(self, access: _Access, clock: Clock) -> None:
        for page in range(access.first // _PAGE, -(-access.end // _PAGE)):
            kept = []
            for other in self._log.get(page, ()):
                overlaps = other.first < access.end and access.first < other.end
                if overlaps and (other.writes or access.writes) and clock.get(other.agent, 0) < other.time:
                    raise Race(f"{access.what} ({_verb(access)}) is not ordered after {other.what} ({_verb(other)})")
                # What is not ordered after the other access is not ordered after this one either, and a race anyway.
                is_implied = access.writes or (other.agent is access.agent and not other.writes)
                if not (is_implied and access.first <= other.first and other.end <= access.end):
                    kept.append(other)
            self._log[page] = [*kept, access]

    # --- tensors -----------------------------------------------------------------------------------------------------

    def call(self, func, args: tuple, kwargs: dict):
        """Run an operator of which an argument is on the GPU."""
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_":
            return self._copy(*args, **kwargs)
        if name == "_foreach_copy_":
            for target, source in zip(*args[:2], strict=True):
                self._copy(target, source, *args[2:], **kwargs)
            return None
        if name in ("_local_scalar_dense", "_to_copy") and (name[0:3] == "_lo" or _is_host(kwargs.get("device"))):
            host = self.to_host(args[0])
            return host.item() if name == "_local_scalar_dense" else host.to(kwargs.get("dtype") or host.dtype)
        if name == "nonzero":  # its result's size is known on the host when it returns
            return self._wrap(func(self.to_host(args[0])))
        if _is_host(kwargs.get("device")):  # made on the host, like a tensor of the GPU
            return func(*tree_map(_meta, args), **{**kwargs, "device": "cpu"})
        plain, plain_kwargs = tree_map(_inner, (args, kwargs))
        if func.is_view or name in ("detach", "alias", "_unsafe_view"):
            return tree_map(self._wrap_new, func(*plain, **plain_kwargs))
        plain_kwargs.pop("device", None)
        plain_kwargs.pop("pin_memory", None)
        return self._queue_operator(func, args, kwargs, plain, plain_kwargs)

    def _queue_operator(self, func, args, kwargs, plain, plain_kwargs):
        given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        writes, reads = [], []
        for argument in func._schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            tensors = [t for t in tree_flatten(given.get(argument.name))[0] if isinstance(t, torch.Tensor)]
            (writes if is_written else reads).extend(tensors)
            if is_written and not func._schema.name.endswith(("zero_", "fill_")):
                reads.extend(tensors)
        if writes:
            self.queue(func._schema.name, reads, writes, lambda: func(*plain, **plain_kwargs))
            return writes[0] if len(writes) == 1 else None
        shapes = func(*tree_map(_meta, plain), **plain_kwargs)
        made = tree_map(lambda each: torch.empty_like(each, device="cpu"), shapes)
        wrapped = tree_map(self._wrap_new, made)

        def run() -> None:
            found = func(*plain, **plain_kwargs)
            for target, source in zip(tree_flatten(made)[0], tree_flatten(found)[0], strict=True):
                target.copy_(source)

        is_empty = "empty" in func._schema.name
        self.queue(func._schema.name, [] if is_empty else reads, [] if is_empty else tree_flatten(wrapped)[0], run)
        return wrapped

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        into, out_of = _inner(target), _inner(source)
        host = next((each for each in (target, source) if not isinstance(each, DeviceTensor)), None)
        if host is not None and host is source and not self.is_pinned(host):
            self.current_stream().record_event().wait_on_host()
            self.blocked["copy from memory that is not pinned"] += 1
            self.reads_on_host(source)
            out_of = source.clone()
            self._kept.append(out_of)
            self.queue("copy_", [], [target], lambda: into.copy_(out_of))
        else:
            self.queue("copy_", [source], [target], lambda: into.copy_(out_of))
        if host is not None and not (non_blocking and self.is_pinned(host)):
            if non_blocking and host is target:
                self.blocked["copy to memory that is not pinned"] += 1
            self.current_stream().record_event().wait_on_host()
        return target

    def to_host(self, tensor: DeviceTensor) -> torch.Tensor:
        """Return a copy in host memory, as ``Tensor.cpu`` does."""
        made = torch.empty_like(tensor.inner)
        self._kept.append(made)
        return self._copy(made, tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        first, end = _span(tensor)
        return any(low <= first and end <= high for low, high in self._pinned)

    def _wrap(self, inner: torch.Tensor) -> DeviceTensor:
        self._kept.append(inner)
        return DeviceTensor(inner, self)

    def _wrap_new(self, value):
        return self._wrap(value) if isinstance(value, torch.Tensor) else value

    def _maker(self, make):
        def made(*args, **kwargs):
            is_here = torch.device(kwargs["device"]).type == "cuda" if kwargs.get("device") is not None else False
            is_pinned = kwargs.pop("pin_memory", False)
            tensor = make(*args, **(kwargs | {"device": "cpu"} if is_here else kwargs))
            if is_pinned:
                self.touch("pin_memory")
                self._pinned.append(_span(tensor))
                self._kept.append(tensor)
            return self._wrap(tensor) if is_here else tensor

        return made

    def _to(self, to, tensor: torch.Tensor, *args, **kwargs):
        device = kwargs.get("device") or next((each for each in args if isinstance(each, torch.device | str)), None)
        if isinstance(tensor, DeviceTensor) or device is None or torch.device(device).type != "cuda":
            if isinstance(tensor, DeviceTensor) and device is not None and torch.device(device).type == "cuda":
                args = tuple(each for each in args if not isinstance(each, torch.device | str))
                kwargs.pop("device", None)
                kwargs.pop("non_blocking", None)
                return to(tensor, *args, **kwargs) if args or kwargs else tensor
            return to(tensor, *args, **kwargs)
        dtype = kwargs.get("dtype") or next((each for each in args if isinstance(each, torch.dtype)), tensor.dtype)
        made = self._wrap(torch.empty(tensor.shape, dtype=dtype))
        return self._copy(made, tensor, kwargs.get("non_blocking", False))

    # --- the rest of torch.cuda --------------------------------------------------------------------------------------

    def _set_device(self, device) -> None:
        self.here.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)

    def _register(self, address: int, nbytes: int, flags: int) -> int:
        self.touch("cudaHostRegister")
        self._pinned.append((address, address + nbytes))
        return 0

    def _unregister(self, address: int) -> int:
        self.touch("cudaHostUnregister")
        self._pinned = [each for each in self._pinned if each[0] != address]
        return 0


def _pass(mark: _Mark, stream: Stream) -> None:
    mark.done, mark.at_ms = True, stream.now_ms


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"CUDA error {result}")


def _join(clock: Clock, other: Clock) -> None:
    for agent, time in other.items():
        if clock.get(agent, 0) < time:
            clock[agent] = time


def _span(memory) -> tuple[int, int]:
    """Return (address, end) of the bytes from the first to the last element."""
    if isinstance(memory, torch.Tensor):
        memory = _inner(memory)
        if not memory.numel():
            return 0, 0
        last = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
        return memory.data_ptr(), memory.data_ptr() + (last + 1) * memory.element_size()
    array = numpy.frombuffer(memory, dtype=numpy.uint8)
    return array.ctypes.data, array.ctypes.data + array.nbytes


def _inner(value):
    return value.inner if isinstance(value, DeviceTensor) else value


def _meta(value):
    return _inner(value).to("meta") if isinstance(value, torch.Tensor) else value


def _is_host(device) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _verb(access: _Access) -> str:
    return "write" if access.writes else "read"
