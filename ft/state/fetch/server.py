"""Server that sends this rank's training state to the same rank of replicas that are behind, while training continues.

A rank of a healthy replica offers its training state while it computes the next step, and withdraws the offer before
the optimizer changes the tensors (FT-HSDP, section 4.3). The tensors are the live ones, so no reader may continue after
the withdrawal. The envelope of a state is everything but the tensors, as JSON. A state is identified by its step and
its lineage.

Of tensors on a device, each chunk is copied to host memory just before it is sent. The copy runs on its own stream and
starts after the work that was queued when the state was offered. It does not wait for the kernels of the following
step, because they only read the state.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ft.base.errors import UserError
from ft.net.framed import FramedChannel, Mark, checksum
from ft.net.streams import TcpNetwork
from ft.state import device as devices
from ft.state.layout import FlatState, Table, table_of
from ft.state.transfer import CopyHolder, Held, NotHeld, Visit, Withdrawn, serve

Tensors = Mapping[str, torch.Tensor]


class StateOffer(Held):
    """The state of one step, from its offer to its withdrawal. Thread-safe.

    Args:
        mark: which state it is.
        whose: logical rank and replica whose state it is, in words.
        envelope: JSON values that accompany the tensors, encoded.
        table: layout of the tensors.
        tensors: the live tensors. Copies wait for the work that is queued on their devices' current streams now.
        streams: device -> stream on which its tensors are copied to host memory. Missing ones are added.
    """

    def __init__(
        self,
        mark: Mark,
        whose: str,
        envelope: bytes,
        table: Table,
        tensors: Tensors,
        streams: dict[torch.device, torch.cuda.Stream],
    ):
        self.mark, self.whose, self.table = mark, whose, table
        self.envelope, self.envelope_check = envelope, checksum(envelope)
        self._tensors, self._streams = tensors, streams
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            if device not in streams:
                streams[device] = devices.side_stream(device)
            streams[device].wait_stream(torch.cuda.current_stream(device))
        self._memory: FlatState | None = None
        self._changed = threading.Condition()
        self._visits: set[Visit] = set()
        self._reading: list[FramedChannel] = []
        self._closing, self._closed = False, False

    def visit(self, peer: str) -> Visit:
        """Register a fetch by the rank at address ``peer``.

        Raises:
            NotHeld: the withdrawal has begun, so no new fetch is accepted.
        """
        with self._changed:
            if self._closing:
                raise NotHeld(self._withdrawn())
            visit = super().visit(peer)
            self._visits.add(visit)
            return visit

    def leave(self, visit: Visit) -> None:
        with self._changed:
            self._visits.discard(visit)
            self._changed.notify_all()

    def under_way(self) -> int:
        with self._changed:
            return len(self._visits)

    @contextlib.contextmanager
    def reading(self, channel: FramedChannel) -> Iterator[FlatState]:
        """Return a context in which the state may be read, to compute the checksum of one block and send the block.

        A withdrawal waits until all contexts have ended, so the tensors do not change inside a context. The withdrawal
        also shuts ``channel`` down, so that a peer that does not receive cannot delay it.

        Raises:
            Withdrawn: the state must not be read any more.
        """
        with self._changed:
            if self._closed:
                raise Withdrawn(self._withdrawn())
            if self._memory is None:
                self._memory = self._as_bytes()
            self._reading.append(channel)
        try:
            with contextlib.ExitStack() as stack:
                for device, stream in self._streams.items():
                    devices.enter(device)
                    stack.enter_context(torch.cuda.stream(stream))
                yield self._memory
        finally:
            with self._changed:
                self._reading.remove(channel)
                self._changed.notify_all()

    def withdraw(self, wait_s: float) -> list[Visit]:
        """Accept no new fetches, wait up to ``wait_s`` seconds for those under way, and cut off the rest.

        Returns:
            The fetches that were cut off. No thread reads the tensors after this method has returned.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._visits, timeout=max(0.0, deadline - time.monotonic()))
            self._closed = True
            cut = list(self._visits)
            for channel in self._reading:
                channel.shutdown()
            self._changed.wait_for(lambda: not self._reading)
            self._visits.clear()
            self._memory, self._tensors = None, {}
        return cut

    def _as_bytes(self) -> FlatState:
        memory = FlatState(self._tensors)
        if memory.table.encoded != self.table.encoded:
            difference = self.table.difference(memory.table)
            raise Withdrawn(f"the tensors were changed since they were offered: {difference}")
        return memory

    def _withdrawn(self) -> str:
        return f"the state of step {self.mark.step}, lineage {self.mark.epoch} was withdrawn"


IDLE_S = 60.0
"""Maximum seconds between two requests of an authenticated peer, which also fetches from other replicas meanwhile."""
BLOCK_S = 10.0
"""Maximum seconds without progress while a chunk is sent to an authenticated peer."""
_ANYWHERE = ("", "0.0.0.0", "::", "*")


