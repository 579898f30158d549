"""The ``dist.Work`` objects that operations of a ``Group`` return; their ``wait`` can be aborted by a recovery.

``wait`` raises ``EpochClosed`` if a recovery has closed the epoch (a version of the assignment of workers to ranks),
and ``RecoverableError`` if the operation itself has failed.
"""

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ft.base.errors import EpochClosed
from ft.state.groups.device import DEVICE
from ft.state.groups.stalls import STALLS
from ft.state.groups.waiter import wait_for_collective, wait_for_message

if TYPE_CHECKING:
    from ft.state.groups.group import Group


class GroupWork(dist.Work):
    """One operation of a group, from just before its start until its end.

    Attributes:
        inner: the backend's work; None before the operation is started and after the connection was dropped.
        on_host: whether the operation's tensors are in host memory, so that gloo carries it out.
        ended: whether a wait for the operation has succeeded.
        operation: name of the operation.
        sequence: its number in its channel, unless it belongs to training: then the history knows it.
        began: time at which it was started, in monotonic time.
        trains: whether it belongs to training (``EpochState.thread``).
    """

    def __init__(self, group: "Group"):
        super().__init__()
        self._group = group
        self.inner: dist.Work | None = None
        self.on_host = True
        self.ended = False
        self.operation, self.began, self.trains, self.sequence = "", 0.0, False, 0

    @property
    def group(self) -> "Group":
        return self._group

    def launch(self, inner: dist.ProcessGroup, method: str, args: tuple, kwargs: dict) -> dist.Work | None:
        """Call the backends' ``method``, and return their work; None if the operation is on the current stream."""
        return getattr(inner, method)(*args, **kwargs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has ended; with NCCL, make the current stream wait for it.

        Raises:
            EpochClosed: the epoch was closed before the operation ended.
            RecoverableError: the operation failed, and the control plane did not close the epoch because of it.
        """
        group, inner = self._group, self._started()
        state = group.state
        state.begins_to_wait(group.group_name, self)
        try:
            if self.on_host:
                done = self._wait_on_host(inner, timeout)
            else:
                before = STALLS.begins(state.thread.trains)
                done = inner.wait() if timeout is None else inner.wait(timeout)
                STALLS.ends(group.group_name, before)
                if state.closed is not None:  # the operation may have ended by its abort
                    raise EpochClosed(*state.closed)
        except Exception as error:
            state.has_waited()
            raise group.failure(error) from error
        state.has_waited()
        self.ended = True
        group.ended(self)
        return done

    def _wait_on_host(self, inner: dist.Work, timeout: timedelta | None) -> bool:
        return wait_for_collective(inner, timeout, self._group.state)

    def is_unfinished(self) -> bool:
        """Return whether the operation may still read or write its buffers, or has failed."""
        inner = self.inner
        if not self.on_host:  # a wait has shown nothing
            return inner is None or not DEVICE.has_seen_the_end_of(inner)
        if self.ended:
            return False
        if inner is None or not inner.is_completed():
            return True
        try:
            inner.wait()  # returns at once, and raises if the operation failed
        except RuntimeError:
            return True
        return False

    def keeps_training(self) -> bool:
        """Return whether the operation belongs to training and has not ended yet. Safe from any thread.

        An operation on a device counts from whichever thread it was started, because it occupies the device.
        """
        inner = self.inner
        if self.on_host:
            return self.trains and not self.ended and (inner is None or not inner.is_completed())
        return inner is None or not DEVICE.has_seen_the_end_of(inner)

    def is_completed(self) -> bool:
        if not self.on_host:
            return self.inner is not None and DEVICE.asks(self.inner.is_completed)
        return self.ended or (self.inner is not None and self.inner.is_completed())

    def is_success(self) -> bool:
        if not self.on_host:  # WorkNCCL::isSuccess raises NotImplementedError
            return not self.is_unfinished()
        return self.ended or (self.inner is not None and self.inner.is_success())

    def exception(self):
        return None if self.inner is None else self.inner.exception()

    def synchronize(self) -> None:
        self._started().synchronize()

    def block_current_stream(self) -> None:
        self._started().block_current_stream()

    def result(self) -> list[torch.Tensor]:
        return self._started().result()

    def get_future(self) -> torch.futures.Future:
        return self._started().get_future()

    def source_rank(self) -> int:
        return self._started()._source_rank()

    _source_rank = source_rank

    def _started(self) -> dist.Work:
        if self.inner is None:
            state = self._group.state
            raise EpochClosed(*(state.closed or (state.epoch - 1, "it was interrupted before this wait")))
        return self.inner


class Opaque(GroupWork):
    """An operation whose completion gloo reports only in ``wait``, and whose ``wait`` ignores the timeout.

    Such operations are messages (sends and receives), and reductions that gloo composes of other operations
    (``Composed``).
    """

    def is_unfinished(self) -> bool:
        return not self.ended if self.on_host else super().is_unfinished()

    def keeps_training(self) -> bool:
        # How long training waits for an operation on the host is seen in ``EpochState.waiting``.
        return not self.on_host and super().keeps_training()

    def _wait_on_host(self, inner: dist.Work, timeout: timedelta | None) -> bool:
        return wait_for_message(inner, timeout, self._group.state)


class Message(Opaque):
    """A send or a receive."""


class Batch(Message):
    """Sends and receives that are launched together. It keeps their works, which the history references weakly."""

    def __init__(self, group: "Group"):
        super().__init__(group)
        self._messages: list[Message] = []

    def launch(self, inner: dist.ProcessGroup, method: str, args: tuple, kwargs: dict) -> dist.Work | None:
        """Launch the messages, ``args[0]``, as one.

        torch opens a group of NCCL for the calling thread. It is closed also if a message fails, because everything
        that the thread launches later would otherwise wait for its end.
        """
        (messages,) = args
        device = messages[0].tensor.device
        inner._start_coalescing(device)
        try:
            for one in messages:
                kind = "send" if one.op.__name__ == "isend" else "recv"
                self._messages.append(self._group.add_message(self, kind, one.tensor, one.group_peer))
                getattr(inner, kind)([one.tensor], one.group_peer, one.tag)
        finally:
            started = inner._end_coalescing(device)
        for message in self._messages:
            message.inner = started
        return started


class Composed(Opaque):
    """A reduce-scatter: gloo implements it as an all-reduce with a copy at the end of its wait."""


class MessageFromAnyone(Message):
    """A receive whose source is known only after it has ended."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        first = not self.ended
        done = super().wait(timeout)
        if first:
            self._group.received_from(self.source_rank())
        return done
