"""Checks of what DMR (SpareTrain) relies on: digests of tensors, and operators that give the same bits each time."""

import contextlib
import time

import torch

from ft.lab.reproducibility.probe import Probe, cases
from ft.lab.selftest.table import Context, Failed, Measured
from ft.show.text import count
from ft.systems.dmr.digest import backend, digest
from megatron import patches

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
_SIZES = (1, 4097, 1 << 18)
_BITS, _SEED = 40, 12345
_ON_CPU, _ON_DEVICE, _ROUNDS = 64 << 20, 1 << 30, 5
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
            tensor = _random(size, dtype)
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


def _random(size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def _flip(device: torch.device) -> None:
    tensor = _random(_SIZES[-1], torch.float32).to(device)
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
    for _ in range(_ROUNDS):
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
