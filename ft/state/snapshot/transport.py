"""The interface of a transport, which moves snapshots between workers (implemented by :mod:`ft.state.snapshot.tcp`).

A transport is one worker's end. It delivers this worker's snapshots to peers, receives peers' copies into the
:class:`ft.state.snapshot.copy_store.CopyStore`, and serves fetches from that store. It

* owns no buffers: they belong to the store, and are allocated once;
* commits a copy only when every chunk has arrived with the right checksum, so that a transfer that ends in any other
way leaves the previous complete copy intact;
* refuses data of an epoch that is closed or older than the current one;
* never blocks for ever: operations end within ``patience_s`` seconds without progress, and at once on ``cancel``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ft.base.errors import FallbackError, RecoverableError
from ft.state.snapshot.buffers import Part
from ft.state.snapshot.copier import Progress
from ft.state.snapshot.copy_store import CopyStore
from ft.state.snapshot.layout import Table


class PeerLost(RecoverableError):
    """A peer accepted no copy: it cannot be reached, does not answer, or refuses."""


class Cancelled(RecoverableError):
    """The operation was cancelled on purpose."""


class CopyUnusable(FallbackError):
    """A requested snapshot is missing, damaged, or belongs to another state."""


@dataclass(frozen=True)
class Outgoing:
    """A snapshot on its way to the peers.

    Attributes:
        owner: logical rank whose state it is.
        step: its step.
        epoch: its epoch.
        part: the section to send.
        meta: envelope and blobs.
        progress: which chunks of the section are written already.
    """

    owner: int
    step: int
    epoch: int
    part: Part
    meta: bytes
    progress: Progress


@dataclass(frozen=True)
class Wanted:
    """A section of ``owner``'s snapshot of ``step``, held by logical rank ``holder`` and fetched in ``epoch``."""

    holder: int
    owner: int
    step: int
    section: str
    epoch: int


class Transport(ABC):
    """One worker's end of the transport; see the module's docstring.

    Attributes:
        address: where other workers reach this end; only this kind of transport can interpret it.
        stock: the snapshots that this worker holds.
    """

    address: str
    stock: CopyStore

    @abstractmethod
    def place(self, addresses: Mapping[int, str]) -> None:
        """Set the addresses of the logical ranks. Connections to ranks that have moved are dropped."""

    @abstractmethod
    def send(self, peer: int, outgoing: Outgoing, ended: Callable[[Exception | None], None]) -> None:
        """Start to deliver ``outgoing`` to ``peer``, and return at once. Chunks are sent as soon as they are written.

        A lost connection is remade and the transfer repeated, a few times. ``ended`` is called once, from some thread:
        with None when the peer has verified and committed the copy, else with the error (:class:`PeerLost`,
        :class:`Cancelled`).
        """

    @abstractmethod
    def fetch(self, wanted: Wanted, part: Part) -> bytes:
        """Fill ``part`` with a section of a snapshot that another worker holds, and return the snapshot's ``meta``.

        Raises:
            CopyUnusable: there is no such snapshot, it is damaged, or its table is not that of ``part``.
            PeerLost: the holder cannot be reached or stops answering.
            Cancelled: its epoch was cancelled.
        """

    @abstractmethod
    def disturb(self, how: Callable[[int, int, list], list[list]]) -> None:
        """Pass the chunks of the next snapshot to each peer through ``how``, for fault injection.

        Args:
            how: (index, number of chunks, pieces that the chunk is sent in) -> pieces to send in its place.
        """

    @abstractmethod
    def cancel(self, epoch: int) -> None:
        """Cancel the operations of ``epoch`` and before, and refuse further ones.

        Safe from any thread; returns at once.
        """

    @abstractmethod
    def quiesce(self) -> None:
        """After ``cancel``, wait until no thread writes into the store any more."""

    @abstractmethod
    def close(self) -> None:
        """End all threads and connections, and free the store."""


def check_table(part: Part, theirs: bytes, whose: str) -> None:
    """Check that an encoded table is that of ``part``.

    Raises:
        CopyUnusable: it is not; the message names the first difference.
    """
    if theirs != part.table.encoded:
        difference = Table.decode(theirs).difference(part.table)
        raise CopyUnusable(f"{whose} holds other tensors than this worker has: {difference}")
