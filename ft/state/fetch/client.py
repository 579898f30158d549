"""Client of a fetch: receives a state from all sources at once, directly into the destination tensors."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ft.state.fetch import shares
from ft.state.fetch.crew import Crew, Limits
from ft.state.fetch.errors import BadState
from ft.state.fetch.memory import FlatState
from ft.state.fetch.shares import Piece
from ft.state.fetch.source import Damaged, Source, Wanted

_DAMAGED_TRIES = 2
_LOOK_S = 0.05


@dataclass(frozen=True)
class Fetched:
    """Result of a successful fetch.

    Attributes:
        envelope: JSON values that accompany the tensors, from one of the sources.
        bytes: bytes of state.
        seconds: duration of the fetch.
        per_source: bytes of state delivered by each source.
        left: reasons why sources were abandoned, by source.
    """

    envelope: dict[str, Any]
    bytes: int
    seconds: float
    per_source: dict[str, int]
    left: dict[str, str] = field(default_factory=dict)


class _Distribution:
    """Distribution of the bytes over the sources; shared by the threads of a crew."""

    def __init__(self, nbytes: int, crew: Crew):
        self._crew, self._changed = crew, crew.changed
        self._began, self._missing = time.monotonic(), nbytes
        self._pending = shares.cut(nbytes, crew.addresses) if crew.addresses else {}
        self._begun: dict[str, Piece] = {}
        self.delivered = dict.fromkeys(crew.addresses, 0)
        self.envelope: str | None = None

    def take(self, source: str) -> Piece | None:
        """Return the next piece for ``source``, waiting while other sources may still leave one; None: nothing is left
        to do.
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
                self._changed.wait(_LOOK_S)
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
    rank: int | None = None,
    limits: Limits | None = None,
    cancel: threading.Event | None = None,
    has_begun: threading.Event | None = None,
) -> Fetched:
    """Fill ``into`` with the state of the end of ``step``, an equal share of its bytes from each source.

    Args:
        sources: addresses of the servers of the same rank in healthy replicas.
        token: token of the run.
        step: step whose final state is fetched.
        lineage: number of the quorum in which the step was committed.
        into: destination tensors by name, contiguous; written in place, byte by byte. A mixture if this raises.
        limit_s: time limit of the whole fetch, in seconds.
        rank: if given, sources that serve another logical rank are abandoned.
        limits: limits for single operations.
        cancel: ends the fetch when set.
        has_begun: set once every source has either ended or promised to wait, within its time limit, for this fetch
            before it withdraws its state.

    Raises:
        Refused: no source holds the state any more, or none delivered it in time.
        BadState: every source holds something else.
        UserError: a tensor of ``into`` is not contiguous, or of an unknown type.
    """
    began = time.monotonic()
    memory, wanted = FlatState(into), Wanted(step, lineage, rank)
    crew = Crew(sources, token, limits or Limits(), began + limit_s, cancel, has_begun)
    task = _Distribution(memory.table.nbytes, crew)

    def work(source: Source) -> None:
        try:
            envelope = source.state(wanted, memory.table)
            crew.begins_at(source.address)
            with crew.changed:
                task.envelope = task.envelope or envelope
            while (piece := _idle(source, task)) is not None:
                _receive(source, wanted, piece, memory)
                task.done(source.address)
        finally:
            task.leave(source.address)

    left = crew.run(work, task.is_whole, f"the state of {wanted}")
    seconds = time.monotonic() - began
    return Fetched(_content(task.envelope), memory.table.nbytes, seconds, task.delivered, left)


def fetch_envelope(
    sources: Sequence[str],
    token: str,
    step: int,
    lineage: int,
    limit_s: float,
    *,
    limits: Limits | None = None,
    cancel: threading.Event | None = None,
) -> dict[str, Any]:
    """Fetch the envelope of the end of ``step`` from the source that answers first. Sources may still be at work in
    that step.

    Args:
        sources: addresses of the servers of the same rank in healthy replicas.
        token: token of the run.
        step: step whose final envelope is fetched.
        lineage: number of the quorum in which the step was committed.
        limit_s: time limit in seconds.
        limits: limits for single operations.
        cancel: ends the fetch when set.

    Raises:
        Refused: as for :func:`fetch`.
        BadState: as for :func:`fetch`.
    """
    crew = Crew(sources, token, limits or Limits(), time.monotonic() + limit_s, cancel)
    wanted, found = Wanted(step, lineage), []

    def work(source: Source) -> None:
        found.append(source.envelope(wanted))

    crew.run(work, lambda: bool(found), f"the envelope of {wanted}")
    return _content(found[0])


def _idle(source: Source, task: _Distribution) -> Piece | None:
    source.since = None  # no progress is expected while it waits for other sources
    return task.take(source.address)


def _receive(source: Source, wanted: Wanted, piece: Piece, memory: FlatState) -> None:
    """Receive a piece; a piece that arrives damaged is asked for again, :data:`_DAMAGED_TRIES` times in all."""
    for _ in range(_DAMAGED_TRIES - 1):
        try:
            return source.receive(wanted, piece, memory)
        except Damaged:
            continue
    return source.receive(wanted, piece, memory)


def _content(envelope: str) -> dict[str, Any]:
    try:
        content = json.loads(envelope)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadState(f"the envelope is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadState(f"the envelope is no JSON object but {type(content).__name__}")
    return content
