"""The interface of a transport, which moves snapshots of training state between workers (training processes).

:mod:`ft.state.snapshot.tcp` implements it. A transport object is one worker's end. It sends this worker's snapshots to
peers, receives peers' copies into the :class:`ft.state.snapshot.copy_store.CopyStore`, and serves fetches from that
store. An epoch is a version of the assignment of workers to logical ranks; a failure closes it. A transport

* owns no buffers: the buffers belong to the store, and are allocated once;
* commits a copy only when every chunk has arrived with the right checksum, so that a transfer that ends in any other
way leaves the previous complete copy intact;
* refuses data of an epoch that is closed or older than the current one;
* never blocks for ever: operations end within ``patience_s`` seconds without progress, and at once on ``cancel``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ft.base.errors import FallbackError
from ft.state.snapshot.buffers import Part
from ft.state.snapshot.copy_store import CopyStore
from ft.state.transfer.moving import Disturb
from ft.state.transfer.push import Outgoing


class CopyUnusable(FallbackError):
    """A requested snapshot is missing, damaged, or belongs to another state."""


@dataclass(frozen=True)
class Wanted:
    """A request for a section of a snapshot on another worker.

    Attributes:
        holder: logical rank that holds the snapshot.
        owner: logical rank whose state it is.
        step: step of the snapshot.
        section: name of the section.
        epoch: epoch in which the section is fetched.
    """

    holder: int
    owner: int
    step: int
    section: str
    epoch: int


class Transport(ABC):
    """One worker's end of the transport: sends snapshots to peers, receives peers' copies and serves fetches.

    Attributes:
        address: address at which other workers reach this end; its format depends on the kind of transport.
        stock: the snapshots that this worker holds.
    """

    address: str
    stock: CopyStore

    @abstractmethod
    def place(self, addresses: Mapping[int, str]) -> None:
        """Set the addresses of the logical ranks. Connections to ranks with another address than before are closed."""

    @abstractmethod
    def send(self, peer: int, outgoing: Outgoing, ended: Callable[[Exception | None], None]) -> None:
        """Start to send ``outgoing`` to ``peer``, and return at once. Chunks are sent as soon as they are written.

        If the connection is lost, the transfer is repeated over a new one, a few times. ``ended`` is called once, from
        any thread: with None when the peer has verified and committed the copy, otherwise with the exception
        (:class:`ft.state.transfer.push.PeerLost` or :class:`ft.state.transfer.push.Cancelled`).
        """

    @abstractmethod
    def fetch(self, wanted: Wanted, part: Part) -> bytes:
        """Fill ``part`` with a section of a snapshot that another worker holds, and return the snapshot's ``meta``.

        Raises:
            CopyUnusable: there is no such snapshot, it is damaged, or its layout differs from that of ``part``.
            PeerLost: the holder cannot be reached or stops answering.
            Cancelled: the epoch of the request was cancelled.
        """

    @abstractmethod
    def disturb(self, how: Disturb) -> None:
        """Pass the chunks of the next snapshot to each peer through ``how``, for fault injection.

        Args:
            how: function (index of the chunk, number of chunks, pieces of data in which the chunk would be sent) ->
                pieces of data to send instead.
        """

    @abstractmethod
    def cancel(self, epoch: int) -> None:
        """Cancel the operations of ``epoch`` and of earlier epochs, and refuse new ones.

        Safe from any thread; returns at once.
        """

    @abstractmethod
    def quiesce(self) -> None:
        """After ``cancel``, wait until no thread of the transport writes into the store any more."""

    @abstractmethod
    def close(self) -> None:
        """End all threads and connections, and free the store."""
