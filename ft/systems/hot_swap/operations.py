"""What a recovery does to a worker's process groups, snapshots and training state: the interface of these operations.

:class:`ft.systems.hot_swap.recovery.Recovery` decides which operation comes when.
:class:`ft.systems.hot_swap.recovery_manager.RecoveryManager` carries the operations out in production; ``ft simulate
control`` has a model of them. Every operation that may block or take long is a coroutine. In production it blocks the
training thread and raises ``EpochClosed`` as soon as the control plane closes the epoch.
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
        """Return the last committed step of the live state, from the trainer's position."""

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
        """Drop copies whose owner now sends them elsewhere."""

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
        """Make this rank's part of a lost pipeline stage from the neighbouring stages (CheckFree). Collective with
        ``lend_stage``. Returns what ``restore_snapshot`` returns."""

    async def publish_parameters(self) -> None:
        """Copy the optimizer's main parameters to the model parameters on every rank. Collective."""

    async def lend_stage(self, order: Repair) -> bool:
        """Send this rank's state to the ranks under rebuild; return whether its own is still that of the step."""

    def continue_from(self, position: Any, order: Repair) -> None:
        """Set the trainer's position, and choose the peers that the next snapshots are copied to."""

    # --- the course of the run ---------------------------------------------------------------------------------------

    def begins_epoch(self) -> None:
        """Adopt what the worker's epoch says of planned faults, before its first step."""

    def has_committed(self, step: int) -> None:
        """Handle the end of ``step`` on every rank."""
