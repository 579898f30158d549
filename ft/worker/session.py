"""A worker's session in an ``ft run``: its logical rank, its process groups and its connection to the node agent.

To an order ``Inspect``, :func:`answer_inspection` says what the worker is doing, on the thread that receives orders, so
it also answers when the training thread is blocked.

A standby checks its node while it waits for a logical rank and keeps memory ready. What a recovery costs beyond a fixed
time is work on memory, and most of it is the first touch of each page: the kernel has to find and zero it, which takes
far longer than to write to a page that is there. So a standby touches as much memory as the worker of a logical rank
needs, of whichever rank; what it then builds and fetches goes into these pages.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import mmap
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from ft.base import token
from ft.base.errors import DeviceUnusable, ReplaceNodeError, UserError
from ft.base.step_clock import CLOCK
from ft.faults.flip import Flip
from ft.faults.hang.format import COMMUNICATION, KERNEL, place
from ft.faults.hang.inspection import Operation, Rank, ReplicaGroup, Thread
from ft.job.agent.link import Link
from ft.job.control.timeouts import VARIABLE, Timeouts
from ft.job.messages import (
    Close,
    Inherit,
    Inspect,
    Inspected,
    Observed,
    Open,
    Reserve,
    StepTimes,
    WorkerInherited,
)
from ft.net.codec import to_json
from ft.net.framed import checksum
from ft.net.streams import TcpNetwork, network_of
from ft.platform import numa, processes
from ft.platform.releases import versions
from ft.state.groups import Groups, Rendezvous
from ft.state.groups.history import shortened
from ft.state.snapshot import SnapshotServer
from ft.state.snapshot.buffers import Spare
from ft.state.snapshot.copier import device_of, tables_of
from ft.worker import protocol
from ft.worker.progress import Heartbeat, Progress
from ft.worker.protocol import Orders
from ft.worker.warm_device import WarmDevice, fault_of_products

_MOST_FRAMES = 40


@dataclass(frozen=True)
class AcrossReplicas:
    """What a rank does with ranks of other replicas.

    Attributes:
        operations: its operations with them that have not ended, and the last one of each channel.
        counts: number of operations with them that it has started, by channel.
        groups: name of a group of ranks of several replicas -> its members.
        threads: names of the threads that the training thread waits for.
    """

    operations: tuple[Operation, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, ReplicaGroup] = field(default_factory=dict)
    threads: frozenset[str] = frozenset()


def answer_inspection(session: "Session", order: Inspect) -> Inspected:
    """Return the answer to an inspection."""
    across = session.across_replicas() if session.across_replicas is not None else AcrossReplicas()
    groups = session.groups.inspect(across.threads) if session.groups is not None else None
    threads = running_threads()
    operations = groups.operations if groups is not None else ()
    trainer = next((thread for thread in threads if thread.trains), None)
    # A device carries operations out on its own. Only if its host waits, too, does the rank wait for them.
    is_blocked = (groups is not None and groups.blocked) or any(one.awaited for one in across.operations)
    if groups is not None and not is_blocked and place(trainer) not in (COMMUNICATION, KERNEL):
        operations = tuple(dataclasses.replace(one, awaited=False) for one in operations)
    said = Rank(
        rank=session.rank,
        worker=session.worker,
        node=session.node,
        ended=session.progress.doing == "idle" and session.progress.place == "done",
        step=session.progress.step,
        counts={**(groups.counts if groups is not None else {}), **across.counts},
        operations=(*operations, *across.operations),
        departure=groups.departure if groups is not None else None,
        threads=tuple(threads),
        step_s=session.progress.step_time(),
    )
    members = dict(groups.members) if groups is not None else {}
    return Inspected(session.worker, order.number, to_json(said), members, dict(across.groups))


def running_threads() -> list[Thread]:
    """Return all Python threads of this process with their calls, the main thread first, without the calling one."""
    states = {task: state for _, task, state in processes.tasks(os.getpid())}
    frames, found = sys._current_frames(), []
    for thread in sorted(threading.enumerate(), key=lambda one: one is not threading.main_thread()):
        if thread is threading.current_thread() or thread.ident not in frames:
            continue
        # No line of source is read: the storage may be what hangs.
        stack = itertools.islice(traceback.walk_stack(frames[thread.ident]), _MOST_FRAMES)
        calls = tuple(f"{shortened(f.f_code.co_filename)}:{line} {f.f_code.co_name}" for f, line in stack)
        kernel = states.get(thread.native_id or 0, "")
        found.append(Thread(thread.name, calls, thread is threading.main_thread(), kernel))
    return found


_PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "NVTE_", "GLOO_", "MKL_", "OMP_")
# Variables that name a node's own hardware or paths may differ between nodes.
_OWN = ("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "OMP_PLACES")
_OWN_ENDINGS = ("_IFNAME", "_HCA", "_HOME", "_PATH", "_FILE", "_DIR", "_DIRECTORY")


def surroundings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that affect the computation, the limits of the run, versions, and a digest of this
    project's sources.
    """
    found = {f"environment {name}": value for name, value in environment.items() if _counts(name)}
    found["limits"] = environment.get(VARIABLE, "{}")
    return found | versions()


