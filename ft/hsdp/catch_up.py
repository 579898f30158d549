"""A replica that is behind takes the state of the others while they compute (paper, sections 4.3 and 4.4)."""

import threading
import time
from typing import Any

from ft import events
from ft.errors import FtError
from ft.hsdp import fetch
from ft.hsdp.agreement import Agreed
from ft.hsdp.retry import Retry
from ft.hsdp.state import ReplicaState
from ft.worker.session import Session

_PAUSE_S = 0.02
_ENVELOPE_S = 10.0


class CatchUp:
    """One rank's part, for one step at a time.

    Args:
        limit_s: for a fetch; the peers' update ends it earlier.
    """

    def __init__(self, session: Session, replica: int, state: ReplicaState, limit_s: float = 600.0):
        self._session, self._replica, self._state, self._limit_s = session, replica, state, limit_s
        self._thread: threading.Thread | None = None
        self._fetched: fetch.Fetched | None = None
        self.problem = ""

    def begin(self, agreed: Agreed) -> None:
        """Begins to fetch the state that ``agreed`` names into the live tensors, in a thread."""
        self._fetched, self.problem = None, ""
        sources = self._sources(agreed)
        self._thread = threading.Thread(target=self._fetch, args=(agreed, sources), name="ft-hsdp-fetch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Waits for the fetch and puts what is no tensor in place; without a state ``problem`` says why."""
        self._thread.join()
        if self._fetched is not None:
            self._state.apply(self._fetched.envelope)

    def settle(self, agreed: Agreed, step: int) -> None:
        """After the commit of ``step``: generators and buffers, which a forward pass moves, as the others have them.

        Raises:
            Retry: nobody has them any more; the state is not the others'.
        """
        lineage, deadline = agreed.quorum.number, time.monotonic() + _ENVELOPE_S
        while True:
            try:
                self._state.apply(self._envelope(agreed, step, lineage))
                return
            except FtError as error:
                if time.monotonic() > deadline:
                    raise Retry(f"the end of step {step} cannot be had: {error}") from error
                time.sleep(_PAUSE_S)

    def tell(self, step: int) -> None:
        """Puts it on record that this rank has caught up."""
        done = self._fetched
        self._session.observe(
            events.CAUGHT_UP, replica=self._replica, step=step, fetch_s=round(done.seconds, 4), bytes=done.bytes
        )

    def _envelope(self, agreed: Agreed, step: int, lineage: int) -> dict[str, Any]:
        return fetch.fetch_envelope(self._sources(agreed), self._session.token, step, lineage, limit_s=_ENVELOPE_S)

    def _fetch(self, agreed: Agreed, sources: list[str]) -> None:
        quorum, deadline = agreed.quorum, time.monotonic() + self._limit_s
        while True:
            try:
                self._fetched = fetch.fetch(
                    sources,
                    self._session.token,
                    quorum.step,
                    quorum.lineage,
                    into=self._state.tensors(),
                    limit_s=max(_PAUSE_S, deadline - time.monotonic()),
                )
                return
            except fetch.Refused as error:
                # A healthy replica offers its state a moment after it has committed: until then it is asked again.
                if not getattr(error, "is_early", False) or time.monotonic() > deadline:
                    self.problem = str(error)
                    return
                time.sleep(_PAUSE_S)
            except FtError as error:
                self.problem = str(error)
                return

    def _sources(self, agreed: Agreed) -> list[str]:
        """The same rank of the healthy replicas, from another one on for every rank, so that all serve alike."""
        healthy, rank = agreed.quorum.healthy, self._session.rank
        turned = [healthy[(rank + self._replica + i) % len(healthy)] for i in range(len(healthy))]
        return [agreed.rows[replica][rank]["fetch"] for replica in turned]
