"""Inject planned bit flips into results of operators and received tensors on the rank that they are planned for, to
test DMR.

Flips are planned by ``ft run --inject`` or by the trainer's flag ``--ft-dmr-inject``. ``ft.faults.flip`` describes
which flips can be planned: once, repeatedly, or a bit that is stuck at one value.
"""

import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ft import faults as inject
from ft.base import events
from ft.base.errors import UserError
from ft.faults import Fault, parse, schedule
from ft.faults.flip import BIT_FLIP, CHECKER, ONCE, STUCK, Flip
from ft.systems.dmr.runtime.cursor import ExecutionCursor, OperatorCall

if TYPE_CHECKING:
    from ft.worker.session import Session

_MOST_REPORTED = 20
"""Maximum number of flips of one fault that are reported; a stuck bit may corrupt thousands of results."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Hit:
    """One bit flip that has happened.

    Attributes:
        fault: number of the planned fault.
        execution: "primary" (the first one) or "checker" (the second one); None: a received tensor was hit.
        tensor: number of the hit tensor among the results of the operator.
        element: number of the hit element in row-major order.
        of: number of elements of the tensor.
        bit: number of the bit; 0 is the lowest one.
    """

    fault: int
    operator: str
    phase: str
    chunk: int
    microbatch: int
    layer: int
    execution: str | None
    tensor: int
    element: int
    of: int
    bit: int
    dtype: str

    def __str__(self) -> str:
        which = f"{self.execution} execution of {self.operator}" if self.execution else f"{self.operator} payload"
        where = f"layer {self.layer}" if self.layer else "outside the layers"
        cell = f"bit {self.bit} of element {self.element} of {self.of} ({self.dtype})"
        return f"{cell}, {which} in the {self.phase} of microbatch {self.microbatch}, {where}"


@dataclass
class _Armed:
    """An active fault.

    Attributes:
        draw: random generator of the fault.
        seen: number of results so far that the fault may hit.
        stuck: (relative position in the tensor, number of the bit, value) of a stuck bit; None until they are drawn.
        pair: (number of the last operator seen, whether its first execution was hit), for a stuck bit.
    """

    number: int
    flip: Flip
    draw: random.Random
    seen: int = 0
    stuck: tuple[float, int, int] | None = None
    pair: tuple[int, bool] = (-1, False)


class Falsifier:
    """The simulated faulty device of one rank.

    An active fault belongs to this process, because it belongs to the device: a fault that flips one bit once does not
    hit a repeated iteration again, and a worker that takes over this rank does not have the fault.

    Args:
        tell: called after each flip.
        faults: faults of this rank, each of which becomes active at the first operator of its step.
        step: returns the current step, from 1; needed with ``faults``.
    """

    def __init__(self, tell: Callable[[Hit], None], faults: Sequence[Fault] = (), step: Callable[[], int] = lambda: 0):
        self._tell, self._coming, self._step = tell, list(faults), step
        self._armed: list[_Armed] = []

    def arm(self, number: int, flip: Flip) -> None:
        """Activate a fault, so that it may hit results from now on. ``number``: number of the planned fault."""
        self._armed = [*self._armed, _Armed(number, flip, random.Random(f"{flip.seed}/{number}"))]

    def falsify(
        self, execution: str | None, operator: str, cursor: ExecutionCursor, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Corrupt tensors before they are compared: results of an operator in a first or second execution (PRIMARY,
        CHECKER), or, if ``execution`` is None, what was received by the kind of communication ``operator``."""
        if self._coming:
            step = self._step()
            due = [fault for fault in self._coming if fault.step <= step]
            self._coming = [fault for fault in self._coming if fault.step > step]
            for fault in due:
                self.arm(fault.number, fault.flip)
        for armed in self._armed:
            if armed.flip.fits(operator, cursor.unit.phase, execution):
                self._consider(armed, execution, cursor.at(operator, 0), tensors, cursor.executed)

    def deferred(self, at: OperatorCall, tensors: Sequence[torch.Tensor]) -> None:
        """Corrupt the results of a deferred second execution. Stuck bits are not applied here: for them, ``falsify``
        draws at the first execution whether it is hit, and assumes that the second execution follows at once."""
        for armed in self._armed:
            if armed.flip.mode != STUCK and armed.flip.fits(at.operator, at.phase, CHECKER):
                self._consider(armed, CHECKER, at, tensors)

    def _consider(
        self, armed: _Armed, execution: str | None, at: OperatorCall, tensors: Sequence[torch.Tensor], executed: int = 0
    ) -> None:
        targets = [(number, tensor) for number, tensor in enumerate(tensors) if _has_bits(tensor)]
        if not targets:
            return
        armed.seen += 1
        if armed.seen < armed.flip.nth:
            return
        if armed.flip.mode == STUCK:
            place = _force(armed, execution, executed, targets)
        elif armed.draw.random() < armed.flip.probability:
            place = _flip(armed, targets)
        else:
            return
        if place is None:
            return
        if armed.flip.mode == ONCE:
            self._armed = [other for other in self._armed if other is not armed]
        number, tensor, element, bit = place
        dtype = str(tensor.dtype).removeprefix("torch.")
        where = (armed.number, at.operator, at.phase, at.chunk, at.microbatch, at.layer, execution)
        self._tell(Hit(*where, number, element, tensor.numel(), bit, dtype))


