"""FT-HSDP around a training loop: each step runs in a quorum of replicas, and all ranks of a replica commit it or none.

Before the optimizer step the ranks of a replica vote; if the exchange of gradients has failed on any of them, the
replica repeats the step (FT-HSDP, section 4.1).
The protocol itself is in :mod:`ft.systems.hsdp.protocol`. This module runs it at the moments of the trainer's steps.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ft.base.errors import UserError
from ft.faults.worker import Injector
from ft.job.messages import ASIDE, WorkerResumed
from ft.job.quorum import REPAIRS, QuorumClient, ReplicaNotice
from ft.protection.contract import Layer, StepUndone, Update
from ft.systems.hsdp.components import Components, across_replicas
from ft.systems.hsdp.protocol import LastSave, PassIsOver, Retry, Steps
from ft.systems.hsdp.rank import TrainingRank
from ft.systems.hsdp.samples import ReplicaPosition
from ft.systems.hsdp.work import scaled
from ft.worker import protocol
from megatron import patches
from megatron.core import parallel_state

_REPORTING_RANKS = (0, 1)
"""Ranks that tell the quorum server that a lost worker is being replaced: two, because one of them may be the lost
one."""


class ReplicaManager(Layer):
    """The trainer's only interface to FT-HSDP, on one rank. The trainer calls its methods at fixed points of each
    training step.

    Args:
        load: loads the last persistent checkpoint, if no replica has a state any more. Returns False if there is no
            checkpoint; the run then starts from the beginning.
        rehearse: computes the forward and backward pass of one step and discards the result.
        is_inside: hot-swap is the layer around this one: it reports failures, restores the state from copies, and runs
            the loop again in the next epoch.
    """

    def __init__(
        self,
        parts: Components,
        load: Callable[[], bool],
        rehearse: Callable[[], None],
        last_save: LastSave | None = None,
        is_inside: bool = False,
    ):
        self._parts, self._load, self._rehearse, self._last_save = parts, load, rehearse, last_save
        self.session, self._position, place = parts.session, parts.position, parts.place
        self.session.across_replicas = lambda: across_replicas(parts)
        self.is_inside = is_inside
        self._notice: ReplicaNotice | None = None
        self._last_update = self._position.step  # of which an evaluation or a save is; some trainers set it afterwards
        self._position.has_state = not place.comes_back
        self._goes_on = self.session.joins
        self._make_life(place.life)
        self.session.when_closed(self._on_close)

    def run_with_recovery(self, work: Callable[[], Any]) -> Any:
        """Run ``work``, the training loop, to its end and return its result. Call it again after every failed step."""
        session = self.session
        if not self.is_inside:
            session.link.send(WorkerResumed(session.worker, session.epoch, self._position.step))

        async def attempt() -> Any:
            session.progress.begins(self._position.step)
            result = work()
            if not self._steps.has_state:  # there was no step left in which the state could have been fetched
                raise SystemExit(f"replica {self._parts.place.replica} has lost its state after its last step")
            return result

        session.progress.begins(self._position.step)
        try:
            self._begin_life()
            if not self._steps.has_state:
                self._end_notice()  # the others need not wait: this replica catches up
                self._warm_up()
            result = protocol.run(self._steps.attempts(attempt))
            self._leaves()
        except Exception as error:
            if self.is_inside:
                self._end_life(str(error))
                raise
            protocol.run(protocol.report_failure(session, self._position.step, error))
            raise SystemExit(1) from error
        self._finish()
        return result

    def begins(self) -> bool:
        """Begin a step: ask for its quorum, and return whether this replica computes the step.

        Raises:
            RunIsOver: the other replicas have finished the run.
            SystemExit: there is no quorum for this replica.
        """
        self.at("between")
        computes = protocol.run(self._steps.begins())
        self._end_notice()
        return computes

    def _end_notice(self) -> None:
        if self._notice is not None:
            self._notice.close()
            self._notice = None

    def catching_up(self) -> None:
        """Begin a catch-up step: start to fetch the state. The trainer then contributes zero gradients meanwhile."""
        protocol.run(self._steps.catching_up())

    def caught_up(self) -> None:
        """End a catch-up step, after the zero gradients and before the update: wait for the fetched state and apply it.

        Raises:
            Retry: not all ranks of the replica could fetch their state.
        """
        protocol.run(self._steps.caught_up())

    def compute(self, work: Callable[[], Update]) -> Update:
        """Run the step, first the passes whose gradients are only kept (:attr:`ft.systems.hsdp.work.Work.is_apart`).

        Raises:
            Retry: a layer has found that the step was computed wrongly, when the other replicas had its gradients. They
                may have committed the step; then this replica takes their state.
        """
        try:
            while self._is_apart():
                with contextlib.suppress(PassIsOver):
                    work()
                self._rank.next_pass()
            return work()
        except StepUndone as undone:
            raise Retry(str(undone)) from undone

    def _is_apart(self) -> bool:
        return self._parts.work.is_apart and not self._steps.is_catching_up

    def share(self, samples: int) -> int:
        """Return how many of the ``samples`` of the global batch this replica computes in the present pass."""
        self._rank.computes()
        return self._parts.work.share(samples)

    def reduce(self, reported: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sum the loss over all replicas. On pipeline stages other than the last, return ``reported`` unchanged.

        Args:
            reported: for each microbatch of this replica, a tensor [loss sum, number of tokens].

        Returns:
            A list of one tensor [loss sum, number of tokens]: the sum over the replicas that compute the step. If the
                exchange fails, the tensor holds the values of this replica alone, and the step is repeated.
        """
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return reported
        total = torch.stack(reported).sum(dim=0) if reported else torch.zeros(2, device=patches.platform().device)
        if not self._steps.is_catching_up:
            total = self._parts.work.add_kept(total)
        self._parts.exchange.add_up(total)
        return [total]

    def update(self, step: Callable[[], Any]) -> Any:
        """Vote, and then run the optimizer ``step`` with the learning rate scaled for the number of healthy replicas.

        Raises:
            Retry: a rank of this replica does not have all gradients; the step is repeated.
            PassIsOver: the gradients of this pass are only kept. Caught by :meth:`compute`.
        """
        if self._is_apart():
            raise PassIsOver
        self._vote()
        self._last_update = self._position.step + 1
        self._rank.about_to_update(computed=not self._steps.is_catching_up)
        with scaled(self._parts.optimizer.param_groups, self._parts.work.lr_factor(self._steps.quorum)):
            outcome = step()
        self._steps.updated(is_applied=bool(outcome[0]))
        return outcome

    def _vote(self) -> None:
        protocol.run(self._steps.vote())

    def saves(self, step: int, *, is_due: bool, ends: bool) -> bool:
        """Return whether this replica writes the checkpoint of ``step``. The healthy replicas take turns.

        Args:
            ends: whether the run ends with this step; the first healthy replica then writes.
        """
        return is_due and self._steps.saves(step, self._parts.save_interval or 1, ends)

    def at(self, phase: str) -> None:
        """Inject the faults that are planned for this phase of the current step. Without planned faults the call costs
        no time.

        Evaluating and saving are not part of a step, so peers are notified to wait longer for this replica.
        """
        if phase in ASIDE:
            self.session.progress.aside(phase)
            self._steps.goes_aside()
        if self.is_inside:
            return  # hot-swap injects them
        self._parts.injector.at(phase, self._last_update if phase in ASIDE else self._position.step + 1)

    def committed(self) -> None:
        """End a committed step, after the trainer has evaluated and saved: offer the new state to replicas that are
        behind, and write the record of the step."""
        protocol.run(self._steps.committed())
        self._position.has_state = True

    # --- a life -------------------------------------------------------------------------------------------------------

    def _make_life(self, number: int) -> None:
        place = self._parts.place
        self._rank = TrainingRank(self._parts, self._load)
        self._steps = Steps(
            place.replica, number, self._position.has_state, self._rank, place.wait_s, goes_on=self._goes_on
        )

    def _begin_life(self) -> None:
        """Begin the life of this epoch: a replacement of a worker changes addresses that other replicas know.

        Ranks that have restored states of different quorums, or not all a state, give them up.
        """
        parts = self._parts
        if self.is_inside:
            life = parts.place.life_in(self.session.epoch)
            self._make_life(life)
            self._goes_on = True
            if not self._rank.is_uniform():
                self._position.set(self._position.without_state(self._position.get()))
                self._make_life(life)
            if self.session.rank == 0:
                parts.client = QuorumClient(parts.place.run_dir, parts.place.replica, life, parts.place.token)
        parts.agreement.begin(parts.client, self._position.step if self._position.has_state else 0)

    def _end_life(self, reason: str) -> None:
        """Let go of the other replicas before the state of this one is restored."""
        parts = self._parts
        self._interrupt(reason)
        parts.server.withdraw()
        parts.agreement.end()
        if parts.client is not None:
            parts.client.close()
            parts.client = None
        parts.catch_up.end()

    def _interrupt(self, reason: str) -> None:
        place = self._parts.place
        if place.in_place and self._notice is None and self.session.rank in _REPORTING_RANKS:
            life = place.life_in(self.session.epoch)
            self._notice = ReplicaNotice(place.run_dir, place.replica, life, place.token, REPAIRS)
        client = self._parts.client
        if client is not None:
            client.abandon(reason)
        self._parts.exchange.give_up(reason)

    def estimated(self) -> None:
        """Note that hot-swap has estimated a part of the state that the life of this epoch begins with."""
        self._position.estimate(self._parts.place.life_in(self.session.epoch))

    @property
    def position(self) -> ReplicaPosition:
        return self._position

    @property
    def injector(self) -> Injector:
        return self._parts.injector

    def close(self) -> None:
        """Close the connections to other replicas, and the records, at the end of the run."""
        self._parts.close()

    def _warm_up(self) -> None:
        """Compute a step and discard it, before this replica joins a quorum. The first step of a process takes longer
        than later ones, and the other replicas would have to wait (FT-HSDP, section 5)."""
        self._parts.exchange.begin()
        self._parts.exchange.give_up("this is a rehearsal")
        with self.session.progress.at("aside", "rehearsal"), contextlib.suppress(UserError):  # no data left
            self._rehearse()
        self._parts.subject.abandon_step()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _on_close(self, epoch: int, reason: str) -> None:
        """Leave the quorum and the ring, because a worker of this replica was lost. Peers detect this at once."""
        if self.is_inside:
            self._interrupt(reason)
            return
        if self._parts.client is not None:
            self._parts.client.leave(reason)
        self._parts.exchange.give_up(reason)

    def _leaves(self) -> None:
        """Wait, after the last step, until the other replicas have its gradients, for 2 s at most.

        If the run ends with a checkpoint, wait until it is complete, and write it if it is this replica's turn.
        """
        self.session.progress.idles("done")
        last = self._last_save
        is_saved = None if last is None else lambda: last.is_there(self._position.step)
        if protocol.run(self._steps.leaves(is_saved)) and not self.session.closed:
            self.at("save")
            last.write()

    def _finish(self) -> None:
        session = self.session
        session.progress.idles("done")
        self._parts.finish(self._steps.report())
        if self.is_inside:
            return
        protocol.run(protocol.finish(session, self._position.step))
        self._parts.close()
