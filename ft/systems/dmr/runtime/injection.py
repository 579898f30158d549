"""Inject planned bit flips on the rank that they are planned for, to test DMR.

DMR (dual modular redundancy, SpareTrain) finds such errors by executing every operator twice. Flips are planned by ``ft
run --inject`` or by the trainer's flag ``--ft-dmr-inject``.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from ft import faults as inject
from ft.base import events
from ft.base.errors import UserError
from ft.faults import Fault, parse, schedule
from ft.faults.flip import BIT_FLIP
from ft.systems.dmr.runtime.cursor import ExecutionCursor
from ft.systems.dmr.runtime.falsify import Falsifier, Hit

if TYPE_CHECKING:
    from ft.worker.session import Session

_MOST_TOLD = 20
"""Maximum number of flips of one fault that are reported; a stuck bit may corrupt thousands of results."""


def make_falsifier(
    texts: Sequence[str],
    seed: int,
    step: Callable[[], int],
    session: "Session | None" = None,
    environment: Mapping[str, str] = os.environ,
) -> Falsifier | None:
    """Return the object that corrupts results on this rank; None if no flips are planned on any rank.

    Args:
        texts: the fault specifications of the trainer's flag.
        seed: seed for random choices that the specifications leave open.
        step: returns the current step, from 1.
        session: the worker's session with ``ft run``, which activates the faults of ``ft run``; None without ``ft
            run``.
        environment: environment variables, from which the faults planned by ``ft run`` are read.

    Raises:
        UserError: a specification is not a bit flip at a step of a rank.
    """
    planned = planned_flips(texts, dist.get_world_size(), seed)
    awaits_more = any(fault.kind == BIT_FLIP for fault in inject.planned(environment)) if session else False
    if not planned and not awaits_more:
        return None
    teller = FlipReporter(step, session)
    falsifier = ScheduledFalsifier(teller.tell, [fault for fault in planned if fault.rank == dist.get_rank()], step)
    if session is not None:
        session.faulty_device = falsifier.arm
    return falsifier


def planned_flips(texts: Sequence[str], world_size: int, seed: int) -> list[Fault]:
    """Return the faults of all ranks that the trainer's flag requests.

    Args:
        texts: the fault specifications.
        world_size: number of ranks.
        seed: seed for random choices that the specifications leave open.

    Raises:
        UserError: a specification is not a bit flip, has no step, or names a node or a replica.
    """
    specs = [spec for text in texts for spec in parse(text)]
    for spec in specs:
        if spec.kind != BIT_FLIP:
            raise UserError(
                f"--ft-dmr-inject {spec.text!r}: the trainer's flag accepts only bit flips",
                "use ft run --inject for other faults",
            )
        if spec.step is None or spec.node is not None or spec.replica is not None:
            fix = "use ft run --inject for times, nodes and replicas"
            raise UserError(f"--ft-dmr-inject {spec.text!r}: give a step, and a rank if not any", fix)
    return schedule(specs, world_size, ["n0"], seed)


class ScheduledFalsifier(Falsifier):
    """A ``Falsifier`` that activates each of ``faults`` at the first operator of the fault's step."""

    def __init__(self, tell: Callable[[Hit], None], faults: Sequence[Fault], step: Callable[[], int]):
        super().__init__(tell)
        self._coming, self._step = list(faults), step

    def falsify(self, execution, operator, course: ExecutionCursor, tensors) -> None:
        if self._coming:
            step = self._step()
            due = [fault for fault in self._coming if fault.step <= step]
            self._coming = [fault for fault in self._coming if fault.step > step]
            for fault in due:
                self.arm(fault.number, fault.flip)
        super().falsify(execution, operator, course, tensors)


class FlipReporter:
    """Reports each flip on stderr and, under ``ft run``, as an event."""

    def __init__(self, step: Callable[[], int], session: "Session | None"):
        self._step, self._session = step, session
        self._reported: dict[int, int] = {}

    def tell(self, hit: Hit) -> None:
        count = self._reported[hit.fault] = self._reported.get(hit.fault, 0) + 1
        if count > _MOST_TOLD:
            return
        step = self._step()
        last = "" if count < _MOST_TOLD else "; further flips of this fault are not reported"
        text = f"injected fault {hit.fault}: step {step}, rank {dist.get_rank()}: {hit}{last}"
        print(text, file=sys.stderr, flush=True)
        if self._session is not None:
            self._session.observe(events.BIT_FLIPPED, **{**hit.values(), "step": step})
