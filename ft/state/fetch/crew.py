"""A thread per source, and one that sees to it that none is waited for in vain."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ft.state.fetch.errors import BadState, Refused
from ft.state.fetch.source import Bad, Gone, Lost, Source

_LOOK_S = 0.05
_NOT_NEEDED = "not needed any more"


@dataclass(frozen=True)
class Limits:
    """``stall_s``: longest time in which a source may take for a connection, an answer, or a block of 1 MiB."""

    stall_s: float = 5.0


class Crew:
    """Runs the same work on every source.

    Args:
        until: time.monotonic() at which it ends, done or not. cancel: ends it when set. has_begun: is set by
            :meth:`begins_at`.

    Attributes:
        addresses: of the sources, each once. changed: notified when a source has ended, and when all is over.
        is_over: nobody may begin anything any more.
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
        self._sources = [Source(address, token, patience) for address in self.addresses]
        self._ended: dict[str, Exception | None] = {}
        self._at: set[str] = set()
        self._has_begun = has_begun

    def begins_at(self, address: str) -> None:
        """That source has answered, and lets nothing change under the fetch; or there is nothing to be had from it."""
        with self.changed:
            self._at.add(address)
            if self._has_begun is not None and len(self._at) == len(self._sources):
                self._has_begun.set()

    def run(self, work: Callable[[Source], None], is_done: Callable[[], bool], what: str) -> dict[str, str]:
        """Returns when ``is_done``, with the reasons why sources were left; no thread is at ``work`` any more then.

        Raises:
            Refused, BadState: it cannot be done; ``what`` says what.
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
        """Waits for the end; cuts sources off that make no progress. Returns why it was ended early, or nothing."""
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
        """Waits for who could write into the state. Who has no connection yet cannot, and gets none any more."""
        for source, thread in zip(self._sources, threads, strict=True):
            if source.is_connected():
                thread.join()


def stalled_s(now: float, since: float | None, limit_s: float) -> float:
    """For how long a source has been stalled: 0 within the limit, and while nothing is expected of it."""
    return 0.0 if since is None or now - since <= limit_s else now - since


def failure(what: str, ended: Mapping[str, Exception | None], stopped: str) -> Exception:
    """What a fetch that has not succeeded raises: BadState where every source has something else than was asked for."""
    reasons = [f"{address} {error}" for address, error in ended.items() if error is not None]
    text = f"cannot fetch {what}: " + "; ".join([*([stopped] if stopped else []), *reasons] or ["there is no source"])
    unexpected = next((e for e in ended.values() if e is not None and not isinstance(e, (Gone, Lost, Bad))), None)
    if unexpected is not None:
        raise unexpected
    bad = [error for error in ended.values() if isinstance(error, Bad)]
    if bad and len(bad) == len(ended) and not stopped:
        return BadState(text)
    return Refused(text)