def bits_of(dtype: torch.dtype) -> int:
    """Return the number of significant bits of an element."""
    return 1 if dtype is torch.bool else 8 * dtype.itemsize


def word_at(tensor: torch.Tensor, element: int) -> torch.Tensor:
    """Return a view of the memory of one element as an integer tensor [1]. ``element`` is the number of the element in
    row-major order."""
    offset = tensor.storage_offset()
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        element, index = divmod(element, size)
        offset += index * stride
    # ``data`` has a separate version counter: as with a real fault, autograd does not notice the change.
    return tensor.data.as_strided((1,), (1,), offset).view(_INTEGER[tensor.dtype.itemsize])


def flip_bit(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Invert one bit of an element."""
    word = word_at(tensor, element)
    word.bitwise_xor_(_mask(word.dtype, bit))


def force_bit(tensor: torch.Tensor, element: int, bit: int, value: int) -> bool:
    """Set a bit of an element to ``value``; return whether that changed it."""
    word = word_at(tensor, element)
    if bool((word & _mask(word.dtype, bit)).item()) == bool(value):
        return False
    flip_bit(tensor, element, bit)
    return True


def _mask(dtype: torch.dtype, bit: int) -> int:
    mask = 1 << bit
    return mask - (1 << 8 * dtype.itemsize) if dtype.is_signed and bit == 8 * dtype.itemsize - 1 else mask


def _has_bits(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.layout is torch.strided and tensor.dtype.itemsize in _INTEGER


def _flip(armed: _Armed, targets: list[tuple[int, torch.Tensor]]) -> tuple[int, torch.Tensor, int, int]:
    number, tensor = armed.draw.choice(targets)
    element, most = armed.draw.randrange(tensor.numel()), bits_of(tensor.dtype)
    bit = armed.draw.randrange(most) if armed.flip.bit is None else min(armed.flip.bit, most - 1)
    flip_bit(tensor, element, bit)
    return number, tensor, element, bit


def _force(
    armed: _Armed, execution: str | None, executed: int, targets: list[tuple[int, torch.Tensor]]
) -> tuple[int, torch.Tensor, int, int] | None:
    """Apply a stuck bit and return (number of the tensor, tensor, element, bit). Return None if nothing changed: the
    other execution of the operator is the one that the fault hits, or the bit already has the value."""
    number, tensor = targets[0]
    if armed.stuck is None:
        bit = armed.draw.randrange(bits_of(tensor.dtype)) if armed.flip.bit is None else armed.flip.bit
        armed.stuck = armed.draw.random(), bit, armed.draw.randrange(2)
    is_second = execution is not None and armed.pair[0] == executed
    meets = not armed.pair[1] if is_second else execution is None or armed.draw.random() < 0.5
    armed.pair = (-1, False) if is_second else (executed, meets)
    if not meets:
        return None
    share, bit, value = armed.stuck
    element, bit = int(share * tensor.numel()), min(bit, bits_of(tensor.dtype) - 1)
    return (number, tensor, element, bit) if force_bit(tensor, element, bit, value) else None


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
        session: the worker's session with ``ft run``, which activates the faults that ``environment`` plans; None
            without.

    Raises:
        UserError: a specification is not a bit flip at a step of a rank.
    """
    planned = planned_flips(texts, dist.get_world_size(), seed)
    awaits_more = any(fault.kind == BIT_FLIP for fault in inject.planned(environment)) if session else False
    if not planned and not awaits_more:
        return None
    reporter = FlipReporter(step, session)
    falsifier = Falsifier(reporter.tell, [fault for fault in planned if fault.rank == dist.get_rank()], step)
    if session is not None:
        session.faulty_device = falsifier.arm
    return falsifier


def planned_flips(texts: Sequence[str], world_size: int, seed: int) -> list[Fault]:
    """Return the faults of all ranks that the trainer's flag requests.

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


class FlipReporter:
    """Reports each flip on stderr and, under ``ft run``, as an event."""

    def __init__(self, step: Callable[[], int], session: "Session | None"):
        self._step, self._session = step, session
        self._reported: dict[int, int] = {}

    def tell(self, hit: Hit) -> None:
        count = self._reported[hit.fault] = self._reported.get(hit.fault, 0) + 1
        if count > _MOST_REPORTED:
            return
        step = self._step()
        last = "" if count < _MOST_REPORTED else "; further flips of this fault are not reported"
        text = f"injected fault {hit.fault}: step {step}, rank {dist.get_rank()}: {hit}{last}"
        print(text, file=sys.stderr, flush=True)
        if self._session is not None:
            self._session.observe(events.BIT_FLIPPED, **{**asdict(hit), "step": step})
