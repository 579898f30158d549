"""The interface of the operations of a recovery on a worker's process groups, snapshots and training state.

:class:`ft.systems.hot_swap.recovery.Recovery` decides on the order of the operations.
:class:`ft.systems.hot_swap.recovery_manager.RecoveryManager` carries the operations out in production;
``tests/simulation`` has a model of them. Every operation that may block or take long is a coroutine. In production it
blocks the training thread and raises ``EpochClosed`` as soon as the control plane closes the epoch.
"""

from typing import Any, Protocol

from ft.job.messages import GroupReport, Holdings, Neighbours, Repair, Source


class Operations(Protocol):
    """The operations of one worker.

    Attributes:
        shards: names of the logical shards that only this worker's rank owns.
    """

    shards: list[str]

    @property
    def step(self) -> int:
        """Return the last committed step of the live state, as given by the trainer's position."""

    async def train(self) -> Any:
        """Run the training loop from the position to its end, and return its result."""

    def inject(self, phase: str) -> None:
        """Inject the faults that are planned at this point of the step or of the recovery."""

    # --- process groups ----------------------------------------------------------------------------------------------

    def group_reports(self) -> list[GroupReport]:
        """Return the reports of all process groups of this worker."""

    def group_topology(self) -> str:
        """Return a digest of the names and members of all process groups."""

    def drop_groups(self) -> None:
        """Release the connections of interrupted groups: no earlier operation can write into a buffer afterwards."""

    async def rebuild_groups(self, order: Repair) -> float:
        """Connect the groups that ``order`` names in the worker's epoch, and allow operations again.

        Returns:
            duration in seconds.
        """

    def start_fence(self) -> Any:
        """Start an all-reduce over all ranks, and return its handle."""

    async def wait_for_fence(self, fence: Any) -> None:
        """Wait until all ranks have started the all-reduce."""

    async def wait_for_device(self) -> None:
        """Wait until the device has finished all work that the training thread has started."""

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def holdings(self) -> Holdings:
        """Return the steps of the complete snapshots on this worker."""

    def take_snapshot(self, step: int) -> None:
        """Start to copy the live state of ``step`` into host memory and to the peers."""

    async def wait_for_snapshot(self) -> None:
        """Wait until this worker and all peers have the last snapshot."""

    async def settle_snapshots(self) -> None:
        """Cancel all transfers of the closed epoch: afterwards the snapshots on this worker do not change."""

    def forget_moved_copies(self) -> None:
        """Drop the peer copies of owners that now send their copies to other workers."""

    # --- the training state ------------------------------------------------------------------------------------------

    def prepare_restore(self, order: Repair) -> None:
        """Abandon the interrupted step, and adopt the addresses and the holders of snapshots of the new epoch."""

    async def restore_snapshot(self, step: int, source: Source, keep: bool) -> tuple[Any, dict[str, str]]:
        """Restore the state of ``step`` from a snapshot.

        Args:
            step: step of the snapshot.
            source: ranks to take the snapshot from.
            keep: whether the live tensors are still those of ``step``, so that they need not be written.

        Returns:
            (the trainer's position, the sources of the state: {"owned": "own" or "copy:RANK", "replicated": ...}).
        """

    async def rebuild_stage(self, step: int, beside: Neighbours) -> tuple[Any, dict[str, str]]:
        """Rebuild this rank's part of a lost pipeline stage from the neighbouring stages (CheckFree).

        The neighbouring stages have to call ``lend_stage`` at the same time.

        Args:
            step: step of the restored state.
            beside: logical ranks of the previous and the following stage.

        Returns:
            a pair as ``restore_snapshot`` returns it.
        """

    async def take_weights(self, step: int, peer: int) -> tuple[Any, dict[str, str]]:
        """Take the weights of ``step`` from the live model of a data-parallel peer, because this rank's state is lost.

        The peer has to call ``lend_weights`` at the same time.

        Args:
            step: step of the restored state.
            peer: logical rank of the data-parallel peer.

        Returns:
            a pair as ``restore_snapshot`` returns it.
        """

    async def lend_weights(self, order: Repair) -> None:
        """Send the weights of this rank's live model to the data-parallel peers that take them, if there are any."""

    async def forget_state(self, step: int, teller: int) -> tuple[Any, dict[str, str]]:
        """Give the state up, because this replica is going to fetch that of another replica. All ranks have to call it.

        Args:
            step: step whose position all ranks take.
            teller: logical rank whose own snapshot has that position.

        Returns:
            a pair as ``restore_snapshot`` returns it, with the source ``ELSEWHERE``.
        """

    async def publish_parameters(self) -> None:
        """Copy the optimizer's main parameters to the model parameters. All ranks have to call it."""

    async def lend_stage(self, order: Repair) -> bool:
        """Send this rank's state to the ranks that are rebuilt. Return whether this rank's state is still that of the
        step.
        """

    def continue_from(self, position: Any, order: Repair) -> None:
        """Set the trainer's position, and choose the peers that the next snapshots are copied to."""

    # --- the course of the run ---------------------------------------------------------------------------------------

    def begins_epoch(self) -> None:
        """Adopt the list of already injected faults from the worker's epoch, before the first step of the epoch."""

    def has_committed(self, step: int) -> None:
        """Do the work that follows when all ranks have committed ``step``."""
