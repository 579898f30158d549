"""FT-HSDP around a training loop: each step runs in a quorum of replicas, and all ranks of a replica commit it or none.

A replica is a full copy of the model on its own ranks. The quorum of a step consists of the healthy replicas, which
contribute gradients, and the replicas that are behind, which fetch the state of a healthy one. The gradients are
exchanged in a ring, between those ranks of all replicas that have the same number. Before the optimizer step the ranks
of a replica vote; if the exchange has failed on any of them, the replica repeats the step (FT-HSDP, section 4.1).

The quorum is agreed on a thread of its own (the agreement thread) while the training thread computes.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ft.base.errors import UserError
from ft.job.messages import WorkerResumed
from ft.job.quorum import Quorum, Report
from ft.job.replicas.deadlines import Pause, StepTimes, fetch_wait, ring_wait
from ft.protection.contract import Layer
from ft.systems.hsdp import lr
from ft.systems.hsdp.agreement import Agreed
from ft.systems.hsdp.components import Components
from ft.systems.hsdp.digest import digest
from ft.systems.hsdp.last_save import LastSave, is_due
from ft.systems.hsdp.retry import Retry, RunIsOver
from ft.systems.hsdp.rings import is_same_ring
from ft.systems.hsdp.votes import Votes
from ft.worker import protocol

_LEAVE_S = 2.0


class ReplicaManager(Layer):
    """The trainer's only interface to FT-HSDP, on one rank. The trainer calls its methods at fixed points of each
    training step.

    Args:
        parts: the components of this rank, such as its ring, its process group for votes and its state server.
        load: loads the last persistent checkpoint, if no replica has a state any more. Returns False if there is no
            checkpoint; the run then starts from the beginning.
        rehearse: computes the forward and backward pass of one step and discards the result.
        last_save: functions that write the final checkpoint of the run; None: no final checkpoint is written here.
    """

    def __init__(
        self,
        parts: Components,
        load: Callable[[], bool],
        rehearse: Callable[[], None],
        last_save: LastSave | None = None,
    ):
        self._parts, self._load, self._rehearse, self._last_save = parts, load, rehearse, last_save
        self.session, self._place, self._position = parts.session, parts.place, parts.position
        self._exchange, self._catch_up, self._work = parts.exchange, parts.catch_up, parts.work
        self._has_state = not parts.place.comes_back
        self._agreed: Agreed | None = None
        self._last: Quorum | None = None
        self._start: dict[str, Any] | None = None
        # For the record of a step: (lineage, position in the sample stream) before it, digest of its parameters.
        self._before: tuple[int, int | None] = (0, None)
        self._computed_with: int | None = None
        self._suspects: tuple[int, ...] = ()
        # _is_sure: this replica computes the next step without waiting for its quorum (see ``begins``).
        # _is_untouched: no fetch has written into the initial state of this process.
        self._is_sure = self._is_catching_up = False
        self._is_untouched = True
        self._wait_s, self._said = parts.place.wait_s, ""
        self._pause = Pause()
        # _aside: in this step a replica may be busy with something else, or slow, so the ring gets a longer time limit.
        self._aside = True  # the first step may take long on every replica
        self._step_times = StepTimes()
        self._began = time.monotonic()
        self._votes = Votes(parts.votes)
        self.session.when_closed(self._on_close)

    # --- what the trainer calls --------------------------------------------------------------------------------------

    def run_with_recovery(self, work: Callable[[], Any]) -> Any:
        """Run ``work``, the training loop, to its end and return its result. Call it again after every failed step."""
        session = self.session
        session.link.send(WorkerResumed(session.worker, session.epoch, self._position.step))
        session.progress.begins(self._position.step)
        if self._has_state:
            self._offer()
        else:
            self._warm_up()
        try:
            result = self._attempt(work)
            self._leaves()
        except Exception as error:
            protocol.run(protocol.report_failure(session, self._position.step, error))
            raise SystemExit(1) from error
        self._finish()
        return result

    def _attempt(self, work: Callable[[], Any]) -> Any:
        retry = None
        while True:
            try:
                if retry is not None:
                    self._begin_anew(retry)
                return work()
            except Retry as failed:
                retry = failed
            except RunIsOver:
                return None

    def begins(self) -> bool:
        """Begin a step: ask for its quorum, and return whether this replica computes the step.

        If this replica has committed the previous step as a healthy member, it does not wait for the quorum; it starts
        to compute at once, as if the quorum were unchanged. Otherwise it waits. If the quorum finds that no replica has
        a state, this replica loads a checkpoint and asks again.

        Returns:
            True: the replica computes the step. False: it is behind, and catches up in this step (:meth:`catching_up`).

        Raises:
            RunIsOver: the other replicas have finished the run.
            SystemExit: there is no quorum for this replica.
        """
        self.at("between")
        self._began = time.monotonic()
        while True:
            self._exchange.begin()
            if self._is_sure:
                self._plan(None)
            self._parts.agreement.ask(self._report(), self._on_agreed)
            if self._is_sure:
                return True
            with self.session.progress.at("aside", "quorum"):
                agreed = self._parts.agreement.wait()
            if agreed.quorum is None:
                raise SystemExit(f"replica {self._place.replica} has no quorum: {agreed.problem}")
            if agreed.quorum.finished:
                raise RunIsOver("the other replicas have finished")
            if not agreed.quorum.load:
                break
            self._begin_from_checkpoint()
        self._is_catching_up = self._place.replica not in agreed.quorum.healthy
        if not self._is_catching_up:
            self._plan(agreed.quorum)
        return not self._is_catching_up

    def _plan(self, quorum: Quorum | None) -> None:
        self._work.plan(quorum)
        self._exchange.work = self._work

    def catching_up(self) -> None:
        """Begin a catch-up step: start to fetch the state. The trainer then contributes zero gradients meanwhile."""
        self._is_untouched = False
        self._catch_up.begin(self._agreed, keeps_state=self._has_state)
        self._at_return("restore")

    def caught_up(self) -> None:
        """End a catch-up step, after the zero gradients and before the update: wait for the fetched state and apply it.

        Raises:
            Retry: not all ranks of the replica could fetch their state.
        """
        self._parts.server.withdraw()  # this replica's older state, which is about to be overwritten
        with self.session.progress.at("aside", "fetch"):
            self._catch_up.end()
        self._has_state, self._start = True, self._parts.state.whole()[1]

    def share(self, samples: int) -> int:
        """Return how many of the ``samples`` of the global batch this replica computes in this attempt at the step."""
        return self._work.share(samples)

    def reduce(self, reported: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sum the loss over all replicas. On pipeline stages other than the last, return ``reported`` unchanged.

        Args:
            reported: for each microbatch of this replica, a tensor [loss sum, number of tokens].

        Returns:
            A list of one tensor [loss sum, number of tokens]: the sum over the replicas that compute the step. If the
                exchange fails, the tensor holds the values of this replica alone, and the step is repeated.
        """
        if not self._parts.is_last_stage:
            return reported
        total = torch.stack(reported).sum(dim=0) if reported else torch.zeros(2, device=self._parts.device)
        if not self._is_catching_up:
            total = self._work.add_kept(total)
        self._exchange.add_up(total)
        return [total]

    def saves(self, step: int, *, is_due: bool, ends: bool) -> bool:
        """Return whether this replica writes the checkpoint of ``step``. The healthy replicas take turns.

        Args:
            step: number of the step.
            is_due: whether a checkpoint is to be written after this step.
            ends: whether the run ends with this step; the first healthy replica then writes.
        """
        if not is_due:
            return False
        self._aside = True
        healthy = self._agreed.quorum.healthy if self._agreed else (self._place.replica,)
        turn = 0 if ends else step // (self._parts.save_interval or 1)
        is_mine = healthy[turn % len(healthy)] == self._place.replica
        if is_mine:
            self._goes_aside()
        return is_mine

    def at(self, phase: str) -> None:
        """Inject the faults that are planned for this phase of the current step. Without planned faults the call costs
        no time.

        Evaluating and saving are not part of a step, so peers are notified to wait longer for this replica.
        """
        if phase in ("evaluate", "save"):
            self.session.progress.aside(phase)
            self._goes_aside()
        self._parts.injector.at(phase, self._position.step + 1)

    def _goes_aside(self) -> None:
        """Announce that this replica is busy with other work than a step, so that peers wait longer for it."""
        self._aside = True
        if self._parts.client is not None:
            self._parts.client.aside()

    def _at_return(self, phase: str) -> None:
        """Inject the faults that are planned for this phase of a replica's return. The returning replica and the
        healthy replicas call it."""
        self._parts.injector.at(phase, self._agreed.quorum.step + 1)

    def committed(self) -> None:
        """End a committed step, after the trainer has evaluated and saved: offer the new state to replicas that are
        behind, and write the record of the step."""
        quorum, position, step = self._agreed.quorum, self._position, self._position.step
        if quorum.behind:
            self._at_return("resume")
        if self._is_catching_up:
            self._catch_up.settle(self._agreed, step)
            self._catch_up.tell(step)
        self._has_state, self._suspects = True, ()
        self._is_sure = not self._is_catching_up
        self._offer()
        seconds = time.monotonic() - self._began
        proofs = self._digest(self._parts.state.tensors), self._computed_with
        self._parts.records.committed(
            position, quorum, self._work, *self._before, seconds, self._exchange.waited_s, *proofs
        )
        if not self._is_catching_up:
            self._step_times.add(seconds, self._work.units)
        self._is_catching_up = False
        self.session.progress.committed(step)

    # --- the quorum ---------------------------------------------------------------------------------------------------

    def _begin_from_checkpoint(self) -> None:
        if not self._load() and not self._is_untouched:
            raise SystemExit("no replica has a state, there is no checkpoint: this worker starts anew to begin the run")
        self._has_state = True
        self._offer()

    def _warm_up(self) -> None:
        """Compute a step and discard it, before this replica joins a quorum. The first step of a process takes longer
        than later ones, and the other replicas would have to wait (FT-HSDP, section 5)."""
        self._exchange.begin()
        self._exchange.give_up("this is a rehearsal")
        with self.session.progress.at("aside", "rehearsal"), contextlib.suppress(UserError):  # no data left
            self._rehearse()
        self._parts.subject.abandon_step()

    def _report(self) -> Report:
        position = self._position
        return Report(
            replica=self._place.replica,
            life=self._place.life,
            next_step=position.step if self._has_state else 0,
            lineage=position.lineage if self._has_state else -1,
            suspects=self._suspects,
            step_s=self._step_times.of(self._work.units),
        )

    def _on_agreed(self, agreed: Agreed) -> None:
        """Connect the ring to the members of the quorum, if they have changed, and start to exchange the gradients that
        are complete. If this replica cannot take part in the step, end the exchange instead.

        Runs on the agreement thread.
        """
        self._agreed, quorum = agreed, agreed.quorum
        if quorum is None or quorum.load or quorum.finished:
            self._exchange.give_up(agreed.problem or "no step to do")
            return
        if self._is_sure and self._place.replica not in quorum.healthy:
            self._steps_out(agreed, "the others have gone on without this replica")
            return
        problem = self._work.problem(quorum, self._is_sure) if self._place.replica in quorum.healthy else ""
        self._parts.ring.expect(ring_wait(self._step_times.of(self._work.units), is_aside=self._aside))
        if not is_same_ring(self._last, quorum):
            self._connect(agreed)
        self._last = quorum
        if problem:
            self._exchange.give_up(problem)
        else:
            self._exchange.open(1.0 if self._parts.per_token else self._work.scale(quorum))

    def _steps_out(self, agreed: Agreed, reason: str) -> None:
        """Leave a quorum without contributing. Runs on the agreement thread.

        The ring is connected first, so that peers see this replica close the connection; otherwise they would wait for
        it to join.
        """
        self._agreed, quorum = agreed, agreed.quorum
        if quorum is not None and not quorum.load and not quorum.finished:
            self._connect(agreed)
            self._last = quorum
        self._exchange.give_up(reason)

    def _connect(self, agreed: Agreed) -> None:
        quorum = agreed.quorum
        addresses = [agreed.rows[replica][self.session.rank]["ring"] for replica in quorum.members]
        self._parts.ring.reconfigure(quorum.number, addresses, quorum.members.index(self._place.replica))

    # --- the update ---------------------------------------------------------------------------------------------------

    def update(self, step: Callable[[], Any]) -> Any:
        """Vote, and then run the optimizer ``step`` with the learning rate scaled for the number of healthy replicas.

        Raises:
            Retry: a rank of this replica does not have all gradients; the step is repeated.
        """
        self._vote()
        quorum = self._agreed.quorum
        at = None if self._is_catching_up else self._position.began_at(self._parts.batch)
        self._before = self._position.lineage, at
        self._computed_with = None if self._is_catching_up else self._digest(self._parts.state.parameters)
        with lr.scaled(self._parts.optimizer.param_groups, self._work.lr_factor(quorum)):
            outcome = step()
        if self._is_catching_up and not outcome[0]:
            self._publish()
        self._position.advance(self._work.streams(quorum), self._parts.batch, quorum.number)
        self._work.committed(quorum)
        return outcome

    def _publish(self) -> None:
        """Copy the optimizer's main parameters of a fetched state to the model, if no optimizer step does it.

        Must not be called before the gradients of the step are exchanged: until then megatron-core assumes that the
        model's parameters are already gathered.
        """
        self._parts.subject.publish_parameters()

    def _digest(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> int | None:
        return digest(tensors(), self._parts.votes) if self._place.digests else None

    def _vote(self) -> None:
        """Let the ranks of this replica agree that all of them have all gradients of the step, then withdraw the
        offered state, because the optimizer is about to change it.

        Raises:
            Retry: a rank does not have all gradients. Raised on all ranks.
        """
        if self._agreed.quorum is not None and self._agreed.quorum.behind and not self._is_catching_up:
            self._at_return("restore")
        problem = self._exchange.problem
        self.at("vote")
        if not self._votes.all(not problem):
            if problem and self.session.rank:
                print(f"step {self._position.step + 1}: {problem}", flush=True)
            raise Retry(problem or "another rank of this replica has not got all gradients")
        self._end_offer()
        self.at("optimizer")

    def _end_offer(self) -> None:
        """Stop offering the state, because the optimizer is about to change it. If a replica is fetching the state,
        wait for it, for a limited time; if that was too short, the next wait is twice as long."""
        is_wanted, was_cut = bool(self._agreed.quorum.behind), False
        if is_wanted:
            self._goes_aside()
            with self.session.progress.at("aside", "a replica that fetches"):
                was_cut = bool(self._parts.server.withdraw(self._wait_s))
        else:
            self._parts.server.withdraw()
        self._wait_s = fetch_wait(self._wait_s, self._place.wait_s, is_wanted=is_wanted, was_cut=was_cut)
        self._aside = is_wanted  # in the next step, other members of the ring may still be waiting for a fetch

    def _offer(self) -> None:
        """Offer the state of the last committed step to replicas that are behind, and remember its non-tensor part,
        from which another attempt at the next step starts."""
        tensors, self._start = self._parts.state.whole()
        self._parts.server.offer(self._position.step, self._position.lineage, tensors, self._start)

    def _begin_anew(self, retry: Retry) -> None:
        """Discard the failed attempt at a step and restore the state before it. Called on all ranks of the replica.

        Raises:
            SystemExit: attempts have failed for so long (1800 s) that only a restart from a checkpoint can help.
        """
        self._is_sure = False
        quorum = self._agreed.quorum
        self._suspects = self._votes.suspects(self._exchange.suspect, () if quorum is None else quorum.members)
        said = f"step {self._position.step + 1} is done anew: {retry}"
        if self.session.rank == 0 and said != self._said:
            print(said, flush=True)
        self._said = said
        if not self._is_catching_up:
            self._work.failed()
        self._parts.subject.abandon_step()
        was_catching_up, self._is_catching_up = self._is_catching_up, False
        if self._has_state:
            if was_catching_up:
                self._publish()
            self._parts.state.apply(self._start)
            if was_catching_up:
                self._offer()
        with self.session.progress.at("aside", "another attempt") if self._work.pause_s else contextlib.nullcontext():
            in_vain_s = self._pause.take(self._work.pause_s)
        if in_vain_s is not None:  # the restarted workers load a checkpoint
            raise SystemExit(f"{self._said}, for {in_vain_s:.0f} s")
        self.session.progress.begins(self._position.step)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _on_close(self, epoch: int, reason: str) -> None:
        """Leave the quorum and the ring, because a worker of this replica was lost. Peers detect this at once."""
        if self._parts.client is not None:
            self._parts.client.leave(reason)
        self._exchange.give_up(reason)

    def _see_to(self, last: LastSave) -> None:
        def is_there() -> bool:
            return self._votes.all(last.is_there(self._position.step))

        if is_due(self._place.replica, is_there, self._meet_at_end) and not self.session.closed:
            self.at("save")
            last.write()

    def _meet_at_end(self) -> Quorum | None:
        """Return the quorum of the replicas that are left after the last step; None if there is none.

        A replica that is still training finds this replica's ring closed, and asks for another quorum.
        """
        self._parts.agreement.ask(self._report(), self._on_end)
        with self.session.progress.at("aside", "the last checkpoint"):
            return self._parts.agreement.wait().quorum

    def _on_end(self, agreed: Agreed) -> None:
        self._steps_out(agreed, "this replica has done its last step")

    def _leaves(self) -> None:
        """Wait, after the last step, until the other replicas have its gradients, for 2 s at most.

        If the run ends with a checkpoint, wait until it is complete, and write it if it is this replica's turn.
        """
        self.session.progress.idles("done")
        if self._has_state and self._last is not None:
            self._exchange.take_leave(_LEAVE_S)
            if self._last_save is not None:
                self._see_to(self._last_save)

    def _finish(self) -> None:
        self.session.progress.idles("done")
        self._parts.finish(self._report())
        protocol.run(protocol.finish(self.session, self._position.step))
        self._parts.close()
