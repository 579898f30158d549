"""Fault injection into a worker of an FT-HSDP replica: faults that act on its ring, its tensors or its device.

Faults that act on any process, such as a kill, are injected elsewhere (:mod:`ft.faults`).
"""

from ft.faults.faults import Fault
from ft.faults.flip import BIT_FLIP
from ft.protection.injection import corrupt_tensor
from ft.protection.training_state import TrainingState
from ft.systems.hsdp.ring import Ring
from ft.worker.session import Session


class ReplicaBreakage:
    """Implementation of ``ft.faults.worker.Actions`` for a worker that keeps no snapshots."""

    def __init__(self, subject: TrainingState, ring: Ring, session: Session):
        self._subject, self._ring, self._session = subject, ring, session

    def act(self, fault: Fault) -> None:
        """Inject a fault. If a kind of fault has no target in this worker, only write a message to the worker's log."""
        if fault.kind == "drop":
            self._ring.cancel(f"injected: {fault}")
        elif fault.kind == "corrupt-tensor":
            corrupt_tensor(self._subject, fault)
        elif fault.kind == BIT_FLIP and self._session.faulty_device is not None:
            self._session.faulty_device(fault.number, fault.flip)
        else:
            print(f"injected fault {fault.number} ({fault}): a replica has nothing that it could break", flush=True)
