"""What carries snapshots between workers: the contract that every transport fulfils (:mod:`ft.state.snapshot.tcp`).

A transport is one end of it: it delivers this worker's snapshots to peers, takes peers' copies into the
:class:`ft.state.snapshot.copy_store.CopyStore`, and answers whoever fetches from that stock. It

* keeps nothing of its own: buffers are the stock's, allocated once;
* commits a copy only when every chunk has arrived and its checksum is right, so that a transfer that ends in any other
  way leaves the complete copy beside it alone;
* refuses what belongs to an epoch before the current one or to a closed one;
* never blocks for good: operations end within ``patience_s`` without progress, and at once on ``cancel``.
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
    """A peer took no copy: it cannot be reached, does not answer, or refuses."""


class Cancelled(RecoverableError):
    """The operation was given up on purpose."""


class CopyUnusable(FallbackError):
    """A snapshot that was asked for is missing where it should be, damaged, or not of this state."""


@dataclass(frozen=True)
class Outgoing:
    """A snapshot on its way to the peers.

    Attributes:
        part: what goes. progress: which of its chunks are written already.
        meta: envelope and blobs.
    """

    owner: int
    step: int
    epoch: int
    part: Part
    meta: bytes
    progress: Progress


@dataclass(frozen=True)
class Wanted:
    """A section of ``owner``'s snapshot of ``step``, which logical rank ``holder`` has, fetched in ``epoch``."""

    holder: int
    owner: int
    step: int
    section: str
    epoch: int


class Transport(ABC):
    """See the module's head.

    Attributes:
        address: where other workers reach this end; meaningful to this kind of transport only.
        stock: what is held here.
    """

    address: str
    stock: CopyStore

    @abstractmethod
    def place(self, addresses: Mapping[int, str]) -> None:
        """Tells where each logical rank is reached from now on; connections to those that have moved are dropped."""

    @abstractmethod
    def send(self, peer: int, outgoing: Outgoing, ended: Callable[[Exception | None], None]) -> None:
        """Starts to deliver ``outgoing`` to ``peer`` and returns at once; chunks go as they are written.

        A lost connection is made anew and the transfer repeated, a few times. ``ended`` is called once, from some
        thread: with None when the peer has verified and committed the copy, else with why not (:class:`PeerLost`,
        :class:`Cancelled`).
        """

    @abstractmethod
    def fetch(self, wanted: Wanted, part: Part) -> bytes:
        """Fills ``part`` with a section of a snapshot that another worker holds; returns the snapshot's ``meta``.

        Raises:
            CopyUnusable: there is none, it is damaged, or its table is not that of ``part``.
            PeerLost: the holder cannot be reached or stops answering.
            Cancelled: the epoch it is for has been cancelled.
        """

    @abstractmethod
    def disturb(self, how: Callable[[int, int, list], list[list]]) -> None:
        """For fault injection: the chunks of the next snapshot to each peer go through ``how``.

        Args:
            how: (index, number of chunks, pieces that the chunk is sent in) -> what is sent in its place.
        """

    @abstractmethod
    def cancel(self, epoch: int) -> None:
        """Gives up what is under way for ``epoch`` and before and refuses more of it; any thread, returns at once."""

    @abstractmethod
    def quiesce(self) -> None:
        """Waits, after ``cancel``, until no thread writes into the stock any more."""

    @abstractmethod
    def close(self) -> None:
        """Ends all threads and connections and frees the stock."""


def check_table(part: Part, theirs: bytes, whose: str) -> None:
    """Raises CopyUnusable, with the first difference, when an encoded table is not that of ``part``."""
    if theirs != part.table.encoded:
        difference = Table.decode(theirs).difference(part.table)
        raise CopyUnusable(f"{whose} holds other tensors than this worker has: {difference}")
