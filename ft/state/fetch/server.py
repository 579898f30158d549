"""Server of this rank's state for the same rank of replicas that are behind, from memory, while training goes on."""

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
    """Serves the state of one rank, at ``host`` and on no other interface.

    Args:
        host: name or IPv4 address at which the ranks of other replicas reach this one.
        token: token of the run; peers without it are refused.
        replica: replica whose state this is, included in answers.
        rank: logical rank whose state this is, included in answers.

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
        """Serve the state of the end of ``step`` from now on, in place of the previous offer.

        Args:
            step: the step.
            lineage: number of the quorum in which it was committed.
            tensors: the live tensors by name. They must not change before :meth:`withdraw` has returned.
            envelope: JSON values that accompany them; kept like an envelope given to :meth:`envelope`.

        Raises:
            UserError: a tensor is not contiguous, or of an unknown type.
        """
        self.withdraw()
        table = self._table(tensors)
        self._shelf.put(Offer(Envelope.of(step, lineage, envelope), table, dict(tensors), prepare(tensors)))

    def withdraw(self, wait_s: float = 0.0) -> list[Cut]:
        """End the offer: the tensors may change once this has returned.

        Args:
            wait_s: seconds to wait for fetches under way; new ones are refused meanwhile.

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
        """Serve the envelope of the end of ``step`` until the next one is given, whether or not the tensors are still
        offered.
        """
        self._shelf.keep(Envelope.of(step, lineage, envelope))

    def under_way(self) -> int:
        """Return the number of fetches that have begun and not ended."""
        offer = self._shelf.take()
        return 0 if offer is None else offer.under_way()

    def close(self) -> None:
        """Withdraw the offer and end all threads and connections."""
        self.withdraw()
        self._door.close()

    def _table(self, tensors: Mapping[str, torch.Tensor]) -> Table:
        """Return the layout, computed again only if the tensors are other objects than the last time."""
        known = self._known
        if known is None or known[0].keys() != tensors.keys() or any(known[0][n] is not t for n, t in tensors.items()):
            self._known = known = dict(tensors), table_of(tensors)
        return known[1]
