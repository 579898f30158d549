"""Server that sends this rank's training state to the same rank of replicas that are behind, while training continues.

A replica is a full copy of the model with its own ranks (FT-HSDP, section 4.3). The state is sent from memory.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ft.base.errors import UserError
from ft.net.streams import TcpNetwork
from ft.state.fetch.memory import table_of
from ft.state.fetch.offer import Cut, Envelope, Offer, Shelf
from ft.state.fetch.staging import prepare
from ft.state.layout import Table
from ft.state.transfer.server import Server

IDLE_S = 60.0
"""Maximum seconds between two requests of an authenticated peer, which also fetches from other replicas meanwhile."""
BLOCK_S = 10.0
"""Maximum seconds without progress while a chunk is sent to an authenticated peer."""
_ANYWHERE = ("", "0.0.0.0", "::", "*")


class StateServer:
    """Serves the state of one rank, on the interface with the address ``host`` only.

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
        self._shelf, self._replica, self._rank = Shelf(), replica, rank
        self._known: tuple[dict[str, torch.Tensor], Table] | None = None
        limits = {"patience_s": BLOCK_S, "idle_s": IDLE_S}
        try:
            self._server = Server(
                TcpNetwork(host), token, self._shelf, name="ft-fetch-serve", is_background=True, **limits
            )
        except OSError as error:
            raise UserError(
                f"the state cannot be served on {host!r}: {error.strerror or error}",
                "give an address of this node that other replicas reach it at",
            ) from error
        self.address = self._server.address

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
        words = Envelope.of(step, lineage, envelope)
        self._shelf.offer = Offer(words, table, dict(tensors), prepare(tensors), self._replica, self._rank)
        self._shelf.words = words

    def withdraw(self, wait_s: float = 0.0) -> list[Cut]:
        """End the offer: the tensors may change once this has returned.

        Args:
            wait_s: seconds to wait for fetches under way. New fetches are refused meanwhile.

        Returns:
            The fetches that were cut off.
        """
        offer = self._shelf.offer
        if offer is None:
            return []
        cut = offer.withdraw(wait_s)
        self._shelf.offer = None
        return cut

    def envelope(self, step: int, lineage: int, envelope: Mapping[str, Any]) -> None:
        """Serve an envelope (the JSON values of a state) without tensors, until another envelope replaces it.

        Args:
            step: the values are those of the end of this step.
            lineage: number of the quorum in which the step was committed.
            envelope: the values.
        """
        self._shelf.words = Envelope.of(step, lineage, envelope)

    def under_way(self) -> int:
        """Return the number of fetches that have begun and not ended."""
        offer = self._shelf.offer
        return 0 if offer is None else offer.under_way()

    def close(self) -> None:
        """Withdraw the offer and end all threads and connections."""
        self.withdraw()
        self._server.close()

    def _table(self, tensors: Mapping[str, torch.Tensor]) -> Table:
        """Return the layout of ``tensors``, from a cache if they are the same objects as at the last call."""
        known = self._known
        if known is None or known[0].keys() != tensors.keys() or any(known[0][n] is not t for n, t in tensors.items()):
            self._known = known = dict(tensors), table_of(tensors)
        return known[1]
