"""The ``dist.Work`` objects that operations of a ``Group`` return; their ``wait`` can be aborted by a recovery.

``wait`` raises ``EpochClosed`` if a recovery has closed the epoch, and ``RecoverableError`` if the operation itself has
failed.

When a connection breaks, gloo leaves two kinds of threads blocked until its timeout: the sender of a message that is
partly queued, and the receiver of a message that has partly arrived. So no thread of the program blocks in gloo itself:

- a collective runs in one of gloo's threads; the caller waits for it in short slices of time;
- for a message, a helper thread waits in gloo, and the caller waits for the helper thread; a reduce-scatter is handled
  in the same way, because its work ignores the timeout of a wait.

An abandoned operation does not access its buffers any more, because its connections are closed.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ft.base.errors import EpochClosed
from ft.state.groups.device import DEVICE, STALLS
from ft.state.groups.state import EpochState

if TYPE_CHECKING:
    from ft.state.groups.group import Group

_SLICE = timedelta(milliseconds=20)
# Seconds after the end of the epoch in which an operation may still end by itself; nearly all end within 5 ms.
GRACE_S = 0.02
_POLL_S = 0.001


class GroupWork(dist.Work):
    """One operation of a group, from just before its start until its end.

    Attributes:
        group: the group.
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
        self.group = group
        self.inner: dist.Work | None = None
        self.on_host = True
        self.ended = False
        self.operation, self.began, self.trains, self.sequence = "", 0.0, False, 0

    def launch(
        self, inner: dist.ProcessGroup, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dist.Work | None:
        """Call the backends' ``method``, and return their work; None if the operation is on the current stream."""
        started: dist.Work | None = getattr(inner, method)(*args, **kwargs)
        return started

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has ended; with NCCL, make the current stream wait for it.

        Raises:
            EpochClosed: the epoch was closed before the operation ended.
            RecoverableError: the operation failed, and the control plane did not close the epoch because of it.
        """
        group, inner = self.group, self._started()
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
        return wait_for_collective(inner, timeout, self.group.state)

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

    def exception(self) -> Any:
        return None if self.inner is None else self.inner.exception()

    def synchronize(self) -> None:
        self._started().synchronize()

    def block_current_stream(self) -> None:
        self._started().block_current_stream()

    def result(self) -> list[torch.Tensor]:
        return self._started().result()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._started().get_future()

    def source_rank(self) -> int:
        return self._started()._source_rank()

    _source_rank = source_rank

    def _started(self) -> dist.Work:
        if self.inner is None:
            state = self.group.state
            raise EpochClosed(*(state.closed or (state.epoch - 1, "it was interrupted before this wait")))
        return self.inner


class Opaque(GroupWork):
    """An operation whose completion gloo reports only in ``wait``, and whose ``wait`` ignores the timeout.

    Such operations are messages (sends and receives), and reduce-scatters: gloo implements these as an all-reduce with
    a copy at the end of its wait.
    """

    def is_unfinished(self) -> bool:
        return not self.ended if self.on_host else super().is_unfinished()

    def keeps_training(self) -> bool:
        # How long training waits for an operation on the host is seen in ``EpochState.waiting``.
        return not self.on_host and super().keeps_training()

    def _wait_on_host(self, inner: dist.Work, timeout: timedelta | None) -> bool:
        return wait_for_message(inner, timeout, self.group.state)


class SentMessage(Opaque):
    """A send or a receive."""


def is_send(message: dist.P2POp) -> bool:
    return message.op.__name__ == "isend"  # a patch may have wrapped the function


class Batch(SentMessage):
    """Sends and receives that are launched together. It keeps their works, which the history references weakly."""

    def __init__(self, group: "Group"):
        super().__init__(group)
        self._messages: list[SentMessage] = []

    def launch(
        self, inner: dist.ProcessGroup, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dist.Work | None:
        """Launch the messages, ``args[0]``, as one.

        torch opens a group of NCCL for the calling thread. It is closed also if a message fails, because everything
        that the thread launches later would otherwise wait for its end.
        """
        (messages,) = args
        device = messages[0].tensor.device
        with self.group.launches_together():
            inner._start_coalescing(device)
            try:
                for one in messages:
                    kind = "send" if is_send(one) else "recv"
                    self._messages.append(self.group.add_message(self, kind, one.tensor, one.group_peer))
                    getattr(inner, kind)([one.tensor], one.group_peer, one.tag)
            finally:
                started = inner._end_coalescing(device)
        for message in self._messages:
            message.inner = started
        return started


class MessageFromAnyone(SentMessage):
    """A receive whose source is known only after it has ended."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        first = not self.ended
        done = super().wait(timeout)
        if first:
            self.group.received_from(self.source_rank())
        return done


class LeftBehind(RuntimeError):
    """The epoch was closed, and the work did not end."""


def wait_for_collective(work: dist.Work, timeout: timedelta | None, state: EpochState) -> bool:
    """Wait for a gloo collective, as ``work.wait(timeout)`` does: without a limit if ``timeout`` is zero or None.

    torch's own callers in C++, such as functional collectives, pass zero (``kNoTimeout``).

    Raises:
        LeftBehind: the epoch was closed, and the work has not ended.
        RuntimeError: the work failed or timed out.
    """
    deadline = time.monotonic() + timeout.total_seconds() if timeout else None
    while True:
        try:
            return work.wait(_SLICE)
        except RuntimeError:
            if work.is_completed():
                return work.wait()  # the work has failed, or has ended just after the slice
            if deadline is not None and time.monotonic() > deadline:
                raise
        if state.closed is not None and not ends_soon(work.is_completed):
            raise LeftBehind


def ends_soon(is_over: Callable[[], bool]) -> bool:
    """Return whether ``is_over`` becomes true within ``GRACE_S`` seconds."""
    deadline = time.monotonic() + GRACE_S
    while not is_over():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


_Outcome = list[bool | Exception]
"""[the result of a wait, or its exception]; [] if it has not ended."""


class _Waiter:
    """A helper thread that waits for one work after another.

    The work and the result are handed over with two plain locks, which are fast: every message passes through here.
    """

    def __init__(self) -> None:
        self._task: tuple[dist.Work, timedelta | None, _Outcome] | None = None
        self._asked, self._answered = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._answered.acquire()
        threading.Thread(target=self._run, name="ft-wait", daemon=True).start()

    def wait(self, work: dist.Work, timeout: timedelta | None, state: EpochState) -> _Outcome:
        """Wait for ``work``. Return [] if the epoch was closed first."""
        outcome: _Outcome = []
        self._task = (work, timeout, outcome)
        # The order matters: register, then read the flag. ``close`` sets the flag and then calls what is registered.
        state.wake.add(self._wake)
        self._asked.release()
        if state.closed is None:
            self._answered.acquire()
        state.wake.discard(self._wake)
        return outcome

    def retire(self) -> None:
        """Make the thread end as soon as its present wait has ended."""
        self._asked.release()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # both the result and the end of the epoch may release the lock
            self._answered.release()

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            if self._task is None:
                return
            work, timeout, outcome = self._task
            self._task = None
            try:
                outcome.append(work.wait() if timeout is None else work.wait(timeout))
            except Exception as error:
                outcome.append(error)
            del work, outcome  # the work holds its connection, and an exception in the outcome this frame
            self._wake()


_idle: list[_Waiter] = []


def wait_for_message(work: dist.Work, timeout: timedelta | None, state: EpochState) -> bool:
    """Wait for a gloo work whose wait cannot be divided into slices, as ``work.wait(timeout)`` does.

    Raises:
        LeftBehind: the epoch was closed, and the work has not ended.
        RuntimeError: the work failed or timed out.
    """
    try:
        waiter = _idle.pop()
    except IndexError:
        waiter = _Waiter()
    outcome = waiter.wait(work, timeout, state)
    if state.closed is None:
        _idle.append(waiter)
    else:
        answered = outcome or ends_soon(lambda: bool(outcome))
        waiter.retire()  # not reused: its result and the end of the epoch may have released its lock twice
        if not answered:
            raise LeftBehind
    result = outcome.pop()
    if isinstance(result, Exception):
        try:
            raise result
        finally:
            del result  # the exception holds this frame, and frames below it the work with its connection
    return result
