"""Client of a state fetch: receives a state from all sources in parallel, directly into the destination tensors.

One thread works with each source, while the calling thread disconnects stalled sources. The envelope of a state is
everything but the tensors, as JSON.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ft.base import bounded_json
from ft.base.errors import FallbackError, RecoverableError
from ft.net.framed import Mark
from ft.net.streams import TcpNetwork
from ft.state.fetch import shares
from ft.state.fetch.shares import Piece
from ft.state.layout import FlatState
from ft.state.transfer import Bad, Damaged, Gone, Lost, OpenSource


class FetchRefused(RecoverableError):
    """No source holds this state any more, or none could deliver it in time. The fetch has to be retried at the next
    step. The destination tensors hold a mixture of old and new bytes.
    """


class BadState(FallbackError):
    """No source has the requested state: the sources' tensors have other names, shapes or dtypes, belong to another
    rank, or arrive damaged. The destination tensors hold a mixture of old and new bytes.
    """


_POLL_S = 0.05
_NOT_NEEDED = "not needed any more"


STALL_S = 5.0
"""Maximum seconds that a source may take for a connection, an answer, or a block of 1 MiB."""


class Crew:
    """Runs the same work on every source, in one thread for each.

    Args:
        sources: addresses; duplicates are dropped.
        token: token of the run.
        stall_s: maximum seconds for one operation of a source (:data:`STALL_S`).
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
        stall_s: float,
        until: float,
        cancel: threading.Event | None,
        has_begun: threading.Event | None = None,
    ):
        self.addresses = list(dict.fromkeys(sources))
        self.changed = threading.Condition(threading.RLock())
        self.is_over = False
        self._until, self._stall_s, self._cancel = until, stall_s, cancel
        patience = min(stall_s, max(0.001, until - time.monotonic()))
        self._sources = [OpenSource(TcpNetwork(""), address, token, patience) for address in self.addresses]
        self._ended: dict[str, Exception | None] = {}
        self._at: set[str] = set()
        self._has_begun = has_begun

    def begins_at(self, address: str) -> None:
        """Record that the source at ``address`` has registered this fetch and keeps its state for it, or has failed."""
        with self.changed:
            self._at.add(address)
            if self._has_begun is not None and len(self._at) == len(self._sources):
                self._has_begun.set()

    def run(self, work: Callable[[OpenSource], None], is_done: Callable[[], bool], what: str) -> dict[str, str]:
        """Run ``work(source)`` for every source until ``is_done()``.

        When this returns, no thread can write into the destination any more.

        Args:
            work: function called in one thread for each source.
            is_done: returns whether the fetch is complete.
            what: description of the fetched data, for error messages.

        Returns:
            address of a source that was abandoned -> the reason.

        Raises:
            FetchRefused: the work cannot be done now.
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
            for source, thread in zip(self._sources, threads, strict=True):
                if source.is_connected():  # otherwise it cannot write: no connection is made after the end of the work
                    thread.join()
        left = {address: str(error) for address, error in self._ended.items() if error is not None}
        if not is_done():
            raise failure(what, self._ended, stopped)
        return {address: reason for address, reason in left.items() if reason != _NOT_NEEDED}

    def _run(self, source: OpenSource, work: Callable[[OpenSource], None]) -> None:
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
                if self.changed.wait_for(lambda: is_done() or len(self._ended) == len(self._sources), timeout=_POLL_S):
                    return ""
            now = time.monotonic()
            if self._cancel is not None and self._cancel.is_set():
                return "cancelled"
            if now > self._until:
                return "the time is up"
            for source in self._sources:
                if (since := source.since) is not None and now - since > self._stall_s:
                    source.cut(f"has sent nothing for {now - since:.1f} s")


def failure(what: str, ended: Mapping[str, Exception | None], stopped: str) -> Exception:
    """Return the exception of a fetch of ``what``: BadState if every source failed with ``Bad``, else FetchRefused.

    ``ended`` is the exception that ended the work on each source, or None; ``stopped`` why the fetch was ended early,
    or "".
    """
    reasons = [f"{address} {error}" for address, error in ended.items() if error is not None]
    text = f"cannot fetch {what}: " + "; ".join([*([stopped] if stopped else []), *reasons] or ["there is no source"])
    unexpected = next((e for e in ended.values() if e is not None and not isinstance(e, (Gone, Lost, Bad))), None)
    if unexpected is not None:
        raise unexpected
    bad = [error for error in ended.values() if isinstance(error, Bad)]
    if bad and len(bad) == len(ended) and not stopped:
        return BadState(text)
    return FetchRefused(text)


_DAMAGED_TRIES = 2


@dataclass(frozen=True)
class Fetched:
    """Result of a successful fetch.

    Attributes:
        envelope: JSON values that accompany the tensors, from one of the sources.
        bytes: size of the tensors in bytes.
        seconds: duration of the fetch.
        per_source: address of a source -> number of bytes that it delivered.
        left: address of a source that was abandoned -> the reason.
    """

    envelope: dict[str, Any]
    bytes: int
    seconds: float
    per_source: dict[str, int]
    left: dict[str, str] = field(default_factory=dict)


class _Distribution:
    """Distribution of the bytes over the sources; shared by the fetch's threads, of which each serves one source."""

    def __init__(self, nbytes: int, crew: Crew):
        self._crew, self._changed = crew, crew.changed
        self._began, self._missing = time.monotonic(), nbytes
        self._pending = shares.cut(nbytes, crew.addresses) if crew.addresses else {}
        self._begun: dict[str, Piece] = {}
        self.delivered = dict.fromkeys(crew.addresses, 0)
        self.envelope: bytes | None = None

    def take(self, source: str) -> Piece | None:
        """Return the next piece to fetch from ``source``, None if the fetch is complete or over.

        If no piece is free now, wait: a source that fails hands its pieces to the others.
        """
        with self._changed:
            while source in self._pending and not self._crew.is_over:
                others = self._begun.keys() - {source}
                age_s = time.monotonic() - self._began
                choice, _ = shares.choose(source, age_s, self._pending, others, self.delivered)
                if isinstance(choice, shares.Take):
                    self._pending[choice.owner].remove(choice.piece)
                    self._begun[source] = choice.piece
                    return choice.piece
                if isinstance(choice, shares.End):
                    return None
                self._changed.wait(_POLL_S)
            return None

    def done(self, source: str) -> None:
        with self._changed:
            piece = self._begun.pop(source)
            self.delivered[source] += len(piece)
            self._missing -= len(piece)
            self._changed.notify_all()

    def leave(self, source: str) -> None:
        """Hand the remaining pieces of ``source``, which has ended, to the other sources."""
        with self._changed:
            if source in self._pending:
                self._pending, _ = shares.inherit(source, self._begun.pop(source, None), self._pending)
            self._changed.notify_all()

    def is_whole(self) -> bool:
        with self._changed:
            return self.envelope is not None and not self._missing


