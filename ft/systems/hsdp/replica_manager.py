"""The training run of one FT-HSDP replica: each step belongs to a quorum; all ranks of the replica commit it, or none
does (FT-HSDP, section 4.1)."""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ft.base.errors import UserError
from ft.job.messages import Finish, WorkerDone, WorkerResumed
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
from ft.worker.acknowledged import send_until_acknowledged
from ft.worker.failures import report_failure

_LEAVE_S = 2.0


class ReplicaManager(Layer):
    """The layer through which the trainer uses FT-HSDP.

    Args:
        parts: the objects that it works with on this rank.
        load: loads the newest persistent checkpoint, when no replica has a state any more; returns False if there is
            none: then the run starts from the beginning.
        rehearse: computes a step and discards the results.
        last_save: the checkpoint at the end of the run.
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
        self._before: tuple[int, int | None] = (0, None)
        self._computed_with: int | None = None
        self._suspects: tuple[int, ...] = ()
        self._is_sure = self._is_catching_up = False
        self._is_untouched = True
        self._wait_s, self._said = parts.place.wait_s, ""
        self._pause = Pause()
        self._aside = True  # the first step may take longer on every replica
        self._step_times = StepTimes()
        self._began = time.monotonic()
        self._votes = Votes(parts.votes)
        self.session.when_closed(self._on_close)

    # --- what the trainer calls --------------------------------------------------------------------------------------

    def run_with_recovery(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` to its end; call it again after every step that has to be repeated."""
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
            report_failure(session, self._position.step, error)
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
        """Start a step. Return True if this replica computes it, False if it catches up in it (:meth:`catching_up`).

        Raises:
            RunIsOver: there is no step left to do.
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
        """Start to fetch the state, in the first half of a catch-up step; the trainer exchanges zeros meanwhile."""
        self._is_untouched = False
        self._catch_up.begin(self._agreed, keeps_state=self._has_state)
        self._at_return("restore")

    def caught_up(self) -> None:
        """Put the fetched state in place, after the zeros are exchanged and before the update.

        Raises:
            Retry: not all ranks of the replica can get the state.
        """
        self._parts.server.withdraw()  # an older state, which is overwritten now
        with self.session.progress.at("aside", "fetch"):
            self._catch_up.end()
        self._has_state, self._start = True, self._parts.state.whole()[1]

    def share(self, samples: int) -> int:
        """Return this replica's share of a global batch, in the current attempt at its step."""
        return self._work.share(samples)

    def reduce(self, reported: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sum [loss sum, tokens] of this replica's microbatches over all replicas. Only on last pipeline stages."""
        if not self._parts.is_last_stage:
            return reported
        total = torch.stack(reported).sum(dim=0) if reported else torch.zeros(2, device=self._parts.device)
        if not self._is_catching_up:
            total = self._work.add_kept(total)
        self._exchange.add_up(total)
        return [total]

    def saves(self, step: int, *, is_due: bool, ends: bool) -> bool:
        """Return whether this replica writes the checkpoint of ``step``; the replicas take turns."""
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
        """Inject the faults that are planned at this point of the step; costs nothing if there are none."""
        if phase in ("evaluate", "save"):
            self.session.progress.aside(phase)
            self._goes_aside()
        self._parts.injector.at(phase, self._position.step + 1)

    def _goes_aside(self) -> None:
        """Announce work outside of steps, so that the others wait for this replica longer than for a slow step."""
        self._aside = True
        if self._parts.client is not None:
            self._parts.client.aside()

    def _at_return(self, phase: str) -> None:
        """Inject the faults planned at this point of a replica's return; on returning and on serving replicas."""
        self._parts.injector.at(phase, self._agreed.quorum.step + 1)

    def committed(self) -> None:
        """Handle the end of a step, when the trainer's position counts it and all its work is done."""
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
        """Run a step before others wait for this replica: a process's first step takes longer (FT-HSDP, section 5)."""
        self._exchange.begin()
        self._exchange.give_up("this is a rehearsal")
        with self.session.progress.at("aside", "rehearsal"), contextlib.suppress(UserError):  # if the data is used up
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
        """Switch the ring to the new quorum, and let pending exchanges start. Runs on the agreement thread."""
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
        """Leave a quorum without contributing. Runs on the agreement thread. Reconnects the ring first, so that peers
        see this replica close the connection instead of waiting for it to join."""
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
        """Vote, then run the optimizer's step with the learning rate for the replicas that contribute."""
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
        """Copy a fetched state to the model parameters, if no optimizer step does it: the state has only main
        parameters. Call it after the gradient exchange of the step: until then core considers the model gathered."""
        self._parts.subject.publish_parameters()

    def _digest(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> int | None:
        return digest(tensors(), self._parts.votes) if self._place.digests else None

    def _vote(self) -> None:
        """Vote on the step: continue only if all ranks of the replica have all gradients, and their state.

        Raises:
            Retry: on all ranks of the replica.
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
        """Withdraw the offered state before it changes. Wait for replicas that fetch it; longer after a cut fetch."""
        is_wanted, was_cut = bool(self._agreed.quorum.behind), False
        if is_wanted:
            self._goes_aside()
            with self.session.progress.at("aside", "a replica that fetches"):
                was_cut = bool(self._parts.server.withdraw(self._wait_s))
        else:
            self._parts.server.withdraw()
        self._wait_s = fetch_wait(self._wait_s, self._place.wait_s, is_wanted=is_wanted, was_cut=was_cut)
        self._aside = is_wanted  # other replicas of the ring may wait longer

    def _offer(self) -> None:
        """Offer the state of the last committed step, to replicas that are behind and for this replica's own retry."""
        tensors, self._start = self._parts.state.whole()
        self._parts.server.offer(self._position.step, self._position.lineage, tensors, self._start)

    def _begin_anew(self, retry: Retry) -> None:
        """Discard the failed step, on all ranks of the replica, and return to the state from before it."""
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
        if in_vain_s is not None:  # give up: a restarted run can begin from a checkpoint
            raise SystemExit(f"{self._said}, for {in_vain_s:.0f} s")
        self.session.progress.begins(self._position.step)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _on_close(self, epoch: int, reason: str) -> None:
        """Handle the loss of a worker of this replica: inform the others at once, through quorum server and ring."""
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
        """Return the quorum of the replicas that are left. A replica that still trains finds its ring connection to
        this replica closed, and asks for a new quorum."""
        self._parts.agreement.ask(self._report(), self._on_end)
        with self.session.progress.at("aside", "the last checkpoint"):
            return self._parts.agreement.wait().quorum

    def _on_end(self, agreed: Agreed) -> None:
        self._steps_out(agreed, "this replica has done its last step")

    def _leaves(self) -> None:
        """Leave the run after the last step, once the others have its gradients and its checkpoint exists."""
        self.session.progress.idles("done")
        if self._has_state and self._last is not None:
            self._exchange.take_leave(_LEAVE_S)
            if self._last_save is not None:
                self._see_to(self._last_save)

    def _finish(self) -> None:
        session = self.session
        session.progress.idles("done")
        self._parts.finish(self._report())
        with send_until_acknowledged(session.link, WorkerDone(session.worker, session.epoch, self._position.step)):
            session.orders.wait(Finish, session.epoch)
        self._parts.close()
