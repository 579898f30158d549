"""Report what DMR finds: as lines on the terminal, and as events in the event file of the run if there is one.

DMR (dual modular redundancy, SpareTrain) executes every operator of an iteration twice and repeats the iteration if
results differ.
"""

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ft.base import events
from ft.platform import devices
from ft.systems.dmr.runtime.suspects import EVICT, Outcome, Reports

if TYPE_CHECKING:
    from ft.worker.session import Session

_MOST_EVENTS, _MOST_LINES = 20, 3


@dataclass(frozen=True)
class HostAndDevice:
    """The host and device on which a rank computes; the device with its index among all of the host, so that runs with
    other CUDA_VISIBLE_DEVICES give the same device the same name."""

    host: str
    device: str

    @staticmethod
    def here() -> "HostAndDevice":
        if torch.cuda.is_available():
            number = torch.cuda.current_device()
            name = f"cuda:{devices.on_node(number)} ({torch.cuda.get_device_name(number)})"
            return HostAndDevice(socket.gethostname(), name)
        return HostAndDevice(socket.gethostname(), "cpu")


class FindingReporter:
    """Reports the findings of one rank (a ``protection.Witness``).

    Args:
        session: the worker's session with ``ft run``, by which events are recorded and standbys can replace ranks; None
            without hot-swap.
    """

    def __init__(self, session: "Session | None" = None):
        self._session = session
        self._origin = HostAndDevice.here()
        self.can_evict = session is not None

    def mismatch(self, step: int, attempt: int, reports: Reports, outcome: Outcome) -> None:
        """Report a wrong attempt, see ``protection.Witness``. Each rank reports its own mismatches, rank 0 also the
        decision."""
        rank = dist.get_rank()
        own = reports.get(rank, ())
        where = f"rank {rank} on {self._origin.host}, {self._origin.device}"
        for one in own[:_MOST_LINES]:
            _say(f"DMR: step {step}, {where}: {one}")
        if len(own) > _MOST_LINES:
            _say(f"DMR: step {step}, {where}: and {len(own) - _MOST_LINES} more")
        for one in own[:_MOST_EVENTS]:
            values = {**one.values(), "host": self._origin.host, "device": self._origin.device}
            self._observe(events.DMR_MISMATCH, step=step, attempt=attempt, **values)
        if rank == 0:
            _say(_blame(outcome) if outcome.action == EVICT else f"DMR: step {step}: {outcome.reason}")
            ranks, blamed = sorted(reports), list(outcome.ranks)
            verdict = {"action": outcome.action, "reason": outcome.reason, "ranks": ranks, "blamed": blamed}
            self._observe(events.DMR_VERDICT, step=step, attempt=attempt, **verdict)

    def clean(self, step: int, attempt: int) -> None:
        """Report that a repeated step was correct, see ``protection.Witness``. Only rank 0 reports."""
        if dist.get_rank() == 0:
            _say(f"DMR: step {step} was correct at attempt {attempt}")
            self._observe(events.DMR_CLEAN, step=step, attempt=attempt)

    def covered(self, step: int, strategy: str, counts: Mapping[str, int]) -> None:
        """Print (rank 0) and record (every rank) how operators were verified, see ``protection.Witness``."""
        if dist.get_rank() == 0:
            counted = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            print(f"DMR ({strategy}): operators of rank 0 in step {step}: {counted}", flush=True)
        self._observe(events.DMR_COVERED, step=step, strategy=strategy, counts=dict(counts))

    def coverage_fell(self, step: int, before: float, now: float, counts: Mapping[str, int]) -> None:
        """Report that fewer operators are verified than before, see ``protection.Witness``. Only rank 0 reports."""
        if dist.get_rank() == 0:
            ways = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
            _say(
                f"DMR: step {step}: {now:.2%} of the operators were verified on the rank with the least, {before:.2%} "
                f"before (rank 0: {ways})"
            )
            self._observe(events.DMR_COVERAGE_FELL, step=step, before=before, now=now)

    def _observe(self, event: str, **detail: Any) -> None:
        if self._session is not None:
            self._session.observe(event, **detail)


def _blame(outcome: Outcome) -> str:
    ranks = ", ".join(map(str, outcome.ranks))
    return f"DMR: rank {ranks} is suspected of computing wrongly: {outcome.reason}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
