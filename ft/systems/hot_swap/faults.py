"""Planned faults, connected to the parts of a worker that they break."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ft.base import events
from ft.base.errors import FallbackError
from ft.faults.faults import Fault
from ft.faults.flip import BIT_FLIP
from ft.faults.messages import Frames, Reports
from ft.faults.phases import middle_module, plant
from ft.faults.worker import Actions, Injector
from ft.state.snapshot import Snapshots
from ft.systems.hot_swap.position import Position
from ft.systems.hot_swap.session import Session
from ft.systems.hot_swap.subject import Subject
from megatron.core import parallel_state

_TOP_MANTISSA_BIT = {torch.float32: (torch.int32, 1 << 22), torch.bfloat16: (torch.int16, 1 << 6)}
_TOP_MANTISSA_BIT[torch.float16] = (torch.int16, 1 << 9)


class Breakage:
    """What an injected fault does to this worker's state, snapshots and messages (``ft.faults.worker.Actions``).

    Args:
        newest_checkpoint: the folder of the newest complete checkpoint of this run; None where there is none.
    """

    def __init__(
        self,
        session: Session,
        snapshots: Snapshots,
        subject: Subject,
        position: Position,
        newest_checkpoint: Callable[[], Path | None],
    ):
        self.session = session
        self._snapshots, self._subject, self._position = snapshots, subject, position
        self._newest_checkpoint = newest_checkpoint
        self._choice = random.Random(session.rank)

    def act(self, fault: Fault) -> None:
        """Where there is nothing to break it says so in the worker's log, and nothing happens."""
        try:
            _ACTS[fault.kind](self, fault)
        except FallbackError as missing:
            print(f"injected fault {fault.number} ({fault}) found nothing: {missing}", flush=True)

    def _drop(self, fault: Fault) -> None:
        self.session.groups.break_connection(self._choice)

    def _corrupt_snapshot(self, fault: Fault) -> None:
        copies = self._snapshots.holdings().copies
        for owner in [None] if fault.copies == "own" else [int(owner) for owner in copies]:
            self._snapshots.corrupt(owner, byte=self._choice.randrange(1 << 20))

    def _forget_copies(self, fault: Fault) -> None:
        self._snapshots.forget_newest_copies()

    def _go_stale(self, fault: Fault) -> None:
        self._snapshots.relapse(self._subject.state(self._position.get()))

    def _corrupt_tensor(self, fault: Fault) -> None:
        corrupt_tensor(self._subject, fault)

    def _leave_step(self, fault: Fault) -> None:
        """Nobody else takes part in this one: it meets the others' next operation, and the last one here meets none."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(torch.zeros(1), group=group, async_op=True)

    def _break_the_device(self, fault: Fault) -> None:
        if self.session.faulty_device is None:
            raise FallbackError("bits are flipped by DMR (--ft-dmr, --ft-dmr-plan), which is off")
        self.session.faulty_device(fault.number, fault.flip)

    def _disturb_frames(self, fault: Fault) -> None:
        self.session.server.disturb(Frames(fault.kind, fault.seconds))

    def _disturb_reports(self, fault: Fault) -> None:
        self.session.link.disturb = Reports(fault.kind, fault.seconds)

    def _damage_checkpoint(self, fault: Fault) -> None:
        from ft.faults.checkpoints import damage

        newest = self._newest_checkpoint()
        file = None if newest is None else damage(newest, fault.kind)
        print(f"injected fault {fault.number} ({fault}): {file or 'there is no checkpoint'}", flush=True)


@torch.no_grad()
def corrupt_tensor(subject: Subject, fault: Fault) -> None:
    """Changes one element in the middle of the largest weight of the model's middle."""
    module = middle_module(subject.chunks[0])
    weight = max(module.parameters(), key=torch.numel).data.view(-1)
    place = weight[weight.numel() // 2 : weight.numel() // 2 + 1]
    if fault.value == "nan":
        place.fill_(float("nan"))
    else:
        kind, bit = _TOP_MANTISSA_BIT[weight.dtype]
        place.view(kind).bitwise_xor_(bit)


_FRAMES = ("lose-frame", "duplicate-frame", "reorder-frames", "delay-frames", "corrupt-frame")
_REPORTS = ("lose-reports", "duplicate-reports", "reorder-reports", "delay-reports")
_CHECKPOINTS = ("corrupt-checkpoint", "truncate-checkpoint", "remove-checkpoint")
_ACTS = {
    "drop": Breakage._drop,
    "corrupt-snapshot": Breakage._corrupt_snapshot,
    "stale-snapshot": Breakage._forget_copies,
    "stale-state": Breakage._go_stale,
    "corrupt-tensor": Breakage._corrupt_tensor,
    "out-of-step": Breakage._leave_step,
    BIT_FLIP: Breakage._break_the_device,
    **dict.fromkeys(_FRAMES, Breakage._disturb_frames),
    **dict.fromkeys(_REPORTS, Breakage._disturb_reports),
    **dict.fromkeys(_CHECKPOINTS, Breakage._damage_checkpoint),
}


def make_injector(session: Session, actions: Actions) -> Injector:
    """The faults that are planned for this worker's logical rank and have not happened."""

    def announce(fault: Fault) -> None:
        where = fault.phase if fault.step is not None else "time"
        session.observe(events.FAULT_INJECTED, number=fault.number, kind=fault.kind, where=where, fault=str(fault))

    return Injector.from_environment(session.rank, session.node, session.fired, announce, actions)


def plant_phases(injector: Injector, subject: Subject, step: Callable[[], int]) -> None:
    """Puts the points inside forward, backward and gradient reduction in place, where a fault is planned there."""
    plant(injector, subject.chunks, step)
    if not injector.has("reduce"):
        return
    config = subject.chunks[0].config
    finalize = config.finalize_model_grads_func

    def finalize_with_faults(*args, **kwargs):
        injector.at("reduce", step())
        return finalize(*args, **kwargs)

    config.finalize_model_grads_func = finalize_with_faults
