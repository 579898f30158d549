"""The state that is protected: megatron-core's model chunks, optimizer and learning-rate schedule of one rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ft.state.grid import groups_like
from ft.state.snapshot import capture
from ft.state.snapshot.state import RankState
from megatron.core import parallel_state
from megatron.patches import instances, releases, step_state


class TrainingState:
    """The live objects of one rank. They survive every recovery.

    Args:
        chunks: ``DistributedDataParallel`` model chunks.
        optimizer: megatron-core's optimizer.
        scheduler: an object with ``state_dict`` and ``load_state_dict``, or None.

    Raises:
        UserError: a worker that joins later could not take part in the optimizer's step.

    Attributes:
        shards: names of the logical shards that only this rank owns.
        dp_peers: logical ranks that hold the same part of the model, including this rank, in ring order.
        dp_groups: the ``dp_peers`` lists of all ranks.
        role: name of the pipeline stage; all ranks of a stage have the same work in every step.
    """

    def __init__(self, chunks: Sequence, optimizer: Any, scheduler: Any = None):
        releases.refuse_captured_update(optimizer)
        self.chunks, self.optimizer, self.scheduler = list(chunks), optimizer, scheduler
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.dp_peers = dist.get_process_group_ranks(group)
        self.dp_groups = groups_like(self.dp_peers, "dp-cp")
        tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        self.shards = [f"optimizer tp{tp} pp{pp} dp{self.dp_peers.index(dist.get_rank())}"]
        self.role = f"stage {pp}"
        self._capture = capture.Capture(self.chunks, optimizer, scheduler, alone=len(self.dp_peers) == 1)

    def before_update(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called before each optimizer step, the last point at which no state has changed."""

        def step_after_callback(step, *args, **kwargs):
            callback()
            return step(*args, **kwargs)

        instances.around(self.optimizer, "step", step_after_callback)

    @property
    def copies_are_complete(self) -> bool:
        """Return whether a peer copy of this rank's snapshot holds all of its state."""
        return self._capture.copies_are_complete

    def state(self, position: dict[str, Any]) -> RankState:
        """Return the live tensors with a new envelope. Only the states of the random generators are copied."""
        return self._capture.state(position)

    def apply_envelope(self, restored: RankState) -> dict[str, Any]:
        """Restore all state other than the tensors; return the trainer's position."""
        return self._capture.apply(restored)

    def adopt(self, envelope: dict[str, Any]) -> dict[str, Any]:
        """Continue at the step of another pipeline stage, with a fresh optimizer state; return the position."""
        return self._capture.adopt(envelope)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the live parameters and learnt buffers of the model, by name."""
        return {
            f"{number}/{name}": held.detach()
            for number, chunk in enumerate(self.chunks)
            for name, held in (*chunk.named_parameters(), *learnt_buffers(chunk))
        }

    def unsharded(self) -> dict[str, torch.Tensor]:
        """Return the live optimizer tensors that all ranks with the same parameters have bit for bit, by name."""
        return self._capture.unsharded()

    def take_over(self, envelope: dict[str, Any], unsharded: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Continue as a data-parallel peer with that envelope and :meth:`unsharded` tensors; return the position.

        The sharded optimizer state begins anew.
        """
        return self._capture.take_over(envelope, unsharded)

    def abandon_step(self) -> None:
        step_state.abandon_step(self.chunks, self.optimizer)

    def publish_parameters(self) -> None:
        """Copy the optimizer's main parameters to the model parameters. All ranks have to call it."""
        step_state.publish_parameters(self.chunks, self.optimizer)


def learnt_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the state of a model that training changes without a gradient: persistent floating-point buffers, such as a
    router's expert bias.
    """
    for prefix, part in module.named_modules():
        for name, held in part.named_buffers(prefix, recurse=False):
            own = name.rpartition(".")[2]
            if held.is_floating_point() and own not in part._non_persistent_buffers_set:
                yield name, held
