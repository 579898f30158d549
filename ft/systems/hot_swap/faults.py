"""Injected faults in a worker that hot-swap protects: they damage its state, its snapshots or its messages."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ft.base.errors import FallbackError
from ft.faults.faults import Fault
from ft.faults.flip import BIT_FLIP
from ft.faults.worker import Frames, Reports
from ft.protection.injection import corrupt_tensor
from ft.protection.position import Position
from ft.protection.training_state import TrainingState
from ft.state.snapshot import Snapshots
from ft.worker.session import Session
from megatron.core import parallel_state


class Breakage:
    """Executes injected faults on this worker's state, snapshots and messages (``ft.faults.worker.Actions``)."""

    def __init__(
        self,
        session: Session,
        snapshots: Snapshots,
        subject: TrainingState,
        position: Position,
        newest_checkpoint: Callable[[], Path | None],
    ):
        self.session = session
        self._snapshots, self._subject, self._position = snapshots, subject, position
        self._newest_checkpoint = newest_checkpoint
        self._choice = random.Random(session.rank)

    def act(self, fault: Fault) -> None:
        """Execute ``fault``. If there is nothing to damage, only write a message to the worker's log."""
        try:
            _ACTS[fault.kind](self, fault)
        except FallbackError as missing:
            print(f"injected fault {fault.number} ({fault}) found nothing: {missing}", flush=True)

    def _drop(self, fault: Fault) -> None:
        self.session.groups.break_connection(self._choice)

    def _corrupt_snapshot(self, fault: Fault) -> None:
        copies = self._snapshots.holdings().copies
        for owner in [None] if fault.copies == "own" else list(copies):
            self._snapshots.corrupt(owner, byte=self._choice.randrange(1 << 20))

    def _forget_copies(self, fault: Fault) -> None:
        self._snapshots.forget_newest_copies()

    def _go_stale(self, fault: Fault) -> None:
        self._snapshots.relapse(self._subject.state(self._position.get()))

    def _corrupt_tensor(self, fault: Fault) -> None:
        corrupt_tensor(self._subject, fault)

    def _leave_step(self, fault: Fault) -> None:
        """Start a collective that no other rank starts. It is matched with the next collective of the other ranks, so
        that the last collective hangs.
        """
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
        from ft.faults.worker import damage_checkpoint

        newest = self._newest_checkpoint()
        file = None if newest is None else damage_checkpoint(newest, fault.kind)
        print(f"injected fault {fault.number} ({fault}): {file or 'there is no checkpoint'}", flush=True)


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
