"""Runs a worker with hot-swap from its first step to its last, through all recoveries (DEADPOOL, sections V-C and VI-A
to VI-F). This module does no I/O. A recovery has four parts:

    leave   abort every operation; report the snapshots held and the operations that were pending
    enter   take the seats of the next epoch; a worker without a state of its own reports that it has arrived
    repair  rebuild the process groups that need it, and put the state of the restore step in place
    resume  start when all workers are ready and the invariants hold

An epoch that is closed in between sends the worker back to the start of this list.

The methods are coroutines, so that the simulation (``tests/simulation/control``) can run this same code
(:mod:`ft.worker.protocol`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ft.base.errors import EpochClosed
from ft.job.messages import Repair, Resume, WorkerArrived, WorkerReleased, WorkerRepaired, WorkerResumed
from ft.worker import protocol

if TYPE_CHECKING:
    from ft.systems.hot_swap.recovery_manager import RecoveryManager


class WorkerRecovery:
    """The sequence of reports and operations of one worker.

    Attributes:
        is_empty: whether the worker has no training state yet, because it joins a running job.
    """

    def __init__(self, member: protocol.Member, operations: "RecoveryManager"):
        self._member, self._operations = member, operations
        self.is_empty = member.joins
        # whether the live tensors hold the state of the last committed step, unchanged by a step begun since
        self._untouched = not member.joins
        # whether the model has the parameters of that state, too
        self._published = True
        self._fence: Any = None
        self._tidied_epoch = -1

    async def run(self) -> Any:
        """Train to the end with recovery, and return the training loop's result.

        The method returns on all workers or on none: a worker that is done waits for the others, because their recovery
        needs all workers.
        """
        begun = False
        while True:
            try:
                if not begun:
                    begun = True
                    await self._begin()
                self._operations.inject("between")
                result = await self._operations.train()
                await protocol.finish(self._member, self._operations.step)
                return result
            except Exception as error:
                await self._fails(error)
            # Not in the handler: the frames of the exception hold the activations of the interrupted step.
            await self.recover()

    # --- a step ------------------------------------------------------------------------------------------------------

    async def before_update(self) -> None:
        """Wait until the last snapshot is complete on this worker and on all peers; then start the fence.

        Call it before the optimizer changes the state.
        """
        operations = self._operations
        with self._member.progress.at("wait", "snapshot"):
            await operations.wait_for_snapshot()
            if self._fence is not None:  # from an attempt at this step that DMR has undone
                await operations.wait_for_fence(self._fence)
        self._fence = operations.start_fence()
        self._untouched = False
        operations.inject("optimizer")

    @property
    def is_untouched(self) -> bool:
        """Return whether the live state is that of the last snapshot."""
        return self._untouched

    def undoes_step(self) -> None:
        """Note that a layer inside this one has restored the live state of the last snapshot."""
        self._untouched, self._published = True, False

    def replaces_state(self) -> None:
        """Note that a layer inside this one is about to replace the live state by that of another replica."""
        self._untouched = False

    async def committed(self) -> None:
        """Take the snapshot of the step that the trainer's position has reached. All work of that step has to be done.

        No worker overwrites its last but one snapshot until every worker's last snapshot has reached its peers. The
        fence, an all-reduce started before the optimizer step, guarantees this. (To wait only for one's own peers, as
        in DEADPOOL, section VI-A, is not enough: a fast worker would drop the step that a slow dead worker needs.)
        """
        operations, member = self._operations, self._member
        if self._fence is not None:
            await operations.wait_for_fence(self._fence)
            self._fence = None
            self._forget_moved_copies()
        await self._finish_device_work()
        step = operations.step
        operations.has_committed(step)
        self._take_snapshot(step)
        member.progress.committed(step)
        operations.inject("between")

    async def _finish_device_work(self) -> None:
        """Wait for the device, and make sure that no operation of the epoch has been aborted meanwhile.

        The end of an epoch aborts unfinished operations of the device. It then goes on with the work that follows them,
        although their results are wrong; the host notices nothing before it reads a result. The epoch is marked as
        closed before anything is aborted, so all results are right if it is open when the device has finished.

        Raises:
            EpochClosed: the results may be wrong.
        """
        await self._operations.wait_for_device()
        if self._member.closed:
            raise EpochClosed(self._member.closed_epoch, "it ended before the device had finished its work")

    def _take_snapshot(self, step: int) -> None:
        self._operations.take_snapshot(step)
        self._untouched = self._published = True
        self._operations.inject("transfer")

    def _forget_moved_copies(self) -> None:
        """Drop the peer copies of owners that now send their copies to other workers.

        Call it when every worker's first snapshot of the epoch has reached its peers. Until then, the old copies
        protect the run, and are reported as held.
        """
        if self._tidied_epoch < self._member.epoch:
            self._tidied_epoch = self._member.epoch
            self._operations.forget_moved_copies()

    # --- a recovery --------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Take part in recoveries until one succeeds; this worker can then start the first step of an epoch."""
        member = self._member
        while True:
            member.progress.idles("recovery")
            try:
                if member.closed:
                    await self._leave()
                order = await self._await_repair()
                repaired = await self._repair(order)
                await protocol.await_order(member, Resume, repaired)
                self._operations.inject("resume")
            except EpochClosed:
                continue
            except Exception as error:
                await self._fails(error)
                continue
            self._resume()
            return

    async def _leave(self) -> None:
        """Leave the closed epoch, and enter the next one."""
        operations, member = self._operations, self._member
        try:
            await operations.settle_snapshots()
            groups = operations.group_reports()
            operations.drop_groups()
            operations.inject("leave")
        except Exception as error:
            # No operation of the epoch is pending here, so none can have caused the error: this worker may be unfit.
            member.send(protocol.failure(member, operations.step, error))
            raise
        held = replace(operations.holdings(), live=operations.step if self._untouched and self._published else None)
        left = WorkerReleased(member.worker, member.epoch, operations.step, groups, held)
        await protocol.enter_next_epoch(member, left)
        operations.abandon_step()  # while joiners are being built

    async def _await_repair(self) -> Repair:
        """Wait for the order to repair; a worker without a state reports that it has arrived."""
        member, arrived = self._member, None
        if self.is_empty:
            self._operations.inject("assemble")
            groups, inherited = self._operations.group_reports(), self._operations.holdings()
            arrived = WorkerArrived(member.worker, member.epoch, groups, inherited)
        return await protocol.await_order(member, Repair, arrived)

    async def _repair(self, order: Repair) -> WorkerRepaired:
        """Rebuild the process groups and restore the state; return the report of both."""
        operations, member = self._operations, self._member
        operations.inject("rebuild")
        rebuild_s = await operations.rebuild_groups(order)
        operations.inject("restore")
        began = member.progress.clock()
        sources = await self._restore(order)
        await self._finish_device_work()
        mine = {report.name for report in operations.group_reports()}
        rebuilt, deferred = mine & set(order.rebuild), mine & set(order.defer)
        return WorkerRepaired(
            worker=member.worker,
            epoch=member.epoch,
            rank=member.rank,
            step=operations.step,
            topology=member.topology(operations.group_topology()),
            shards=operations.shards,
            rebuilt=len(rebuilt),
            kept=len(mine) - len(rebuilt) - len(deferred),
            deferred=len(deferred),
            sources=sources,
            rebuild_s=rebuild_s,
            restore_s=member.progress.clock() - began,
        )

    async def _restore(self, order: Repair) -> dict[str, str]:
        """Restore the state of the order's step on this worker, and the parameters on all workers together.

        From the next snapshot on, copies are sent to the holders that the new seats require.

        Returns:
            the sources of the state: {"owned": "own" | "copy:RANK" | "rebuilt:RANK[+RANK]" | ELSEWHERE,
                "replicated": ...}.
        """
        operations, rank = self._operations, self._member.rank
        operations.prepare_restore(order)
        as_committed = True
        if order.position_of is not None:
            as_committed = False
            position, sources = await operations.forget_state(order.step, order.position_of)
        elif rank in order.rebuilt:
            self._untouched = False
            position, sources = await operations.rebuild_stage(order.step, order.rebuilt[rank])
            await operations.publish_parameters()
        else:
            if rank in order.lent:
                self._untouched = False
                position, sources = await operations.take_weights(order.step, order.lent[rank])
            else:
                keep = self._untouched and operations.step == order.step
                position, sources = await operations.restore_snapshot(order.step, order.sources[rank], keep)
                if order.lent:
                    await operations.lend_weights(order)
            await operations.publish_parameters(order.live)
            if order.rebuilt:
                self._untouched = (
                    False  # with CheckFree+, a neighbour that lends its parameters changes some of its own state
                )
                as_committed = await operations.lend_stage(order)
        self._untouched, self._published = as_committed, True
        self.is_empty = False
        operations.continue_from(position, order)
        return sources

    def _resume(self) -> None:
        """Start an epoch: snapshot the state to the peers of the epoch's seats, before any step."""
        operations, member = self._operations, self._member
        self._fence = None
        step = operations.step
        member.send(WorkerResumed(member.worker, member.epoch, step, *member.footprint))
        operations.begins_epoch()
        self._take_snapshot(step)
        member.progress.begins(step)

    async def _begin(self) -> None:
        """Start the run on this worker; one that joins a running job begins with a recovery."""
        if self.is_empty:
            await self.recover()
        else:
            self._resume()

    async def _fails(self, error: Exception) -> None:
        """Report an error of this worker; errors that the end of the epoch has caused need no report."""
        await protocol.report_failure(self._member, self._operations.step, error)
