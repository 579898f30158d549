"""Fetches the state of a lost worker while its successor is being built (DEADPOOL, section VI-E).

A worker that takes over a logical rank builds its model, and survivors leave their operations, before the control plane
can decide from which step all go on. Nearly always it is the newest step of which a holder has a copy of the lost
worker's snapshot. So that copy is fetched at once; if another step or another kind of recovery is decided on, it is
dropped.
"""

import threading
from collections.abc import Callable, Mapping

from ft.net.framed import Mark
from ft.state.layout import Table
from ft.state.snapshot.buffers import PingPong, Slot
from ft.state.snapshot.state import OWNED, REPLICATED
from ft.state.transfer import pull

_EMPTY = Table((), 0)


class Ahead:
    """A copy that is being fetched, in a thread of its own. Only one thread may call the methods, except :meth:`cut`.

    Args:
        rank: logical rank of the lost worker.
        holders: logical rank of a worker that may have a copy -> address of its server. They are tried in this order.
        connection: function that returns a new connection to the server at an address.
        own: snapshots of this process; its spare memory is used, and its slots are left alone until :meth:`take`.
        connect_s: longest time for a connection, in seconds.
    """

    def __init__(
        self,
        rank: int,
        holders: Mapping[int, str],
        connection: Callable[[str], pull.OpenSource],
        own: PingPong,
        connect_s: float,
    ):
        self._rank, self._holders, self._own, self._connect_s = rank, holders, own, connect_s
        self._connection = connection
        self._lock = threading.Lock()
        self._holder, self._step = -1, -1
        self._source: pull.OpenSource | None = None
        self._is_cut = False
        self._slot: Slot | None = None
        self._thread = threading.Thread(target=self._fetch, name="ft-ahead", daemon=True)
        self._thread.start()

    def take(self, tables: Mapping[str, Table], step: int, holder: int) -> tuple[Slot, int] | None:
        """End the fetch, and return its slot if that has the snapshot of ``step``.

        Wait for a fetch under way, unless it is of another step or from another worker than ``holder``, which the
        control plane has found to be alive.

        Args:
            tables: layouts of the sections of this worker's state.
            step: step that is restored.
            holder: logical rank of the worker whose snapshots would be used otherwise; the lost worker's rank if they
                were inherited.

        Returns:
            (the slot, the logical rank of the worker that it came from), or None.
        """
        with self._lock:
            useless = self._slot is None and (self._holder != holder or self._step not in (-1, step))
        if useless:
            self.cut()
        self._thread.join()
        slot, self._slot = self._slot, None
        if slot is None or holder == self._rank or slot.step != step or not slot.fits(tables):
            return None
        self._own.adopt(slot)
        return slot, self._holder

    def cut(self) -> None:
        """End the fetch soon. Safe from any thread."""
        with self._lock:
            self._is_cut = True
            source = self._source
        if source is not None:
            source.cut("the copy is not needed")

    def _fetch(self) -> None:
        for holder, address in self._holders.items():
            source = self._connection(address)
            with self._lock:
                if self._is_cut:
                    return
                self._holder, self._step, self._source = holder, -1, source
            try:
                source.open(self._connect_s)
                slot = self._fetch_from(source)
            except (pull.Gone, pull.Bad, pull.Lost):
                continue
            finally:
                source.close()
            with self._lock:
                self._slot = slot
            return

    def _fetch_from(self, source: pull.OpenSource) -> Slot:
        mark, table, envelope = source.offer(Mark(self._rank), OWNED)
        with self._lock:
            self._step = mark.step
        slot = Slot(step=mark.step, epoch=mark.epoch, owner=-1)
        spare, self._own.spare = self._own.spare, None
        slot.fit({OWNED: table, REPLICATED: _EMPTY}, False, spare)
        slot.set_meta(envelope)
        source.receive(range(table.nbytes), slot.parts[OWNED])
        return slot
