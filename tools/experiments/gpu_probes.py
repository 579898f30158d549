"""Facts about CUDA, NCCL and torch that decide how a recovery goes, each measured in processes of its own.

    python tools/experiments/gpu_probes.py --out probes.jsonl              # on a machine with a GPU, some ten minutes
    python tools/experiments/gpu_probes.py --out probes.jsonl --dry-run    # on a CPU, over gloo and with small sizes

Each probe has a limit, and writes one line of JSON as soon as it has ended: its name, how it ended ("done", "failed",
"killed at its limit"), the seconds, and what it found. Two NCCL ranks share one GPU: each has a NCCL_HOSTID of its own,
because NCCL compares host and bus of its ranks. No GPU has run this. In a dry run every probe has been seen to end;
``reconfigure`` skips itself there with torch before 2.14.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from ft.lab.selftest.checks.driver import Holder, Ticker
from ft.platform import processes, releases
from ft.state.snapshot.buffers import HostBuffer, SlotFile

MIB = 1 << 20
Found = dict[str, Any]


class Context:
    """One process of a probe.

    Args:
        folder: folder that the processes of the probe share.
        rank: rank of the process.
        size: number of processes.
        is_dry: whether to run on the CPU, with small sizes.

    Attributes:
        store: a store that the processes share.
    """

    def __init__(self, folder: Path, rank: int, size: int, is_dry: bool):
        self.folder, self.rank, self.size, self.is_dry = folder, rank, size, is_dry
        self.device = torch.device("cpu" if is_dry else "cuda:0")
        self.store = dist.FileStore(str(folder / "store"), size)  # the end of the last one removes the file
        self._kept: list[Any] = []  # a backend's destructor waits for operations that hang
        if not is_dry:
            torch.cuda.set_device(self.device)

    def scaled(self, real: int, dry: int) -> int:
        """Return the size of the dry run or of the real one."""
        return dry if self.is_dry else real

    def backend(self, name: str = "group", blocking: int = 0) -> Any:
        """Return a new NCCL backend, or one of gloo, over all ranks of the probe."""
        store, limit = dist.PrefixStore(name, self.store), timedelta(seconds=60)
        if self.is_dry:
            self._kept.append(dist.ProcessGroupGloo(store, self.rank, self.size, limit))
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout, options.config.blocking = limit, blocking
            self._kept.append(dist.ProcessGroupNCCL(store, self.rank, self.size, options))
        return self._kept[-1]

    def meet(self, place: str) -> None:
        """Wait for all processes of the probe."""
        self.store.set(f"{place}/{self.rank}", "")
        self.store.wait([f"{place}/{rank}" for rank in range(self.size)])

    def tensor(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes // 4, device=self.device)

    def wait(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize()

    def free_mib(self) -> float:
        """Return the free memory of the device in MiB (of this machine, in a dry run)."""
        if self.is_dry:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / MIB
        return torch.cuda.mem_get_info()[0] / MIB


class Call(threading.Thread):
    """A call in another thread, with the seconds that it took and the error that it raised."""

    def __init__(self, call: Callable[[], Any]):
        super().__init__(daemon=True)
        self._call, self.error = call, ""
        self.seconds: float | None = None
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self._call()
        except Exception as error:
            self.error = f"{type(error).__name__}: {str(error)[:200]}"
        self.seconds = round(time.monotonic() - began, 3)

    def outcome(self) -> str | float:
        """Return the error, or the seconds; "hangs" if the call has not returned."""
        return self.error or ("hangs" if self.seconds is None else self.seconds)


def abort_while_made(context: Context) -> Found:
    """Abort a communicator that waits for a member: when does the abort return, and when the operation?"""
    backend = context.backend()
    if context.rank:
        time.sleep(600)  # never starts the operation; killed with the probe
    if os.environ.get("PROBE_EAGER") and not context.is_dry:
        operation = Call(lambda: backend.eager_connect_single_device(context.device))
    else:
        operation = Call(lambda: backend.allreduce([context.tensor(4096)]).wait())
    time.sleep(2)
    aborted = Call(backend.abort)
    aborted.join(20)
    operation.join(20)
    return {"abort_s": aborted.seconds, "operation_s": operation.seconds, "error": operation.error or aborted.error}


def killed_while_made(context: Context) -> Found:
    """A member is killed while a communicator is made: when do the others learn of it?"""
    backend = context.backend()
    if context.rank:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    operation = Call(lambda: backend.allreduce([context.tensor(4096)]).wait())
    operation.join(15)
    seconds, aborted = operation.seconds, Call(backend.abort)
    aborted.join(20)
    return {"learnt_s": seconds, "abort_s": aborted.seconds, "error": operation.error}


def both_send_first(context: Context) -> Found:
    """Both ranks send, then receive: up to which size does it end, alone and in one launch?"""
    found, peer = {}, 1 - context.rank
    for mib in (1, 8, 64):
        size = context.scaled(mib * MIB, mib * 1024)
        for together in (False, True) if not context.is_dry else (False,):
            backend = context.backend(f"{mib} {together}")
            mine, theirs = context.tensor(size), context.tensor(size)

            def exchange(backend=backend, mine=mine, theirs=theirs, together=together) -> None:
                if together:
                    backend._start_coalescing()
                works = [backend.send([mine], peer, 0), backend.recv([theirs], peer, 0)]
                works = [backend._end_coalescing()] if together else works
                for work in works:
                    work.wait()
                context.wait()

            call = Call(exchange)
            call.join(10)
            found[f"{mib} MiB {'together' if together else 'alone'}"] = call.outcome()
            if call.seconds is None:
                backend.abort()
    return found


def cost_of_a_launch(context: Context) -> Found:
    """Microseconds of the host for an all-reduce of 4 KiB, and threads started, with blocking communicators and not."""
    found = {}
    for blocking in (1, 0):
        threads = processes.threads()
        backend, tensor = context.backend(str(blocking), blocking), context.tensor(4096)
        backend.allreduce([tensor]).wait()
        context.wait()
        count, began = context.scaled(2000, 50), time.perf_counter()
        for _ in range(count):
            backend.allreduce([tensor])
        found[f"blocking {blocking}, us"] = round((time.perf_counter() - began) / count * 1e6, 1)
        context.wait()
        found[f"blocking {blocking}, threads"] = processes.threads() - threads
    return found


def launch_with_the_lock(context: Context) -> Found:
    """Fill the launch queue behind a hung all-reduce by calls that keep the interpreter lock: do other threads run?"""
    backend, tensor = context.backend(), context.tensor(4096)
    backend.allreduce([tensor]).wait()
    context.wait()
    if context.rank:
        time.sleep(600)  # the second all-reduce hangs on the other rank
    work, ticker = backend.allreduce([tensor]), Ticker()
    if context.is_dry:
        launches = Call(lambda: ctypes.PyDLL(None).usleep(700_000))
    else:
        work.wait()  # the stream waits for it, the host does not
        maps = Path("/proc/self/maps").read_text().splitlines()
        library = ctypes.PyDLL(next(line.split()[-1] for line in maps if "libcudart" in line))
        address, stream = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        launches = Call(lambda: [library.cudaMemsetAsync(address, 0, 4, stream) for _ in range(4000)])
    time.sleep(0.2)
    aborted = Call(backend.abort)
    aborted.join(20)
    launches.join(20)
    return {"without_a_tick_s": ticker.stop(), "abort_s": aborted.seconds, "launches_s": launches.seconds}


def question_while_made(context: Context) -> Found:
    """Ask whether a work has ended while another thread waits for a communicator: does a third thread run?"""
    backend, tensor = context.backend(), context.tensor(4096)
    work = backend.allreduce([tensor])
    work.wait()
    if context.rank:
        time.sleep(600)
    other, ticker = context.backend("other") if not context.is_dry else backend, Ticker()
    waits = Call(lambda: other.allreduce([tensor]).wait())
    time.sleep(1)
    asked = Call(work.is_completed)
    asked.join(15)
    found = {"asked_s": asked.seconds, "without_a_tick_s": ticker.stop(), "waits": waits.is_alive()}
    other.abort()
    return found


def page_locking(context: Context) -> Found:
    """Seconds to page-lock memory, private and in memory files, and the rate of copies with a GEMM beside them."""
    found = {}
    for gib in (1, 4, 16):
        size = context.scaled(gib << 30, gib * MIB)
        for kind in ("private", "file"):
            file = SlotFile({"a": size}) if kind == "file" else None
            buffer = HostBuffer(size, False, None if file is None else (file, file.places["a"]))
            began = time.perf_counter()
            buffer.tensor.zero_() if context.is_dry else buffer.pin()
            found[f"{gib} GiB {kind}, s"] = round(time.perf_counter() - began, 3)
            if not context.is_dry:
                found[f"{gib} GiB {kind}, GB/s"] = _copy_rate(buffer)
            del buffer, file
    return found


def _copy_rate(buffer: HostBuffer) -> float:
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    matrix, stream = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        matrix @ matrix
    began, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        began.record()
        buffer.tensor[: 1 << 30].copy_(source, non_blocking=True)
        end.record()
    torch.cuda.synchronize()
    return round((1 << 30) / began.elapsed_time(end) / 1e6, 2)


def end_of_a_process(context: Context) -> Found:
    """SIGKILL a process with much memory on the device and page-locked: when has it ended, when is the memory free?

    Also the seconds of that process' context and first matrix product.
    """
    context.tensor(4096)
    before = context.free_mib()
    holder = Holder(context.device, context.scaled(40 << 10, 4), context.scaled(16 << 10, 0))
    ended = holder.end(lambda: context.is_dry or context.free_mib() >= before - 512, 60.0)
    return {name: round(seconds, 3) for name, seconds in (holder.found | ended).items()}


def memory_of_a_context(context: Context) -> Found:
    """Measure the device memory, in MiB, of a process with nothing but a context, and of all ranks' communicators."""
    context.tensor(4096)
    context.meet("contexts")
    before, found = context.free_mib(), {}
    if context.rank == 0:
        idle = Holder(context.device)
        found["idle_context_mib"] = round(before - context.free_mib(), 1)
        idle.end(lambda: context.is_dry or context.free_mib() >= before - 16, 10.0)
    context.meet("measured")
    backend, began = context.backend(), time.perf_counter()
    backend.allreduce([context.tensor(4096)]).wait()
    context.wait()
    found["first_operation_s"] = round(time.perf_counter() - began, 3)
    return found | {"communicators_of_all_ranks_mib": round(before - context.free_mib(), 1)}


