"""Give a rank whose state is lost the exact weights of a data-parallel peer, if its pipeline stage is not lost whole.

CheckFree (section 4) loses whole stages. With data parallelism, a lost rank has peers whose model has the same weights.
Until the optimizer of the next step runs, these are the weights of the last committed step. The lost rank takes them
over, and begins with new moments for the optimizer shard that only it had. Optimizer state that is not sharded and the
states of the random number generators come from the peer, too, because they have to be the same on both.
"""

import time
from typing import TYPE_CHECKING, Any

import torch

from ft.base import events
from ft.base.errors import FallbackError
from ft.job.messages import Repair
from ft.state.snapshot import rng
from ft.systems.checkfree import transfer
from megatron.core import parallel_state

if TYPE_CHECKING:
    from ft.protection.training_state import TrainingState
    from ft.systems.checkfree.settings import Settings
    from ft.worker.session import Session


class PeerWeights:
    """Lends and takes weights on one rank.

    Args:
        session: this worker's place in the run.
        subject: model, optimizer and schedule.
        settings: settings of CheckFree.

    Attributes:
        may_lend: whether a peer can go on with this rank's weights. With ``--overlap-param-gather`` some weights of a
            step arrive in the next one only. With several distributed optimizer instances, ranks of different instances
            have the same shard, and one with new moments would differ from its twin. With
            ``--data-parallel-random-init``, peers draw different random numbers.
    """

    def __init__(self, session: "Session", subject: "TrainingState", settings: "Settings"):
        self._session, self._subject, self._settings = session, subject, settings
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._device = next(subject.chunks[0].parameters()).device
        configured = [chunk.ddp_config for chunk in subject.chunks]
        self.may_lend = not settings.draws_apart and not any(
            each.overlap_param_gather or each.num_distributed_optimizer_instances > 1 for each in configured
        )

    def lend(self, order: Repair, envelope: dict[str, Any]) -> None:
        """Send this rank's weights to the ranks that take them; these have to call :meth:`take` at the same time."""
        to = [rank for rank, peer in order.lent.items() if peer == self._session.rank]
        if to:
            transfer.lend(sorted(to), self._group, self._state(), envelope)

    def take(self, step: int, peer: int) -> dict[str, Any]:
        """Take the weights of ``step`` from logical rank ``peer``; return the peer's envelope.

        Raises:
            FallbackError: the peer's model or optimizer differs from this rank's.
        """
        began = time.monotonic()
        ((blocks, envelope),) = transfer.borrow([peer], self._group, self._device)
        own = self._state()
        if [_shapes(block) for block in blocks] != [_shapes(block) for block in own]:
            raise FallbackError(f"the weights of data-parallel peer {peer} are not those of this rank's model")
        with torch.no_grad():
            for name, held in own[0].items():
                held.copy_(blocks[0][name])
        self._subject.optimizer.reload_model_params()
        self._subject.take_over(envelope, blocks[1])
        rng.restore({name: held.cpu().numpy().tobytes() for name, held in blocks[2].items()})
        self._session.observe(
            events.STAGE_REBUILT,
            step=step,
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            strategy=f"weights of rank {peer}",
            weights=[],
            neighbours=[peer],
            note="",
            seconds=round(time.monotonic() - began, 4),
        )
        return envelope

    def _state(self) -> transfer.Blocks:
        """Return the model's weights, the optimizer state that is not sharded, and the generators' states as bytes."""
        states = {name: torch.frombuffer(bytearray(blob), dtype=torch.uint8) for name, blob in rng.blobs().items()}
        on_device = {name: held.to(self._device) for name, held in states.items()}
        return [self._subject.weights(), self._subject.unsharded(), on_device]


def _shapes(block: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (held.shape, held.dtype) for name, held in block.items()}
