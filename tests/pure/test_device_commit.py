"""What an aborted operation leaves on a device must not become a committed step, a snapshot or a repaired state."""

import threading
import weakref

import pytest
from worker_conversations import Member

from ft.base.errors import EpochClosed
from ft.job.messages import Close, Repair
from ft.job.parts import GroupReport, Source
from ft.systems.hot_swap.recovery import WorkerRecovery
from ft.worker import protocol
from ft.worker.session import Session

RIGHT, WRONG = "the sum over all ranks", "what was in the buffer"


class Device:
    """A device on which a reduction runs, while the host has gone on.

    After an abort the reduction's kernel ends, the work that follows it runs on what the buffer holds, and no call
    fails: NCCL's abort flag makes the kernel leave its loop (``checkAbort`` in NCCL's src/device/prims_simple.h), and
    torch's wait has returned before (``WorkNCCL::synchronizeStream``, ProcessGroupNCCL.cpp).
    """

    def __init__(self):
        self.runs, self.value = True, WRONG

    def finish(self) -> None:
        self.value = RIGHT if self.runs else self.value
        self.runs = False

    def abort(self) -> None:
        self.runs = False


class Operations:
    """A worker's operations. ``meanwhile``: called while the host waits for the device."""

    shards = ()

    def __init__(self, member: Member, meanwhile=lambda device: None):
        self.device, self.step, self.snapshots, self.counted = Device(), 7, [], []
        self._member, self._meanwhile = member, meanwhile

    async def wait_for_device(self):
        self._meanwhile(self.device)
        self.device.finish()

    def has_committed(self, step):
        self.counted.append(step)

    def take_snapshot(self, step):
        self.snapshots.append((step, self.device.value))

    async def rebuild_groups(self, order):
        return 0.0

    async def restore_snapshot(self, step, source, keep):
        return {}, {"owned": "own", "replicated": "own"}

    async def publish_parameters(self, live=()):
        self.device.runs = True

    def group_reports(self):
        return [GroupReport("world", [0, 1], True, False, 3)]

    def group_topology(self):
        return ""

    def inject(self, phase):
        pass

    prepare_restore = continue_from = lambda self, *args: None


def closes(member):
    """The epoch is closed: it is marked as closed, and then everything that is unfinished is aborted."""

    def meanwhile(device):
        member.note_close(Close(member.epoch, "a worker died"))
        device.abort()

    return meanwhile


def test_a_step_that_the_device_has_finished_is_committed():
    member = Member()
    operations = Operations(member)
    protocol.run(WorkerRecovery(member, operations).committed())
    assert (operations.snapshots, operations.counted, member.progress.step) == ([(7, RIGHT)], [7], 7)


def test_a_step_whose_operations_were_aborted_is_not_committed():
    member = Member()
    operations = Operations(member, closes(member))
    with pytest.raises(EpochClosed):
        protocol.run(WorkerRecovery(member, operations).committed())
    assert (operations.snapshots, operations.counted, member.progress.step) == ([], [], 0)


def test_a_state_whose_restore_was_aborted_is_not_reported_as_repaired():
    member = Member()
    member.rank = 0
    order = Repair(1, 6, [], [], {0: Source(0, 0)})
    with pytest.raises(EpochClosed):
        protocol.run(WorkerRecovery(member, Operations(member, closes(member)))._repair(order))
    other = Member()
    other.rank = 0
    assert protocol.run(WorkerRecovery(other, Operations(other))._repair(order)).epoch == 1


def test_nothing_may_leave_a_worker_any_more_when_its_operations_are_aborted():
    """The ring and the snapshots would send on what an aborted operation has left in a buffer."""
    session, seen = Session.__new__(Session), []
    protocol.Member.__init__(session, "n0.w0", "n0")
    session.epoch, session._lock, session._left = 1, threading.Lock(), threading.Event()
    session._when_closed = [lambda epoch, reason: seen.append("senders are stopped")]
    session.groups = type("Groups", (), {"close": lambda self, epoch, reason: seen.append("aborted")})()
    session._on_close(Close(1, "a worker died"))
    assert seen == ["senders are stopped", "aborted"] and session.closed


def test_the_activations_of_an_interrupted_step_are_freed_before_the_recovery():
    class Activations:
        """What the frames of the interrupted step hold."""

    alive = []

    class Frames(WorkerRecovery):
        async def _begin(self):
            pass

        async def _fails(self, error):
            assert [one() is not None for one in alive] == [True]

        async def recover(self):
            raise SystemExit([one() is None for one in alive])

    class Training(Operations):
        def inject(self, phase):
            pass

        async def train(self):
            held = Activations()
            alive.append(weakref.ref(held))
            raise RuntimeError("a peer has died")

    member = Member()
    with pytest.raises(SystemExit) as end:
        protocol.run(Frames(member, Training(member)).run())
    assert end.value.code == [True]
