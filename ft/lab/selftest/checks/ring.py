"""Check of the all-reduce between replicas (FT-HSDP, section 4.2): the same bits everywhere, and those of the CPU."""

import hashlib
import json
import time
from datetime import timedelta

import torch

from ft.base import bounded_json
from ft.base.errors import FtError
from ft.lab.selftest.ranks import TOKEN, Crew, Rank, devices
from ft.lab.selftest.table import Context, Failed, Measured
from ft.systems.hsdp.ring import Ring, RingOptions

_MEMBERS, _LIMIT_S = 3, 60.0
_ON_CPU, _ON_DEVICE = 1 << 20, 16 << 20
_WRONG = (
    "replicas would train on different or wrong gradients: run it again with --only ring; if it fails again, look at "
    "memory, network cards and GPUs of this node (dmesg, nvidia-smi -q)"
)


def ring(context: Context) -> tuple[str, Measured]:
    """Reduce tensors over members on this node, and compare results between members and with the CPU's."""
    found = Crew(context, _MEMBERS, _reduce).wait(min(_LIMIT_S, 0.8 * context.limit_s))
    first = found[0]
    for number, one in found.items():
        for name in ("fp32", "bf16"):
            if one[name] != first[name]:
                raise Failed(f"members 0 and {number} have different bits ({name})", _WRONG)
            if one[name] != one[f"{name} on the CPU"]:
                raise Failed(f"member {number}: the bits of the device differ from those of the CPU ({name})", _WRONG)
        if one["wrong"]:
            raise Failed(f"member {number}: {one['wrong']} elements differ from the exact sum", _WRONG)
    rate = min(one["gb_s"] for one in found.values())
    where = "GPU tensors" if devices(context) else "no GPU: CPU tensors"
    return f"{_MEMBERS} members, {where}: equal, {rate:.2f} GB/s", {"members": _MEMBERS, "gb_s": rate}


def _reduce(rank: Rank) -> Measured:
    device = rank.device()
    elements = _ON_DEVICE if device.type == "cuda" else _ON_CPU
    own = Ring("127.0.0.1", TOKEN, RingOptions(limit_s=_LIMIT_S / 2))
    rank.store.set(f"ring/{rank.number}", json.dumps(own.address))
    rank.store.wait([f"ring/{number}" for number in range(rank.size)], timedelta(seconds=_LIMIT_S))
    addresses = [bounded_json.loads(rank.store.get(f"ring/{number}")) for number in range(rank.size)]
    own.reconfigure(1, addresses, rank.number)
    measured: Measured = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        values = torch.randn(elements, generator=torch.Generator().manual_seed(rank.number)).to(dtype)
        for where, given in ((name, values.to(device, copy=True)), (f"{name} on the CPU", values.clone())):
            _sum(own, given)
            if rank.planted and rank.number == 1 and where == name:
                given.view(torch.uint8)[777] ^= 1
            measured[where] = hashlib.sha256(given.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    measured["wrong"], measured["gb_s"] = _exact(own, rank, device, elements)
    own.close()
    return measured


def _exact(own: Ring, rank: Rank, device: torch.device, elements: int) -> tuple[int, float]:
    """Sum whole numbers, which fp32 adds without rounding in any order; return (wrong elements, GB/s)."""
    given = [_whole_numbers(number, elements) for number in range(rank.size)]
    tensor = given[rank.number].to(device, copy=True)
    began = time.monotonic()
    _sum(own, tensor)
    took = time.monotonic() - began
    return int((tensor.cpu() != sum(given)).sum()), tensor.nbytes / 1e9 / took


def _whole_numbers(seed: int, elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 20), 1 << 20, (elements,), generator=generator).float()


def _sum(own: Ring, tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()  # the tensor was written on another stream than the ring reads it on
    outcome = own.all_reduce(tensor).wait()
    if not outcome.ok:
        raise FtError(f"the all-reduce failed: {outcome.reason}")
    if tensor.is_cuda:
        torch.cuda.synchronize()
