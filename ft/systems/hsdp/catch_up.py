"""Non-blocking catch-up of an FT-HSDP replica: a replica that is behind fetches the training state of the healthy
replicas while these compute their next step (FT-HSDP, sections 4.3 and 4.4).

Each rank fetches from the same rank of a healthy replica (a source). The replica that is behind contributes zero
gradients to the all-reduce of the step. It receives the result like all others, so that after the fetch and the
optimizer update it has the same state as they have.

A state consists of tensors by name and an envelope, which contains everything else, such as the states of the random
number generators (RNG) and the model's buffers, as JSON values. The number of the quorum in which a step was committed
is the lineage of the state after that step.
"""

import base64
import threading
from typing import Any

import torch

from ft.base import events
from ft.base.errors import FtError
from ft.job.quorum import Quorum
from ft.protection.position import Position
from ft.protection.training_state import TrainingState
from ft.state import fetch
from ft.state.snapshot.optimizers import local
from ft.state.snapshot.state import OWNED, REPLICATED, RankState
from ft.systems.hsdp.place import ReplicaContext
from ft.systems.hsdp.protocol import Agreed, sources
from ft.worker.session import Session


class ReplicaState:
    """The live training state of this rank. After a committed step, the same rank of every other replica has an equal
    state.
    """

    def __init__(self, subject: TrainingState, position: Position):
        self._subject, self._position = subject, position

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live tensors by name."""
        return _named(self._subject.state(self._position.get()))

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the model parameters of this rank by name, as forward passes use them.

        They are not part of the transferred state, because they are derived from the optimizer's main parameters.
        """
        chunks = enumerate(self._subject.chunks)
        return {
            f"chunk{at}/{name}": local(param.detach())
            for at, chunk in chunks
            for name, param in chunk.named_parameters()
        }

    def whole(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the live tensors, and the envelope: counters, scheduler, position, RNG states and buffers as JSON
        values.
        """
        state = self._subject.state(self._position.get())
        blobs = {name: base64.b64encode(blob).decode() for name, blob in state.blobs.items()}
        return _named(state), {"envelope": state.envelope, "blobs": blobs}

    def apply(self, envelope: dict[str, Any]) -> None:
        """Restore an envelope that :meth:`whole` has returned. Must be called on all ranks of the replica.

        Raises:
            UserError: the envelope belongs to another model or optimizer.
        """
        blobs = {name: base64.b64decode(text) for name, text in envelope["blobs"].items()}
        position = self._subject.apply(RankState(envelope=envelope["envelope"], blobs=blobs))
        self._position.set(position)


def _named(state: RankState) -> dict[str, torch.Tensor]:
    return {
        f"{section}/{name}": tensor
        for section, tensors in ((OWNED, state.owned), (REPLICATED, state.replicated))
        for name, tensor in tensors.items()
    }


_ENVELOPE_S = 10.0
"""Time limit of the fetch of an envelope, in seconds."""
_BEGIN_S = 0.3
"""Seconds to wait for the sources to register the fetch; less than the shortest time limit of an all-reduce."""


class CatchUp:
    """Catch-up of one rank. A catch-up belongs to one step; if it fails, it is repeated in the next step.

    A replica that has an old state keeps it until the new one has arrived on all of its ranks; until then, the fetched
    tensors are kept in host memory. Without an old state, the tensors are fetched directly into the live ones.

    Args:
        limit_s: time limit of a fetch in seconds. A source may end it earlier, because it delays its own optimizer
            update for a fetch only for a limited time.
    """

    def __init__(self, session: Session, place: ReplicaContext, state: ReplicaState, limit_s: float = 600.0):
        self._session, self._replica, self._token = session, place.replica, place.token
        self._state, self._limit_s = state, limit_s
        self._thread: threading.Thread | None = None
        self._fetched: fetch.Fetched | None = None
        self._envelope: dict[str, Any] = {}
        self._staging: dict[str, torch.Tensor] | None = None
        self._problem = ""
        self._has_begun = threading.Event()

    def begin(self, agreed: Agreed, *, keeps_state: bool) -> None:
        """Begin to fetch the state with which the step of the quorum begins, in a thread.

        Return when every source has registered the fetch, or after 0.3 s. The other replicas cannot end their step
        before this replica has contributed its zero gradients, and a source that has registered a fetch waits for its
        end, for a limited time, before it changes its state.

        Args:
            keeps_state: whether this replica has a state, which it keeps until the new one is complete.
        """
        self._fetched, self._problem = None, ""
        self._has_begun.clear()
        live = self._state.tensors()
        self._staging = {name: torch.empty_like(t, device="cpu") for name, t in live.items()} if keeps_state else None
        into, addresses = self._staging or live, self._sources(agreed)
        self._thread = threading.Thread(
            target=self._fetch, args=(agreed.quorum, addresses, into), name="ft-hsdp-fetch", daemon=True
        )
        self._thread.start()
        self._has_begun.wait(_BEGIN_S)

    def wait(self) -> str:
        """Wait for the end of the fetch, and return why it has failed, "" if it has not."""
        self._thread.join()
        return "" if self._fetched is not None else self._problem or "the thread of the fetch has failed"

    def end(self) -> None:
        """Wait for the end of a fetch that is under way, so that it no longer writes into tensors."""
        if self._thread is not None:
            self._thread.join()

    def adopt(self) -> None:
        """Replace the live state by the fetched one. Must be called on all ranks of the replica."""
        if self._staging is not None:
            with torch.no_grad():
                for name, tensor in self._state.tensors().items():
                    tensor.copy_(self._staging[name])
            self._staging = None
        self._state.apply(self._fetched.envelope)

    def fetch_rng_and_buffers(self, agreed: Agreed, step: int) -> str:
        """After the commit of ``step``, fetch the parts of the state that a forward pass changes: RNG states and
        buffers. This replica has not run the forward pass of that step.

        Returns:
            "" if these parts were fetched; else the reason why not: for example, the other replicas were lost, or
                have not committed the step.
        """
        addresses = self._sources(agreed)
        lineage = agreed.quorum.number  # ``step`` was committed in this quorum; ``begin`` fetches the state before it
        try:
            self._envelope = fetch.fetch_envelope(addresses, self._token, step, lineage, _ENVELOPE_S)
        except FtError as error:
            return str(error) or type(error).__name__
        return ""

    def adopt_rng_and_buffers(self) -> None:
        """Apply what :meth:`fetch_rng_and_buffers` has fetched. Must be called on all ranks of the replica."""
        self._state.apply(self._envelope)

    def log_caught_up(self, step: int) -> None:
        """Log the event that this rank has caught up."""
        done = self._fetched
        self._session.observe(
            events.CAUGHT_UP, replica=self._replica, step=step, fetch_s=round(done.seconds, 4), bytes=done.bytes
        )

    def _fetch(self, quorum: Quorum, addresses: list[str], into: dict[str, torch.Tensor]) -> None:
        rank = self._session.rank
        try:
            self._fetched = fetch.fetch(
                addresses,
                self._token,
                quorum.step,
                quorum.lineage,
                into,
                self._limit_s,
                rank=rank,
                has_begun=self._has_begun,
            )
        except FtError as error:
            self._problem = str(error)
        finally:
            self._has_begun.set()

    def _sources(self, agreed: Agreed) -> list[str]:
        """Return the addresses of the same rank in the healthy replicas, in the order in which they are tried."""
        rank = self._session.rank
        return [agreed.rows[replica][rank]["fetch"] for replica in sources(agreed.quorum, self._replica, rank)]
