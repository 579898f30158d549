"""The request handler of a snapshot server, which stores incoming peer copies and sends requested copies."""

import threading
from dataclasses import dataclass, field
from typing import Any

from ft.base.errors import FallbackError
from ft.state.snapshot.copy_store import CopyStore
from ft.state.snapshot.layout import Table, checksum, digest
from ft.state.snapshot.state import OWNED, REPLICATED
from ft.state.snapshot.wire import Wire

_STEP_ASIDE_S = 10.0


class Refused(Exception):
    """A copy is not accepted; the text is sent to the sender."""


@dataclass
class _Arrival:
    """A copy that is being received."""

    epoch: int
    wire: Wire
    ended: threading.Event = field(default_factory=threading.Event)


class RequestHandler:
    """Receives peer copies and serves snapshots; the threads of connections call it.

    At most one copy of each owner is received at a time. A newer connection of the same owner replaces an older one,
    because the sender of the older one has died or has lost its connection.
    """

    def __init__(self, stock: CopyStore, max_bytes: int):
        self._stock, self._max_bytes = stock, max_bytes
        self._arrivals: dict[int, _Arrival] = {}
        self._newest, self._closed = -1, -1
        self._lock = threading.Lock()

    def answer(self, wire: Wire, header: dict[str, Any]) -> None:
        """Answer one request. Afterwards the connection can carry the next request."""
        kind = header["kind"]
        if kind == "put":
            self._take_in(wire, header)
        elif kind == "get":
            self._hand_out(wire, header)
        else:
            raise ValueError(f"no such request: {kind}")

    def cancel(self, epoch: int) -> None:
        """Abort the copies that are being received, and refuse ``epoch`` and earlier epochs from now on."""
        with self._lock:
            self._closed = max(self._closed, epoch)
            arrivals = [arrival for arrival in self._arrivals.values() if arrival.epoch <= epoch]
        for arrival in arrivals:
            arrival.wire.shutdown()

    def quiesce(self) -> None:
        with self._lock:
            arrivals = [arrival for arrival in self._arrivals.values() if arrival.epoch <= self._closed]
        for arrival in arrivals:
            arrival.ended.wait()

    def _take_in(self, wire: Wire, header: dict[str, Any]) -> None:
        owner, step, epoch = _whole(header["owner"]), _whole(header["step"]), _whole(header["epoch"])
        encoded, meta = bytes(wire.take(_whole(header["table"]))), bytes(wire.take(_whole(header["meta"])))
        try:
            table = self._known_table(owner, encoded, header)
            if checksum(meta) != header["meta_checksum"]:
                raise Refused("the envelope was damaged on the way")
            arrival = self._admit(owner, epoch, wire)
        except (Refused, FallbackError) as refusal:
            wire.send({"kind": "refused", "reason": str(refusal)})
            return
        try:
            answer = self._receive(arrival, owner, step, table, meta)
        finally:
            with self._lock:
                if self._arrivals.get(owner) is arrival:
                    del self._arrivals[owner]
            arrival.ended.set()
        wire.send(answer)

    def _receive(self, arrival: _Arrival, owner: int, step: int, table: Table, meta: bytes) -> dict[str, Any]:
        copies = self._stock.copies(owner)
        slot = copies.begin(step, arrival.epoch, {OWNED: table})
        complete = False
        try:
            slot.set_meta(meta)
            arrival.wire.send({"kind": "go"})
            damaged = arrival.wire.receive_part(slot.parts[OWNED])
            if damaged is not None:
                return {"kind": "damaged", "chunk": damaged}
            with self._lock:
                complete = arrival.epoch > self._closed and self._arrivals.get(owner) is arrival
                if complete:
                    copies.commit(slot)
        finally:
            if not complete:
                copies.drop(slot)
        return {"kind": "held", "step": step} if complete else {"kind": "refused", "reason": "its epoch is over"}

    def _known_table(self, owner: int, encoded: bytes, header: dict[str, Any]) -> Table:
        if digest(encoded) != header["digest"]:
            raise Refused("the table of tensors was damaged on the way")
        newest = self._stock.copies(owner).find()
        if newest is not None and newest.parts[OWNED].table.encoded == encoded:
            table = newest.parts[OWNED].table
        else:
            table = Table.decode(encoded)
        if table.nbytes != header["length"]:
            raise Refused(f"{header['length']} bytes announced, but the table describes {table.nbytes}")
        if table.nbytes > self._max_bytes:
            raise Refused(f"a copy of {table.nbytes} bytes; at most {self._max_bytes} are taken here")
        return table

    def _admit(self, owner: int, epoch: int, wire: Wire) -> _Arrival:
        arrival = _Arrival(epoch, wire)
        with self._lock:
            if epoch <= self._closed or epoch < self._newest:
                raise Refused(f"epoch {epoch} is over (closed: {self._closed}, newest: {self._newest})")
            self._newest = epoch
            before = self._arrivals.get(owner)
            self._arrivals[owner] = arrival
        if before is not None:
            before.wire.shutdown()
            if not before.ended.wait(_STEP_ASIDE_S):
                raise Refused(f"an earlier transfer for rank {owner} does not end")
        return arrival

    def _hand_out(self, wire: Wire, header: dict[str, Any]) -> None:
        owner, step, section = _whole(header["owner"]), _whole(header["step"]), str(header["section"])
        slot = self._stock.find(owner, step)
        if slot is None or section not in slot.parts or section not in (OWNED, REPLICATED):
            wire.send({"kind": "missing", "reason": f"there is none here (held: {self._stock.holdings()})"})
            return
        part = slot.parts[section]
        sizes = {"table": len(part.table.encoded), "meta": len(slot.meta), "length": part.table.nbytes}
        wire.send(
            {"kind": "copy", "epoch": slot.epoch, "meta_checksum": slot.meta_checksum, **sizes},
            part.table.encoded,
            slot.meta,
        )
        wire.send_part(part)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
