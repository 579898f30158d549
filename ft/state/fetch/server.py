"""Serves this rank's state to the same rank of replicas that are behind, from memory and without stopping."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ft.state.fetch.handler import Handler, Host
from ft.state.fetch.listener import Listener
from ft.state.fetch.memory import table_of
from ft.state.fetch.offer import Cut, Envelope, Offer, Shelf
from ft.state.fetch.staging import prepare
from ft.state.snapshot.layout import Table


class StateServer:
    """Listens on ``host``, and on no other interface.

    Args:
        host: name or IPv4 address that the ranks of other replicas reach this one at.
        token: of the run; who does not have it is refused.
        replica, rank: whose state this is; told to whoever fetches it.

    Attributes:
        address: "host:port".

    Raises:
        UserError: ``host`` is no single interface of this machine.
    """

    def __init__(self, host: str, token: str, *, replica: int = 0, rank: int = 0):
        self._shelf = Shelf()
        self._known: tuple[dict[str, torch.Tensor], Table] | None = None
        self._door = Listener(host, functools.partial(Handler, Host(self._shelf, token, replica, rank)))
        self.address = self._door.where

    def offer(self, step: int, lineage: int, tensors: Mapping[str, torch.Tensor], envelope: Mapping[str, Any]) -> None:
        """Serves the state of the end of ``step``, committed in the quorum ``lineage``, from now on.

        Args:
            tensors: the live ones, by name. They must not change before :meth:`withdraw` has returned.
            envelope: JSON values beside them; kept like one given to :meth:`envelope`.

        Raises:
            UserError: a tensor is not contiguous, or of an unknown type.
        """
        self.withdraw()
        table = self._table(tensors)
        self._shelf.put(Offer(Envelope.of(step, lineage, envelope), table, dict(tensors), prepare(tensors)))

    def withdraw(self, wait_s: float = 0.0) -> list[Cut]:
        """Ends the offer: the tensors may change when this returns.

        Args:
            wait_s: how long fetches under way are waited for; new ones are refused meanwhile.

        Returns:
            The fetches that were cut off.
        """
        offer = self._shelf.take()
        if offer is None:
            return []
        cut = offer.withdraw(wait_s)
        self._shelf.drop(offer)
        return cut

    def envelope(self, step: int, lineage: int, envelope: Mapping[str, Any]) -> None:
        """Serves the envelope of the end of ``step`` until the next one, whatever happens to the tensors."""
        self._shelf.keep(Envelope.of(step, lineage, envelope))

    def under_way(self) -> int:
        """Fetches that have begun and not ended."""
        offer = self._shelf.take()
        return 0 if offer is None else offer.under_way()

    def close(self) -> None:
        """Withdraws the offer and ends all threads and connections."""
        self.withdraw()
        self._door.close()

    def _table(self, tensors: Mapping[str, torch.Tensor]) -> Table:
        """The layout, made anew only where the tensors are other objects than the last time."""
        known = self._known
        if known is None or known[0].keys() != tensors.keys() or any(known[0][n] is not t for n, t in tensors.items()):
            self._known = known = dict(tensors), table_of(tensors)
        return known[1]
