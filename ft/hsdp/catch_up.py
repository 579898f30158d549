"""A replica that is behind takes the state of the others while they compute (paper, sections 4.3 and 4.4)."""

import threading

from ft import events
from ft.errors import FtError
from ft.hsdp import fetch
from ft.hsdp.agreement import Agreed
from ft.hsdp.place import Place
from ft.hsdp.retry import Retry
from ft.hsdp.state import ReplicaState
from ft.worker.session import Session

_ENVELOPE_S = 10.0


class CatchUp:
    """One rank's part, for one step at a time.

    Args:
        limit_s: for a fetch; the peers' update ends it earlier.
    """

    def __init__(self, session: Session, place: Place, state: ReplicaState, limit_s: float = 600.0):
        self._session, self._replica, self._token = session, place.replica, place.token
        self._state, self._limit_s = state, limit_s
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
        sources, lineage = self._sources(agreed), agreed.quorum.number
        try:
            envelope = fetch.fetch_envelope(sources, self._token, step, lineage, _ENVELOPE_S)
        except FtError as error:
            raise Retry(f"the end of step {step} cannot be had: {error}") from error
        self._state.apply(envelope)

    def tell(self, step: int) -> None:
        """Puts it on record that this rank has caught up."""
        done = self._fetched
        self._session.observe(
            events.CAUGHT_UP, replica=self._replica, step=step, fetch_s=round(done.seconds, 4), bytes=done.bytes
        )

    def _fetch(self, agreed: Agreed, sources: list[str]) -> None:
        quorum, rank = agreed.quorum, self._session.rank
        into = self._state.tensors()
        try:
            self._fetched = fetch.fetch(
                sources, self._token, quorum.step, quorum.lineage, into, self._limit_s, rank=rank
            )
        except FtError as error:
            self.problem = str(error)

    def _sources(self, agreed: Agreed) -> list[str]:
        """The same rank of the healthy replicas, from another one on for every rank, so that all serve alike."""
        healthy, rank = agreed.quorum.healthy, self._session.rank
        turned = [healthy[(rank + self._replica + i) % len(healthy)] for i in range(len(healthy))]
        return [agreed.rows[replica][rank]["fetch"] for replica in turned]
