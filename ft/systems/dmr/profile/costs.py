"""Measure the cost of verifying an operator beyond its second execution, for the DMR profiler.

DMR (dual modular redundancy, SpareTrain) verifies an operator by executing it a second time, immediately or deferred,
and comparing the results. The costs are measured once per profile, on the device of the run.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ft.systems.dmr.digest import same, writer
from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.deferred import entry, verify
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.operators import properties_of
from ft.systems.dmr.runtime.replay import Replay

_REPEATS = 20
_LARGE = 1 << 22


@dataclass(frozen=True)
class ComparisonCosts:
    """Costs of verifying an operator, without its second execution.

    Attributes:
        fixed_us: cost of comparing results of any size, in microseconds.
        us_per_byte: additional cost of comparing results, in microseconds per byte.
        defer_us: cost of recording an operator for a deferred verification, in microseconds.
    """

    fixed_us: float
    us_per_byte: float
    defer_us: float = 0.0

    def us(self, count: int) -> float:
        """Return the duration of comparing ``count`` bytes, in microseconds."""
        return self.fixed_us + count * self.us_per_byte


def measure(device: torch.device) -> ComparisonCosts:
    """Return the costs on ``device``, each a median of several measurements. ``fixed_us`` and ``defer_us`` are measured
    with a small operator, ``us_per_byte`` with a large tensor, as two digests (on a CPU, one comparison)."""
    findings = Findings(device, 0)
    small, large = torch.ones(16, device=device), torch.ones(_LARGE // 4, device=device)
    func = torch.ops.aten.add.Tensor
    at, kind = OperatorCall("add.Tensor", "forward", 0, 0, 0, 0), properties_of(func)

    waiting = entry(at, kind, (func, (small, small), {}), func(small, small), None, 0)
    alone = _median_us(lambda: func(small, small), device)
    fixed = max(_median_us(lambda: verify(waiting, findings), device) - alone, 0.0)
    replay = Replay(findings, _REPEATS + 1, 0)
    aside = _median_us(lambda: replay.record(at, kind, (func, (small, small), {}), small, None), device)
    findings.restart()
    return ComparisonCosts(fixed, _median_us(_comparison(large), device) / _LARGE, aside)


def _comparison(tensor: torch.Tensor) -> Callable[[], object]:
    if tensor.device.type == "cpu":
        other = tensor.clone()
        return lambda: same(tensor, other)
    write = writer(tensor.device)
    rows = torch.empty((2, 2), dtype=torch.int64, device=tensor.device).unbind()

    def twice():
        for row in rows:
            write(tensor, 0, row)

    return twice


def _median_us(work: Callable[[], object], device: torch.device) -> float:
    took = []
    for _ in range(_REPEATS):
        _settle(device)
        began = time.perf_counter()
        work()
        _settle(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
