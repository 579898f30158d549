"""Peer-to-peer fetch of training state, by which a restarted replica catches up (FT-HSDP, sections 4.3 and 4.4).

A rank of a replica that is behind pulls the state of the end of step n - 1 from the same rank of healthy replicas
(:mod:`ft.state.transfer`) while these compute step n. Each of these healthy ranks is a source. The state's epoch is its
lineage: the number of the quorum in which its step was committed.

Each source sends an equal share of the bytes of the state (:mod:`ft.state.layout`), and the other sources take
over the share of a source that dies or refuses (:mod:`ft.state.fetch.shares`). A source sends its live tensors, and
withdraws them before they change (:mod:`ft.state.fetch.server`).
"""

from ft.state.fetch.client import BadState, Fetched, FetchRefused, fetch, fetch_envelope
from ft.state.fetch.server import StateServer

__all__ = ["BadState", "FetchRefused", "Fetched", "StateServer", "fetch", "fetch_envelope"]
