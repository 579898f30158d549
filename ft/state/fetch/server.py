"""Server that sends this rank's training state to the same rank of replicas that are behind, while training continues.

A replica is a full copy of the model with its own ranks (FT-HSDP, section 4.3). The state is sent from memory.
"""

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
        self._shelf = Shelf()
        self._known: tuple[dict[str, torch.Tensor], Table] | None = None
        self._door = Listener(host, functools.partial(Handler, Host(self._shelf, token, replica, rank)))
        self.address = self._door.where

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
        self._shelf.put(Offer(Envelope.of(step, lineage, envelope), table, dict(tensors), prepare(tensors)))

    def withdraw(self, wait_s: float = 0.0) -> list[Cut]:
        """End the offer: the tensors may change once this has returned.

        Args:
            wait_s: seconds to wait for fetches under way. New fetches are refused meanwhile.

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
        """Serve an envelope (the JSON values of a state) without tensors, until another envelope replaces it.

        Args:
            step: the values are those of the end of this step.
            lineage: number of the quorum in which the step was committed.
            envelope: the values.
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
        """Return the layout of ``tensors``, from a cache if they are the same objects as at the last call."""
        known = self._known
        if known is None or known[0].keys() != tensors.keys() or any(known[0][n] is not t for n, t in tensors.items()):
            self._known = known = dict(tensors), table_of(tensors)
        return known[1]