class StateServer(CopyHolder):
    """Serves the state of one rank, on the interface with the address ``host`` only.

    It gives out the offered state, if there is one, and the newest envelope.

    Args:
        host: name or IPv4 address at which the ranks of other replicas reach this rank.
        token: secret token of the run; peers without it are refused.
        replica: number of the replica whose state is served, included in answers.
        rank: logical rank whose state is served, included in answers.

    Attributes:
        address: address of the server, "host:port".

    Raises:
        UserError: ``host`` is not an address of a single interface of this machine.
    """

    def __init__(self, host: str, token: str, *, replica: int = 0, rank: int = 0):
        if host in _ANYWHERE:
            raise UserError(
                f"the state cannot be served on every interface (host {host!r})",
                "give the address that other replicas reach this node at",
            )
        self._rank, self._whose = rank, f"logical rank {rank} of replica {replica}"
        self._known: tuple[dict[str, torch.Tensor], Table] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # Threads of connections read both, which are replaced as a whole.
        self._offer: StateOffer | None = None  # stays here until its withdrawal is complete
        self._words: tuple[Mark, bytes] | None = None
        try:
            self._listener = serve(
                TcpNetwork(host),
                token,
                self,
                patience_s=BLOCK_S,
                idle_s=IDLE_S,
                name="ft-fetch-serve",
                is_background=True,
            )
        except OSError as error:
            raise UserError(
                f"the state cannot be served on {host!r}: {error.strerror or error}",
                "give an address of this node that other replicas reach it at",
            ) from error
        self.address = self._listener.address

    def offer(self, step: int, lineage: int, tensors: Mapping[str, torch.Tensor], envelope: Mapping[str, Any]) -> None:
        """Serve the state of the end of ``step`` from now on, in place of the previous offer.

        Args:
            step: the step.
            lineage: number of the quorum (set of replicas that compute a step together) in which it was committed.
            tensors: the live tensors by name. They must not change before :meth:`withdraw` has returned.
            envelope: JSON values that accompany the tensors; they stay available like those given to :meth:`envelope`.

        Raises:
            UserError: a tensor is not contiguous, or has an unsupported type.
        """
        self.withdraw()
        table = self._table(tensors)
        mark, content = Mark(self._rank, step, lineage), _encoded(envelope)
        self._offer = StateOffer(mark, self._whose, content, table, dict(tensors), self._streams)
        self._words = mark, content

    def withdraw(self, wait_s: float = 0.0) -> list[Visit]:
        """End the offer: the tensors may change once this has returned.

        Args:
            wait_s: seconds to wait for fetches under way. New fetches are refused meanwhile.

        Returns:
            The fetches that were cut off.
        """
        if self._offer is None:
            return []
        cut = self._offer.withdraw(wait_s)
        self._offer = None
        return cut

    def envelope(self, step: int, lineage: int, envelope: Mapping[str, Any]) -> None:
        """Serve an envelope (the JSON values of a state) without tensors, until another envelope replaces it.

        Args:
            step: the values are those of the end of this step.
            lineage: number of the quorum in which the step was committed.
            envelope: the values.
        """
        self._words = Mark(self._rank, step, lineage), _encoded(envelope)

    def under_way(self) -> int:
        """Return the number of fetches that have begun and not ended."""
        offer = self._offer
        return 0 if offer is None else offer.under_way()

    def find(self, mark: Mark, section: str) -> StateOffer:
        offer = self._offer
        if offer is None or offer.mark[1:] != mark[1:]:
            raise self._not_held("state", mark, "on offer", None if offer is None else offer.mark)
        return offer

    def envelope_of(self, mark: Mark) -> bytes:
        held, content = self._words or (None, b"")
        if held is None or held[1:] != mark[1:]:
            raise self._not_held("envelope", mark, "held", held)
        return content

    def _not_held(self, what: str, mark: Mark, where: str, held: Mark | None) -> NotHeld:
        newest = self._words
        other = "none" if held is None else f"that of step {held.step}, lineage {held.epoch}"
        reason = f"asked for the {what} of step {mark.step}, lineage {mark.epoch}; {where}: {other}"
        return NotHeld(reason, later=newest is None or newest[0].step < mark.step)

    def close(self) -> None:
        """Withdraw the offer and end all threads and connections."""
        self.withdraw()
        self._listener.close()

    def _table(self, tensors: Mapping[str, torch.Tensor]) -> Table:
        """Return the layout of ``tensors``, from a cache if they are the same objects as at the last call."""
        known = self._known
        if known is None or known[0].keys() != tensors.keys() or any(known[0][n] is not t for n, t in tensors.items()):
            self._known = known = dict(tensors), table_of(tensors)
        return known[1]


def _encoded(envelope: Mapping[str, Any]) -> bytes:
    return json.dumps(envelope, separators=(",", ":")).encode()