def _counts(name: str) -> bool:
    return name.startswith(_PREFIXES) and name not in _OWN and not name.endswith(_OWN_ENDINGS)


def _bind_to_device() -> None:
    """Bind this process to the CPUs near its GPU, if it has one."""
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        about = cuda.get_device_properties(cuda.current_device())
        if hasattr(about, "pci_bus_id"):  # torch before 2.8 does not tell
            numa.bind(f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0")


_REACH_S = 20.0
"""Longest time without progress of a standby's message to itself, in seconds."""


def is_attachable(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``ft run`` started this process."""
    return "FT_AGENT" in environment


def attach(
    environment: Mapping[str, str] = os.environ,
    settings: Mapping[str, str] | None = None,
    select: Callable[[int], None] | None = None,
) -> "Session":
    """Join the run of the ``ft run`` that started this process. Block until this process has a logical rank.

    A standby blocks here until it replaces a worker that died. At the end of the run, the standby exits here.

    Args:
        settings: settings of the script, by name. They must be equal on all workers: if they differ at the start, the
            run ends; a worker that joins later with other settings gets no logical rank.
        select: function that makes the device with an index the current one. With it, a standby prepares a device that
            its node has to spare (``ft.worker.warm_device``); None: it uses no device before it has a logical rank.

    Raises:
        UserError: the process was not started by ``ft run``.
    """
    if not is_attachable(environment):
        raise UserError("this process was not started by ft run", "start with: ft run --nproc-per-node N SCRIPT ...")
    session = Session(environment, select)
    session.observe("settings", settings={**surroundings(environment), **(settings or {})})
    if environment.get("FT_STANDBY") and environment.get("FT_HEALTH") != "off":
        session.admission.start()
    protocol.run(protocol.take_seat(session))
    return session


class Session(protocol.Member):
    """One worker's session in the run, from its start to its end. It has the attributes of its place in the run, too.

    Attributes:
        token: the run's secret token.
        groups: the process groups, None before ``init_process_group``.
        faulty_device: function (number of the fault, bit flip) that injects a bit flip into this worker's computation;
            None without redundant execution (SpareTrain).
        progress: progress that heartbeats report.
        across_replicas: function that returns what this rank does with ranks of other replicas, for an inspection;
            None: there are no replicas.
        role: name of the part of the work that the worker does. Workers with the same role have the same work in every
            step, so that one of them that is slower than the others stands out. "": its steps are not compared.
        server: server that sends and receives snapshots.
        address: host:port of that server.
        orders: queue of the control plane's orders.
        link: connection to the node agent.
        admission: checks this process while it is a standby.
        memory: memory that this process keeps ready while it is a standby.
        device: device that this process makes ready while it is a standby, if its node has one to spare.
        touched_bytes: memory that this process had touched before it has built anything.
    """

    def __init__(self, environment: Mapping[str, str], select: Callable[[int], None] | None = None):
        super().__init__(environment["FT_WORKER"], environment["FT_NODE"], int(environment.get("WORLD_SIZE", "1")))
        self.token = token.find(Path(environment["FT_RUN_DIR"]), 0.0, environment)
        self.timeouts = Timeouts.of_worker(environment)
        self._is_restarted = int(environment.get("FT_RESTART", "0")) > 0
        self.groups: Groups | None = None
        self.faulty_device: Callable[[int, Flip], None] | None = None
        self.progress = Progress(
            waiting=lambda: self.groups.waiting() if self.groups is not None else None,
            unfinished=lambda: self.groups.oldest_unfinished() if self.groups is not None else None,
            times=CLOCK,
        )
        self.progress.begun, self.progress.interrupted = self._on_step, self._on_interruption
        self.across_replicas: Callable[[], AcrossReplicas] | None = None
        self.role = ""
        self.memory, self.touched_bytes = ReadyMemory(), private_memory()
        self.device = WarmDevice(select)
        CLOCK.start()
        network = network_of(environment)
        self.server = SnapshotServer(network, token=self.token)
        self.address = self.server.address
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._when_closed: list[Callable[[int, str], None]] = []
        self.orders = Orders(self._on_close, self._on_inspect, self._on_inherit)
        self.link = Link.connect(environment, processes.register_handler(threading.main_thread().ident or 0))
        self.link.listen(self.orders.deliver)
        self._heartbeat = Heartbeat(self.progress, self.link.send, self.timeouts.beat_s, self._step_times)
        # Over MPI, messages pass through one process of the node, and not through a socket of this one.
        is_tcp = isinstance(network, TcpNetwork)
        self.admission = Admission(
            lambda: self.server.reach_itself(_REACH_S) if is_tcp else None,
            self._on_unfit,
        )

    def send(self, report: Any) -> None:
        self.link.send(report)

    async def next_order(self, within_s: float | None) -> Any | None:
        while True:
            prepares = self.rank < 0 and (self.memory.is_wanted or self.device.is_wanted)
            order = self.orders.next(PAUSE_S if prepares else within_s)
            if isinstance(order, Reserve):
                if self.rank < 0:
                    self._tell(self.memory.want(order))
                    self.device.want(order.devices.get(self.worker))
            elif order is None and prepares:
                self._prepare()
            else:
                return order

    def _prepare(self) -> None:
        """Touch the next piece of memory or, once all is touched, prepare the next part of the device."""
        if self.memory.is_wanted:
            self.memory.touch()
            return
        try:
            self._tell(self.device.go_on())
        except DeviceUnusable as error:
            self._on_unfit(error)

    @staticmethod
    def _tell(said: str) -> None:
        if said:
            print(said, flush=True)

    async def wait_closed(self, within_s: float) -> bool:
        return self._left.wait(within_s)

    def log_error(self, error: Exception) -> None:
        traceback.print_exception(error)

    def enter(self, opened: Open) -> None:
        self.admission.stop()
        self.server.stock.own.spare = self.memory.take() or self.server.stock.own.spare
        is_new = self.rank < 0
        with self._lock:
            super().enter(opened)
            if not self.closed:
                self._left.clear()
        holders = opened.copies.get(self.rank, ()) if is_new else ()
        if addresses := {rank: self.seats[rank].address for rank in holders if rank not in opened.joiners}:
            self.server.fetch_ahead(self.rank, self.epoch, addresses)

    def take_device(self, select: Callable[[int], None]) -> None:
        """Select this worker's device with ``select(local rank)``.

        If the device cannot be used, the control plane is told so, which gives the logical rank to another worker on
        another device. Only at the first start of a run, a device that does not exist is an error of the user, which
        ends the run.

        Raises:
            UserError: the run has just been started, and there are fewer devices than workers.
            DeviceUnusable: the device cannot be used; the control plane knows it, and ends this process.
        """
        try:
            select(self.local_rank)
            _bind_to_device()
        except (UserError, RuntimeError) as error:
            if isinstance(error, UserError) and not self.joins and not self._is_restarted:
                raise
            failed = DeviceUnusable(f"device {self.local_rank}: {error}")
            protocol.run(protocol.report_failure(self, self.progress.step, failed))
            raise failed from error

    def init_process_group(self, device_backend: str) -> None:
        """Create torch.distributed's default process group such that it and all later groups can be rebuilt.

        ``device_backend`` is "gloo" or "nccl".
        """
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.world_size), LOCAL_RANK=str(self.local_rank))
        self.groups = Groups.start(
            rendezvous=self.rendezvous(),
            prefix=self.prefix(),
            rank=self.rank,
            world_size=self.world_size,
            device_backend=device_backend,
            alone=self.joins,
            on_failure=self.suspect,
            epoch=self.epoch,
            limits=self.timeouts,
        )

    def rendezvous(self) -> Rendezvous:
        """Return the store in which the groups of this epoch rendezvous."""
        return Rendezvous(self.rendezvous_address, self.token)

    def prefix(self) -> str:
        """Return the prefix of the store keys of this epoch's groups.

        The prefix is different for every epoch, because old keys hold addresses of dead workers.
        """
        return f"groups/{self.epoch}"

    def grown(self, sections: Mapping[str, Mapping[str, torch.Tensor]]) -> tuple[int, int]:
        """Return the memory that building model and optimizer has taken: see ``footprint``.

        Args:
            sections: the sections of a snapshot: name -> name -> live tensor.
        """
        snapshot = sum(table.nbytes for table in tables_of(sections).values())
        on_host = device_of(sections) is None
        return max(0, private_memory() - self.touched_bytes) if on_host else 0, snapshot

    def when_closed(self, interrupt: Callable[[int, str], None]) -> None:
        """Register a callback ``interrupt(epoch, reason)``, called in another thread as soon as an epoch is closed."""
        self._when_closed.append(interrupt)

    def observe(self, event: str, **detail: Any) -> None:
        """Write an event into the run's event log."""
        stamp = {"wall": time.time(), "monotonic": time.monotonic(), "node": self.node, "worker": self.worker}
        place = {"rank": self.rank, "epoch": self.epoch, "step": self.progress.step}
        self.link.send(Observed(event, {**stamp, **place, **detail}))

    def close(self) -> None:
        """End the session: stop heartbeats, and close the snapshot server and the connection to the agent."""
        self.admission.stop()
        self._heartbeat.close()
        CLOCK.stop()
        self.server.close()
        self.link.close()

    def _step_times(self) -> Iterator[StepTimes]:
        """Return the reports on steps that were not sent yet."""
        groups = self.groups
        while self.role:
            try:
                block = CLOCK.blocks.popleft()
            except IndexError:
                return
            waits: dict[str, float] = {}
            for name, seconds in block.waits.items():
                label = name if groups is None else groups.label(name)
                waits[label] = round(waits.get(label, 0.0) + seconds, 6)
            yield StepTimes(
                worker=self.worker,
                epoch=block.epoch,
                rank=self.rank,
                role=self.role,
                steps=block.steps,
                step_s=[round(seconds, 6) for seconds in block.step_s],
                own_s=[round(seconds, 6) for seconds in block.own_s],
                parts={name: round(seconds, 6) for name, seconds in block.parts.items()},
                waits=waits,
            )

    def _on_close(self, order: Close) -> None:
        with self._lock:
            if not self.note_close(order):
                return
        # Before the groups are closed: that ends operations on the device with wrong results, which nobody may send on.
        for interrupt in self._when_closed:
            interrupt(order.epoch, order.reason)
        if self.groups is not None:
            self.groups.close(order.epoch, order.reason)
        self._left.set()

    def _on_unfit(self, error: Exception) -> None:
        """Report that this standby, or its device, has failed its check; the control plane ends it."""
        with contextlib.suppress(OSError):  # the thread that receives orders detects the agent's death
            self.send(protocol.failure(self, self.progress.step, error))

    def _on_step(self, is_usual: bool) -> None:
        if self.groups is not None:
            self.groups.history.begins(is_usual)

    def _on_interruption(self) -> None:
        if self.groups is not None:
            self.groups.history.is_unusual()

    def _on_inspect(self, order: Inspect) -> None:
        if self.rank < 0:
            return
        try:
            answer = answer_inspection(self, order)
        except Exception as error:  # this thread has to receive further orders, whatever an inspection finds
            self.log_error(error)
            return
        self.send(answer)

    def _on_inherit(self, order: Inherit) -> None:
        opened = []
        for path in order.files:
            with contextlib.suppress(OSError):  # without them, peer copies or a checkpoint are used
                opened.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        self.server.stock.inherit(opened, order.rank, order.is_successor)
        holdings = self.server.stock.holdings()
        print(f"with the snapshots that the worker of logical rank {order.rank} has left: {holdings}", flush=True)
        if not order.is_successor:
            self.send(WorkerInherited(self.worker, holdings))

    def suspect(self, group: str, error: BaseException) -> None:
        """Report that a collective failed in an open epoch, and wait for the control plane to close the epoch.

        Return after ``timeouts.verdict_s`` seconds at the latest.
        """
        protocol.run(protocol.suspect(self, group, error, self.timeouts.verdict_s))


# --- standbys ---------------------------------------------------------------------------------------------------------


PERIOD_S = 600.0
"""Seconds after which a standby that still waits is checked again."""
_COPY_BYTES = 16 << 20
_TRIES = 3
_LOWEST = 19


def examine(
    reach: Callable[[], None],
    seed: int = 0,
    multiply: Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray] = numpy.matmul,
    copy: Callable[[numpy.ndarray], numpy.ndarray] = numpy.copy,
) -> None:
    """Compute, copy and communicate, and compare every result with the one that is right.

    Args:
        reach: function that sends this process a message over its own data-plane address; it raises OSError if the
            message does not arrive.

    Raises:
        ReplaceNodeError: a result is wrong, or no message arrives in several tries.
    """
    draw = numpy.random.default_rng(seed)
    if fault := fault_of_products(multiply, draw):
        raise ReplaceNodeError(f"the check of a standby failed: {fault}")
    data = draw.integers(0, 256, _COPY_BYTES, dtype=numpy.uint8)
    if checksum(data.data) != checksum(copy(data).data):
        raise ReplaceNodeError(f"the check of a standby failed: a copy of {_COPY_BYTES >> 20} MiB has another checksum")
    _reach(reach)


def _reach(reach: Callable[[], None]) -> None:
    """Try to reach this process several times: a machine under load, or one that was stopped, may miss a time limit."""
    for number in range(1, _TRIES + 1):
        try:
            reach()
            return
        except OSError as error:
            if number == _TRIES:
                said = f"the check of a standby failed: {_TRIES} messages to itself were lost: {error}"
                raise ReplaceNodeError(said) from error


class Admission:
    """Checks this standby while it waits for a logical rank.

    Args:
        reach: see :func:`examine`.
        failed: function that is called, in another thread, with the error of a failed check.
        period_s: seconds between two checks.
        check: the check: a function of ``reach`` and a seed.
    """

    def __init__(
        self,
        reach: Callable[[], None],
        failed: Callable[[ReplaceNodeError], None],
        period_s: float = PERIOD_S,
        check: Callable[[Callable[[], None], int], None] = examine,
    ):
        self._reach, self._failed, self._period_s, self._check = reach, failed, period_s, check
        self._over = threading.Event()

    def start(self) -> None:
        """Begin to check, in another thread."""
        threading.Thread(target=self._go_on, name="ft-admission", daemon=True).start()

    def stop(self) -> None:
        """Begin no further check, and ignore the result of one that is under way."""
        self._over.set()

    def _go_on(self) -> None:
        with contextlib.suppress(OSError):  # on Linux this is the priority of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        seed = 0
        while not self._over.is_set():
            try:
                self._check(self._reach, seed)
            except ReplaceNodeError as error:
                if not self._over.is_set():
                    self._failed(error)
                return
            seed += 1
            self._over.wait(self._period_s)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
"""Parameters of glibc's mallopt(3)."""
_USUAL = {_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 64 << 20}
"""What glibc's own adjustment of the thresholds comes to in a process that frees large blocks."""
_PIECE = 16 << 20
PAUSE_S = 0.02
"""Seconds between two pieces of memory, so that training on the same node keeps its CPUs."""


class ReadyMemory:
    """Memory that a standby has touched before it needs it: a part of its heap, and one file for a snapshot.

    glibc takes large blocks from the kernel, and gives them back, one by one. While a standby keeps memory ready it
    takes them from the heap instead, and gives nothing back: a block that was touched and freed serves all that is
    allocated later. With another allocator in place of glibc's, the touched memory is of no use, and does no harm.

    Args:
        available: function that returns how many bytes of memory the node has left.
    """

    def __init__(self, available: Callable[[], int] | None = None):
        self._available = available or available_memory
        self._libc: Any = None
        self._block = self._size = self._touched = 0
        self._spare: Spare | None = None
        self._is_enough = False

    @property
    def is_wanted(self) -> bool:
        """Return whether memory is wanted that is not there yet."""
        return self._lacking() > 0

    def want(self, order: Reserve) -> str:
        """Begin to keep the memory of ``order`` ready, if the node can spare twice as much; say what is done."""
        need = order.heap + order.snapshot
        if need == 0 or self._libc is not None or self._spare is not None:
            return ""
        if (left := self._available()) < 2 * need:
            return f"no memory is kept ready: {_mib(need)} are needed, and the node has {_mib(left)} left"
        if order.heap:
            self._begin_heap(order.heap)
        if order.snapshot:
            with contextlib.suppress(OSError):
                self._spare = Spare(order.snapshot)
        return f"kept ready for a logical rank: {_mib(order.heap)} of heap, {_mib(order.snapshot)} for a snapshot"

    def touch(self) -> None:
        """Touch the next piece, unless others have taken the node's memory meanwhile; then no more is wanted."""
        if self._available() < 2 * self._lacking():
            self._size, self._is_enough = self._touched, True
        elif self._touched < self._size:
            length = min(_PIECE, self._size - self._touched)
            ctypes.memset(self._block + self._touched, 0, length)
            self._touched += length
        elif self._spare is not None:
            self._spare.touch(_PIECE)

    def take(self) -> Spare | None:
        """Let all that is allocated from now on have the memory. Return that for a snapshot, if there is any."""
        if self._block:
            self._libc.free(self._block)
        self._block = self._size = self._touched = 0
        spare, self._spare = self._spare, None
        return spare

    def end(self) -> None:
        """Let the allocator work as usual again, once all that a logical rank needs has its memory."""
        if self._libc is not None:
            for parameter, value in _USUAL.items():
                self._libc.mallopt(parameter, value)
            self._libc = None

    def _lacking(self) -> int:
        """Return the bytes that are wanted and not touched yet."""
        spare = 0 if self._spare is None or self._is_enough else self._spare.nbytes - self._spare.touched
        return self._size - self._touched + spare

    def _begin_heap(self, nbytes: int) -> None:
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "mallopt"):
            return
        libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = _POINTER, [ctypes.c_size_t], [_POINTER]
        libc.madvise.argtypes = [_POINTER, ctypes.c_size_t, ctypes.c_int]
        self._libc = libc
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
        self._block = libc.malloc(nbytes) or 0
        if self._block:
            self._size = nbytes
            begin = -(-self._block // _HUGE) * _HUGE
            libc.madvise(begin, max(0, self._block + nbytes - begin) // _HUGE * _HUGE, mmap.MADV_HUGEPAGE)


_POINTER = ctypes.c_void_p
_HUGE = 2 << 20


def _mib(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB"


_CGROUP = Path("/sys/fs/cgroup")


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Return the bytes of memory that the node, or the container of this process, has left without swapping."""
    left = [int(line.split()[1]) << 10 for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        left.append(int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text()))
    return min(left, default=0)


def private_memory() -> int:
    """Return the bytes of memory that this process has touched, without those of files and of shared memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)
