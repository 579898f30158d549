"""Checks of one device: snapshots of the training state, and what DMR (SpareTrain) relies on.

A snapshot is a copy from the device to host memory, page-locked or not. DMR needs digests of tensors, and operators
that give the same bits each time.
"""

import contextlib
import os
import time
from dataclasses import dataclass

import torch

from ft.lab.reproducibility.probe import Probe, cases
from ft.lab.selftest.table import Context, Failed, Measured
from ft.show.text import count, seconds
from ft.state.snapshot.buffers import Slot
from ft.state.snapshot.copier import Copier, CopyPlan, tables_of
from ft.systems.dmr.digest import backend, digest
from megatron import patches

_ON_CPU, _LEAST, _MOST = 64 << 20, 1 << 30, 8 << 30
_TENSOR, _ROUNDS = 64 << 20, 3
_BLOCKED = 0.2
"""Largest share of a copy's time for which a page-locked copy may block the training thread."""
_DAMAGED = "do not train on this node: test its memory, and look at nvidia-smi -q (ECC, PCIe replays) and dmesg"
_SLOW = "look at the PCIe link (nvidia-smi -q: link width and generation), the NUMA binding of workers, and other load"


@dataclass(frozen=True)
class _Copy:
    """Times of copies of the same state: gigabytes per second of the fastest copy, checksums included; seconds for
    which the call that starts that copy blocks the training thread; its seconds."""

    gb_s: float
    blocks_s: float
    seconds: float