def reconfigured_groups(context: Context) -> Found:
    """Time torch's ``reconfigure`` three times: at first, while an all-reduce hangs, and after a rank was killed.

    The calls of nccl2 (torch 2.14) are those of torch's sources and tests. Without them, the probe skips itself.
    """
    options = dist.ProcessGroupGloo._Options() if context.is_dry else dist.ProcessGroupNCCL.Options()
    kind = getattr(dist, "ProcessGroupGloo" if context.is_dry else "ProcessGroupNCCL2", None)
    if kind is None or not hasattr(options, "enable_reconfigure"):
        return {"skipped": f"torch {torch.__version__} has no enable_reconfigure"}
    options.enable_reconfigure, options._timeout = True, timedelta(seconds=20)
    if context.is_dry:
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    backend, tensor, found = kind(context.store, context.rank, context.size, options), context.tensor(4096), {}
    for number, name in enumerate(("first", "behind a hung all-reduce", "without a killed rank")):
        size = 1 if "without" in name else 2
        if context.rank >= size:
            os.kill(os.getpid(), signal.SIGKILL)
        if number and context.rank == 0:
            hung = Call(lambda: (backend.allreduce([tensor]).wait(), context.wait()))
            time.sleep(1)
        context.store.set(f"{number}/{context.rank}", backend.get_reconfigure_handle())
        again = torch._C._distributed_c10d.ReconfigureOptions()
        again.handles = [context.store.get(f"{number}/{rank}").decode() for rank in range(size)]
        again.uuid, again.timeout, began = number + 1, timedelta(seconds=20), time.perf_counter()
        backend.reconfigure(again).wait()
        found[f"{name}, s"], result = round(time.perf_counter() - began, 3), context.tensor(4096)
        backend.allreduce([result]).wait()
        found[f"{name}, sum"] = result[0].item()
        if number and context.rank == 0:
            hung.join(5)
            found[f"{name}, operation"] = hung.outcome()
    return found