def fetch(
    sources: Sequence[str],
    token: str,
    step: int,
    lineage: int,
    into: Mapping[str, torch.Tensor],
    limit_s: float,
    *,
    rank: int = -1,
    stall_s: float = STALL_S,
    cancel: threading.Event | None = None,
    has_begun: threading.Event | None = None,
) -> Fetched:
    """Fill ``into`` with the state of the end of ``step``, an equal share of its bytes from each source.

    Args:
        sources: addresses of the servers of the same rank in healthy replicas.
        token: token of the run.
        step: step whose final state is fetched.
        lineage: number of the quorum in which the step was committed.
        into: destination tensors by name, contiguous; written in place. If this function raises, they hold a mixture of
            old and new bytes.
        limit_s: time limit of the whole fetch, in seconds.
        rank: sources that serve another logical rank are abandoned; -1: none is.
        stall_s: maximum seconds for one operation of a source.
        cancel: event that ends the fetch when it is set.
        has_begun: event that this function sets once every source has either failed or registered this fetch. A source
            waits for registered fetches, within a time limit, before it changes its state.

    Raises:
        FetchRefused: no source holds the state any more, or none delivered it in time.
        BadState: every source holds another state than the requested one, or sends damaged bytes.
        UserError: a tensor of ``into`` is not contiguous, or of an unknown type.
    """
    began = time.monotonic()
    memory, wanted = FlatState(into), Mark(rank, step, lineage)
    crew = Crew(sources, token, stall_s, began + limit_s, cancel, has_begun)
    task = _Distribution(memory.table.nbytes, crew)

    def work(source: OpenSource) -> None:
        try:
            envelope = source.state(wanted, memory.table)
            crew.begins_at(source.address)
            with crew.changed:
                task.envelope = task.envelope or envelope
            while True:
                source.since = None  # no progress is expected while it waits for other sources
                if (piece := task.take(source.address)) is None:
                    return
                _receive(source, piece, memory)
                task.done(source.address)
        finally:
            task.leave(source.address)

    left = crew.run(work, task.is_whole, f"the state of step {step}, lineage {lineage}")
    seconds = time.monotonic() - began
    return Fetched(_content(task.envelope or b""), memory.table.nbytes, seconds, task.delivered, left)


def fetch_envelope(
    sources: Sequence[str],
    token: str,
    step: int,
    lineage: int,
    limit_s: float,
    *,
    cancel: threading.Event | None = None,
) -> dict[str, Any]:
    """Fetch the envelope of the end of ``step`` from the source that answers first.

    An envelope is available for longer than the tensors, which a source withdraws before its next optimizer step.

    Args:
        sources: addresses of the servers of the same rank in healthy replicas.
        token: token of the run.
        step: step whose final envelope is fetched.
        lineage: number of the quorum in which the step was committed.
        limit_s: time limit in seconds.
        cancel: event that ends the fetch when it is set.

    Raises:
        FetchRefused: as for :func:`fetch`.
        BadState: as for :func:`fetch`.
    """
    crew = Crew(sources, token, STALL_S, time.monotonic() + limit_s, cancel)
    found: list[bytes] = []

    def work(source: OpenSource) -> None:
        found.append(source.envelope(Mark(-1, step, lineage)))

    crew.run(work, lambda: bool(found), f"the envelope of step {step}, lineage {lineage}")
    return _content(found[0])


def _receive(source: OpenSource, piece: Piece, memory: FlatState) -> None:
    """Receive a piece. A piece that arrives damaged is requested again, up to :data:`_DAMAGED_TRIES` times in all."""
    for _ in range(_DAMAGED_TRIES - 1):
        try:
            return source.receive(piece, memory)
        except Damaged:
            continue
    return source.receive(piece, memory)


def _content(envelope: bytes) -> dict[str, Any]:
    try:
        content = bounded_json.loads(envelope, non_finite=True)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadState(f"the envelope is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadState(f"the envelope is no JSON object but {type(content).__name__}")
    return content