def snapshot(context: Context) -> tuple[str, Measured]:
    """Copy tensors as a training step does, and compare every byte."""
    here = patches.platform()
    here.select_device(0)
    on_device = here.name == "cuda"
    state = {f"tensor {i}": _random(i, here.device) for i in range(_bytes(on_device) // _TENSOR)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    plain = _copies(state, pinned=False, planted=context.planted)
    measured: Measured = {"bytes": nbytes, "pageable_gb_s": plain.gb_s, "pageable_blocks_s": plain.blocks_s}
    size = f"{nbytes / 1e9:.1f} GB"
    if not on_device:
        return f"{size} at {plain.gb_s:.1f} GB/s; no GPU: nothing to page-lock", measured
    locked = _copies(state, pinned=True, planted=False)
    measured.update(pinned_gb_s=locked.gb_s, pinned_blocks_s=locked.blocks_s)
    if locked.blocks_s > max(_BLOCKED * locked.seconds, 0.05):
        share = f"{seconds(locked.blocks_s)} of {seconds(locked.seconds)}"
        raise Failed(f"a page-locked copy blocks the training thread for {share}", _SLOW, measured)
    if locked.gb_s < plain.gb_s:
        raise Failed(f"page-locked {locked.gb_s:.1f} GB/s, less than pageable {plain.gb_s:.1f} GB/s", _SLOW, measured)
    said = f"page-locked {locked.gb_s:.1f} GB/s, blocks {seconds(locked.blocks_s)}"
    return f"{size}: {said}; pageable {plain.gb_s:.1f} GB/s, blocks {seconds(plain.blocks_s)}", measured


def _bytes(on_device: bool) -> int:
    """Return the size of the state: on a device an eighth of the free memory of device and host, within limits."""
    if not on_device:
        return _ON_CPU
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(_LEAST, min(_MOST, torch.cuda.mem_get_info()[0] // 8, host // 8))


def _random(seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 256, (_TENSOR,), dtype=torch.uint8, device=device, generator=generator)


def _copies(state: dict[str, torch.Tensor], *, pinned: bool, planted: bool) -> _Copy:
    """Copy ``state`` several times; the first time also allocates the memory, so the fastest counts."""
    sections, slot, copier = {"own": state}, Slot(), Copier()
    slot.fit(tables_of(sections), pinned)
    plan, found = CopyPlan(slot, sections), []
    for _ in range(_ROUNDS):
        _synchronize(state)
        began = time.monotonic()
        progress = copier.start(plan, lambda error: None)
        blocked = time.monotonic() - began
        progress.wait()
        took = time.monotonic() - began
        if progress.error is not None:
            raise Failed(f"the copy failed: {progress.error}", _DAMAGED)
        found.append(_Copy(plan.nbytes / 1e9 / took, blocked, took))
    copier.close()
    if planted:
        slot.parts["own"].buffer.view[12345] ^= 1
    _compare(slot, state)
    return max(found, key=lambda one: one.gb_s)


def _compare(slot: Slot, state: dict[str, torch.Tensor]) -> None:
    if damaged := slot.damage():
        raise Failed(f"a checksum of the snapshot is wrong: {damaged}", _DAMAGED)
    for (name, live), stored in zip(state.items(), slot.parts["own"].tensors(), strict=True):
        if not torch.equal(live.cpu(), stored):
            raise Failed(f"{name} differs between the device and the snapshot", _DAMAGED)


def _synchronize(state: dict[str, torch.Tensor]) -> None:
    if next(iter(state.values())).is_cuda:
        torch.cuda.synchronize()


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
_SIZES = (1, 4097, 1 << 18)
_BITS, _SEED = 40, 12345
_ON_DEVICE, _DIGESTS = 1 << 30, 5
_RUNS = 3
_WRONG = (
    "digests cannot be trusted here: reinstall this project (its digests are compiled); if that does not help, test "
    "the memory of the device"
)
_VARIES = (
    "train with --deterministic-mode, or leave these operators out of DMR: ft dmr selftest --out unstable.json, and "
    "--ft-dmr-unstable unstable.json; an operator that is no sum (a matrix product, say) means a faulty device"
)


def digests(context: Context) -> tuple[str, Measured]:
    """Compare digests of the same bits on the device and on the CPU, flip bits, and measure the rate."""
    here = patches.platform()
    here.select_device(0)
    device, tried = here.device, 0
    for dtype in _DTYPES:
        for size in _SIZES:
            tensor = _octets(size, dtype)
            there = tensor.to(device, copy=True)
            if context.planted:
                there.view(torch.uint8)[size // 2] ^= 8
            tried += 1
            if not torch.equal(digest(tensor, _SEED), digest(there, _SEED).cpu()):
                raise Failed(f"digests of {size} elements of {dtype} differ between {device.type} and cpu", _WRONG)
    _flip(device)
    rate = _rate(device)
    how = backend(device)
    measured = {"digests": tried, "flips": _BITS, "gb_s": rate, "backend": how}
    return f"{tried} equal on {device.type}, {_BITS} flipped bits found, {rate:.1f} GB/s ({how})", measured


def _octets(size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def _flip(device: torch.device) -> None:
    tensor = _octets(_SIZES[-1], torch.float32).to(device)
    before, octets = digest(tensor, _SEED), tensor.view(torch.uint8)
    for number in range(_BITS):
        at, mask = (number * 7919 * 131) % octets.numel(), 1 << (number % 8)
        octets[at] ^= mask
        if torch.equal(digest(tensor, _SEED), before):
            raise Failed(f"a flipped bit of byte {at} does not change the digest on {device.type}", _WRONG)
        octets[at] ^= mask


def _rate(device: torch.device) -> float:
    tensor = torch.zeros((_ON_DEVICE if device.type == "cuda" else _ON_CPU) // 4, device=device)
    times = []
    for _ in range(_DIGESTS):
        began = time.monotonic()
        digest(tensor, _SEED).cpu()  # waits for the device
        times.append(time.monotonic() - began)
    return tensor.nbytes / 1e9 / min(times)


def reproducible(context: Context) -> tuple[str, Measured]:
    """Train the models of ``ft dmr selftest``, as many as the time allows, and execute every operator again."""
    from ft.lab.reproducibility.steps import watch
    from megatron.ft_trainer.logging.quiet import quieten
    from megatron.patches.manifest import WITH_DMR

    began = time.monotonic()
    quieten()
    patches.apply(WITH_DMR)
    here, probe, done, slowest = patches.platform(), Probe(_RUNS), 0, 0.0
    every = cases(here.name)
    with _varying() if context.planted else contextlib.nullcontext():
        for case in every:
            left = 0.8 * context.limit_s - (time.monotonic() - began)
            if done and left < 2 * slowest:
                break
            started = time.monotonic()
            watch(case, probe)
            done, slowest = done + 1, max(slowest, time.monotonic() - started)
    varying = sorted({one.kind.operator for one in probe.findings.values() if not one.is_stable})
    operators = {one.kind.operator for one in probe.findings.values()}
    measured: Measured = {"models": done, "operators": len(operators), "varying": varying}
    if varying:
        raise Failed(
            f"{count(len(varying), 'operator')} of {len(operators)} vary: {', '.join(varying[:4])}", _VARIES, measured
        )
    return f"{count(len(operators), 'operator')} in {done} of {len(every)} models, {_RUNS} times again: equal", measured


@contextlib.contextmanager
def _varying():
    """Replace the addition of matrices to a product by one whose result differs from call to call."""
    library, calls = torch.library.Library("aten", "IMPL"), [0]

    def varying(x: torch.Tensor, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
        calls[0] += 1
        return torch.full(tuple(x.shape), 1.0 + 1e-6 * calls[0], dtype=x.dtype, device=x.device)

    library.impl("ones_like", varying, "CUDA" if patches.platform().name == "cuda" else "CPU")
    try:
        yield
    finally:
        library._destroy()
