"""Check of snapshots: the copy of a training state from the device to host memory, page-locked and not."""

import os
import time
from dataclasses import dataclass

import torch

from ft.lab.selftest.table import Context, Failed, Measured
from ft.show.text import seconds
from ft.state.snapshot.buffers import Slot
from ft.state.snapshot.copier import Copier, Plan, tables_of
from megatron import patches

_ON_CPU, _LEAST, _MOST = 64 << 20, 1 << 30, 8 << 30
_TENSOR, _ROUNDS = 64 << 20, 3
_BLOCKED = 0.2
"""Largest share of a copy's time for which a page-locked copy may block the training thread."""
_DAMAGED = "do not train on this node: test its memory, and look at nvidia-smi -q (ECC, PCIe replays) and dmesg"
_SLOW = "look at the PCIe link (nvidia-smi -q: link width and generation), the NUMA binding of workers, and other load"


@dataclass(frozen=True)
class _Copy:
    """Times of copies of the same state.

    Attributes:
        gb_s: gigabytes per second of the fastest copy, checksums included.
        blocks_s: seconds for which the call that starts that copy blocks the training thread.
    """

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
    plan, found = Plan(slot, sections), []
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