def end_of_a_step(context: Context) -> Found:
    """Microseconds of a synchronisation and of copies of small buffers to the host, also beside a snapshot's copy."""
    source, found = context.tensor(context.scaled(4 << 30, MIB)), {}
    host = torch.empty_like(source, device="cpu", pin_memory=not context.is_dry)
    stream = None if context.is_dry else torch.cuda.Stream()

    def measure_both(name: str, call: Callable[[], Any]) -> None:
        for beside in ("", " beside a copy"):
            context.wait()
            with torch.cuda.stream(stream):
                host.copy_(source, non_blocking=True) if beside else None
            began = time.perf_counter()
            call()
            found[f"{name}{beside}, us"] = round((time.perf_counter() - began) * 1e6, 1)

    measure_both("device", context.wait)
    measure_both("its own stream", lambda: None if context.is_dry else torch.cuda.current_stream().synchronize())
    for count in (1, 10, 100):
        buffers = [context.tensor(512) for _ in range(count)]
        measure_both(f"{count} x cpu()", lambda buffers=buffers: [buffer.cpu() for buffer in buffers])
    return found


@dataclass(frozen=True)
class Probe:
    """A probe: its function, the number of its processes, its limit in seconds, and environment variables."""

    run: Callable[[Context], Found]
    ranks: int = 2
    limit_s: float = 60.0
    environment: tuple[tuple[str, str], ...] = ()


