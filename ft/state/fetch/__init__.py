"""Catch-up: a rank that is behind takes the state of the end of step n - 1 from the same rank of healthy replicas,
over HTTP, while these compute step n (paper: ft_hsdp, sections 4.3 and 4.4).

The state lies as one run of bytes (:mod:`ft.state.fetch.memory`), of which each source serves an even share; the others
take over from one that dies or refuses (:mod:`ft.state.fetch.shares`). What a connection carries is described in
:mod:`ft.state.fetch.wire`.
"""

from ft.state.fetch.client import Fetched, Limits, fetch, fetch_envelope
from ft.state.fetch.errors import BadState, Refused
from ft.state.fetch.offer import Cut
from ft.state.fetch.server import StateServer

__all__ = ["BadState", "Cut", "Fetched", "Limits", "Refused", "StateServer", "fetch", "fetch_envelope"]
