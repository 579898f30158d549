"""Records that the leader (rank 0) of an FT-HSDP replica writes for every committed step (FT-HSDP, section 4.4).

These are a line in the replica's commit log (:mod:`ft.systems.hsdp.commits`) and, on one replica, the run's
``loader_state`` file with the sample positions of all replicas (:mod:`ft.systems.hsdp.loader_state`).
"""

import threading
import time
from pathlib import Path

from ft.job.quorum import Quorum
from ft.systems.hsdp import loader_state
from ft.systems.hsdp.commits import Commit, CommitLog
from ft.systems.hsdp.loader_state import LoaderState
from ft.systems.hsdp.samples import ReplicaPosition
from ft.systems.hsdp.work import Work


class Records:
    """Writes the records of one replica, on its leader.

    Args:
        run_dir: directory of the whole run.
        folder: directory of the replica.
        replica: number of the replica.
        batch: samples that a replica takes in a step.
    """

    def __init__(self, run_dir: Path, folder: Path, replica: int, batch: int):
        self._replica, self._batch = replica, batch
        self._commits, self._positions = CommitLog(folder), _Positions(run_dir)

    def committed(
        self,
        position: ReplicaPosition,
        quorum: Quorum,
        work: Work,
        before: int,
        at: int | None,
        step_s: float,
        wait_s: float,
        digest: int | None,
        parameters: int | None = None,
    ) -> None:
        """Record a step that was committed. The healthy replica with the smallest number also writes ``loader_state``.

        Args:
            position: sample positions of all replicas after the step.
            quorum: the replicas that took part in the step.
            work: division of the step, which knows what this replica has computed.
            before: number of the quorum of the previous step.
            at: position in this replica's own samples at which the samples of the step began, None if it took none.
            step_s: seconds that the step took.
            wait_s: seconds of these spent on waiting for quorum and all-reduce.
            digest: checksum of the state after the step, None if not wanted.
            parameters: checksum of the model parameters with which gradients were computed, None if not wanted or no
                gradients were computed.
        """
        self._commits.write(
            Commit(
                step=position.step,
                quorum=quorum.number,
                before=before,
                healthy=quorum.healthy,
                behind=quorum.behind,
                batch=self._batch,
                assignment=position.assignment,
                positions=dict(position.positions),
                wall=time.time(),
                step_s=step_s,
                wait_s=wait_s,
                at=at if work.computed is None else None,
                computed=work.computed,
                digest=digest,
                parameters=parameters,
                stack=work.stack,
                owners=work.owners,
                patch=work.patch,
                covered=work.covered,
                adopted=work.adopted,
            )
        )
        if self._replica == quorum.healthy[0]:
            state = LoaderState(
                position.step, quorum.number, self._batch, position.assignment, dict(position.positions)
            )
            self._positions.write(state)

    def close(self) -> None:
        self._commits.close()
        self._positions.close()


class _Positions:
    """Writes ``loader_state`` in a thread, so that training waits neither for another replica's write nor for a disk.

    If writing takes longer than a step, only the newest state is written.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._changed = threading.Condition()
        self._newest: LoaderState | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="ft-hsdp-positions", daemon=True)
        self._thread.start()

    def write(self, state: LoaderState) -> None:
        with self._changed:
            self._newest = state
            self._changed.notify()

    def close(self) -> None:
        """Write the newest state if it is not written yet, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._is_closing)
                state, self._newest = self._newest, None
            if state is None:
                return
            loader_state.write(self._run_dir, state)


class NoRecords:
    """Stand-in for :class:`Records` on ranks other than the leader."""

    def committed(self, *_) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