_LIMITED = ("TORCH_NCCL_NONBLOCKING_TIMEOUT", "8")
PROBES = {
    "init-abort": Probe(abort_while_made),
    "init-abort-limited": Probe(abort_while_made, environment=(_LIMITED,)),
    "init-abort-eager": Probe(abort_while_made, environment=(_LIMITED, ("PROBE_EAGER", "1"))),
    "init-kill": Probe(killed_while_made, environment=(_LIMITED,)),
    "send-send": Probe(both_send_first, limit_s=100.0),
    "host-cost": Probe(cost_of_a_launch),
    "host-cost-alone": Probe(cost_of_a_launch, ranks=1),
    "gil": Probe(launch_with_the_lock, environment=(_LIMITED,)),
    "is-completed": Probe(question_while_made, environment=(_LIMITED,)),
    "register": Probe(page_locking, ranks=1, limit_s=90.0),
    "exit": Probe(end_of_a_process, ranks=1, limit_s=90.0),
    "context": Probe(memory_of_a_context),
    "context-nvls": Probe(memory_of_a_context, environment=(("NCCL_NVLS_ENABLE", "1"),)),
    "reconfigure": Probe(reconfigured_groups, limit_s=90.0),
    "step-end": Probe(end_of_a_step, ranks=1),
}


def measure(name: str, is_dry: bool) -> Found:
    """Run a probe in processes of its own, and return its line."""
    probe, began = PROBES[name], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(probe.ranks):
            own = {"NCCL_HOSTID": f"probe{rank}", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
            own |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **dict(probe.environment)}
            command = [sys.executable, __file__, "--probe", name, folder, str(rank), *(["--dry-run"] if is_dry else [])]
            with (Path(folder) / f"log{rank}").open("w") as log:
                child = subprocess.Popen(
                    command, env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True
                )
            children.append(child)
        try:
            code: int | None = children[0].wait(probe.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        processes.kill_whole([child.pid for child in children])
        for child in children:
            child.wait()
        how = {0: "done", None: "killed at its limit"}.get(code, "failed")
        result = Path(folder) / "result.json"
        found = json.loads(result.read_text()) if result.is_file() else {}
        if how != "done":
            found["log"] = (Path(folder) / "log0").read_text()[-1500:]
    return {"probe": name, "ended": how, "seconds": round(time.monotonic() - began, 1), "found": found}


def main() -> int:
    """Run the probes, or one process of a probe. Return 1 if a probe has not ended by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to which a line is appended for each probe")
    parser.add_argument("--only", nargs="+", choices=PROBES, default=list(PROBES), metavar="PROBE")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, over gloo, with small sizes")
    parser.add_argument("--probe", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe:
        name, folder, rank = given.probe
        context = Context(Path(folder), int(rank), PROBES[name].ranks, given.dry_run)
        found = PROBES[name].run(context)
        if context.rank == 0:
            (context.folder / "result.json").write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # threads may still be inside torch
    card = "none: a dry run on the CPU" if given.dry_run else torch.cuda.get_device_name(0)
    here = {what: ".".join(map(str, release)) for what, release in releases.installed().items()}
    lines: list[Found] = [{"card": card, **here}]
    _append(given.out, lines[0])
    for name in given.only:
        lines.append(measure(name, given.dry_run))
        _append(given.out, lines[-1])
    return int(any(line.get("ended", "done") != "done" for line in lines))


def _append(path: Path | None, line: Found) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
