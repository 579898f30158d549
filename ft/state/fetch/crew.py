"""Runs a state fetch in parallel: one thread for each source, while the calling thread disconnects stalled sources.

A source is a rank of a healthy replica (a full copy of the model) from which the same rank of a replica that is behind
fetches its training state (FT-HSDP, section 4.3).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ft.net.streams import TcpNetwork
from ft.state.fetch.errors import BadState, Refused
from ft.state.transfer.pull import Bad, Gone, Lost, Source

_LOOK_S = 0.05
_NOT_NEEDED = "not needed any more"


@dataclass(frozen=True)
class Limits:
    """Limits for single operations of a fetch.

    Attributes:
        stall_s: maximum seconds that a source may take for a connection, an answer, or a block of 1 MiB.
    """

    stall_s: float = 5.0


class Crew:
    """Runs the same work on every source, in one thread for each.

    Args:
        sources: addresses; duplicates are dropped.
        token: token of the run.
        limits: limits for single operations.
        until: time.monotonic() at which the work is ended if it is not done.
        cancel: event that ends the work when it is set.
        has_begun: event that is set when :meth:`begins_at` was called for every source.

    Attributes:
        addresses: addresses of the sources, each once.
        changed: condition that is notified when the work on a source has ended, and when all work is over.
        is_over: whether all work is over, so that no thread may begin a new operation.
    """

    def __init__(
        self,
        sources: Sequence[str],
        token: str,
        limits: Limits,
        until: float,
        cancel: threading.Event | None,
        has_begun: threading.Event | None = None,
    ):
        self.addresses = list(dict.fromkeys(sources))
        self.changed = threading.Condition(threading.RLock())
        self.is_over = False
        self._until, self._stall_s, self._cancel = until, limits.stall_s, cancel
        patience = min(limits.stall_s, max(0.001, until - time.monotonic()))
        self._sources = [Source(TcpNetwork(""), address, token, patience) for address in self.addresses]
        self._ended: dict[str, Exception | None] = {}
        self._at: set[str] = set()
        self._has_begun = has_begun

    def begins_at(self, address: str) -> None:
        """Record that the source at ``address`` has registered this fetch and keeps its state for it, or has failed."""
        with self.changed:
            self._at.add(address)
            if self._has_begun is not None and len(self._at) == len(self._sources):
                self._has_begun.set()

    def run(self, work: Callable[[Source], None], is_done: Callable[[], bool], what: str) -> dict[str, str]:
        """Run ``work(source)`` for every source until ``is_done()``.

        When this returns, no thread can write into the destination any more.

        Args:
            work: function called in one thread for each source.
            is_done: returns whether the fetch is complete.
            what: description of the fetched data, for error messages.

        Returns:
            address of a source that was abandoned -> the reason.

        Raises:
            Refused: the work cannot be done now.
            BadState: every source holds another state than the requested one, or sends damaged bytes.
        """
        threads = [
            threading.Thread(target=self._run, args=(source, work), name="ft-fetch", daemon=True)
            for source in self._sources
        ]
        for thread in threads:
            thread.start()
        try:
            stopped = self._watch(is_done)
        finally:
            with self.changed:
                self.is_over = True
                self.changed.notify_all()
            for source in self._sources:
                source.cut(_NOT_NEEDED)
            self._join(threads)
        left = {address: str(error) for address, error in self._ended.items() if error is not None}
        if not is_done():
            raise failure(what, self._ended, stopped)
        return {address: reason for address, reason in left.items() if reason != _NOT_NEEDED}

    def _run(self, source: Source, work: Callable[[Source], None]) -> None:
        error: Exception | None = None
        try:
            source.open()
            work(source)
        except Exception as problem:
            error = problem
        finally:
            source.close()
            self.begins_at(source.address)
            with self.changed:
                self._ended[source.address] = error
                self.changed.notify_all()

    def _watch(self, is_done: Callable[[], bool]) -> str:
        """Wait until the fetch is done or all sources have ended, and disconnect sources that make no progress.

        Return the reason if the fetch was cancelled or timed out, otherwise "".
        """
        while True:
            with self.changed:
                self.changed.wait_for(lambda: is_done() or self._all_ended(), timeout=_LOOK_S)
                if is_done() or self._all_ended():
                    return ""
            now = time.monotonic()
            if self._cancel is not None and self._cancel.is_set():
                return "cancelled"
            if now > self._until:
                return "the time is up"
            for source in self._sources:
                stalled = stalled_s(now, source.since, self._stall_s)
                if stalled:
                    source.cut(f"has sent nothing for {stalled:.1f} s")

    def _all_ended(self) -> bool:
        return len(self._ended) == len(self._sources)

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the threads that could still write into the destination tensors.

        The thread of a source without a connection cannot write: no connection is made after the end of the work.
        """
        for source, thread in zip(self._sources, threads, strict=True):
            if source.is_connected():
                thread.join()


def stalled_s(now: float, since: float | None, limit_s: float) -> float:
    """Return the seconds without progress of a source if they exceed the limit, otherwise 0.

    Args:
        now: monotonic time in seconds.
        since: time of the last progress, None while no progress is expected.
        limit_s: longest time without progress.
    """
    return 0.0 if since is None or now - since <= limit_s else now - since


def failure(what: str, ended: Mapping[str, Exception | None], stopped: str) -> Exception:
    """Return the exception of a fetch that has failed: BadState if every source failed with ``Bad``, else Refused.

    Args:
        what: description of the fetched data.
        ended: address of a source -> the exception that ended the work on it, or None.
        stopped: reason why the fetch was ended early, or "".
    """
    reasons = [f"{address} {error}" for address, error in ended.items() if error is not None]
    text = f"cannot fetch {what}: " + "; ".join([*([stopped] if stopped else []), *reasons] or ["there is no source"])
    unexpected = next((e for e in ended.values() if e is not None and not isinstance(e, (Gone, Lost, Bad))), None)
    if unexpected is not None:
        raise unexpected
    bad = [error for error in ended.values() if isinstance(error, Bad)]
    if bad and len(bad) == len(ended) and not stopped:
        return BadState(text)
    return Refused(text)
