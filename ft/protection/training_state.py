"""What is protected: megatron-core's model chunks, optimizer and schedule of one rank."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ft.state.grid import groups_like
from ft.state.snapshot import capture
from ft.state.snapshot.state import RankState
from megatron.core import parallel_state
from megatron.patches import instances, releases, step_state


class TrainingState:
    """The live objects of one rank; they survive every recovery.

    Args:
        chunks: ``DistributedDataParallel`` model chunks. optimizer: of core. scheduler: anything with
            ``state_dict`` and ``load_state_dict``, or None.

    Raises:
        UserError: the optimizer's step is one that a worker which joins later cannot take part in.

    Attributes:
        shards: names of the logical shards that this rank alone owns.
        dp_peers: logical ranks that hold the same part of the model, in ring order, this one among them.
        dp_groups: those of all ranks.
    """

    def __init__(self, chunks: Sequence, optimizer: Any, scheduler: Any = None):
        releases.refuse_captured_update(optimizer)
        self.chunks, self.optimizer, self.scheduler = list(chunks), optimizer, scheduler
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.dp_peers = dist.get_process_group_ranks(group)
        self.dp_groups = groups_like(self.dp_peers, "dp-cp")
        tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        self.shards = [f"optimizer tp{tp} pp{pp} dp{self.dp_peers.index(dist.get_rank())}"]
        self._capture = capture.Capture(self.chunks, optimizer, scheduler, alone=len(self.dp_peers) == 1)

    def before_update(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called before each optimizer step: the last moment at which nothing has changed."""

        def step_after_callback(step, *args, **kwargs):
            callback()
            return step(*args, **kwargs)

        instances.around(self.optimizer, "step", step_after_callback)

    @property
    def copies_are_complete(self) -> bool:
        """Whether a peer copy of this rank's snapshot holds all of its state."""
        return self._capture.copies_are_complete

    def state(self, position: dict[str, Any]) -> RankState:
        """The live tensors with today's envelope; copies nothing but the generators' states."""
        return self._capture.state(position)

    def apply_envelope(self, restored: RankState) -> dict[str, Any]:
        """Puts everything beside the tensors back; returns the trainer's position."""
        return self._capture.apply(restored)

    def adopt(self, envelope: dict[str, Any]) -> dict[str, Any]:
        """Goes on where another pipeline stage stands, with an optimizer that begins anew; returns the position."""
        return self._capture.adopt(envelope)

    def abandon_step(self) -> None:
        step_state.abandon_step(self.chunks, self.optimizer)

    def publish_parameters(self) -> None:
        """Collective: model parameters from the optimizer's main copies, on every rank."""
        step_state.publish_parameters(self.chunks, self.optimizer)
