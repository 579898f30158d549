"""Records that the leader (rank 0) of an FT-HSDP replica writes for every committed step (FT-HSDP, section 4.4).

These are a line of JSON in the replica's commit log, ``RUN_DIR/replica-K/commits.jsonl``, and, on one replica, the
same line as the run's ``loader_state`` file: "the dataloader state of all GPUs in a single loader_state file every
step". A replica that returns reads there how many samples each replica has taken.

All members of a quorum write the same facts about the step in their commit logs, except for measurements of the writer,
such as ``at``: the position at which its data loader really was. The report of a run (``ft.observe.report``) uses these
lines to prove which samples were trained.
"""

import contextlib
import os
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ft.base import files
from ft.base.lines import Lines
from ft.systems.hsdp.samples import Count, ReplicaPosition, SampleAssignment

if TYPE_CHECKING:
    from ft.job.quorum import Quorum
    from ft.systems.hsdp.work import Work

NAME, NEWEST = "commits.jsonl", "loader_state"


class Commit(msgspec.Struct, frozen=True, omit_defaults=True):
    """A committed step, as one replica (the writer) has recorded it.

    With SPARe, a replica is called a group, and the samples of a step are divided into shard types, each of which
    several groups could compute.

    Attributes:
        before: number of the previous step's quorum in this replica's state, 0 before the first.
        healthy: replicas whose gradients are in the step.
        behind: replicas that fetched their state during it.
        batch: samples that each healthy replica took.
        positions: replica -> position in that assignment after the step.
        wall: time of the commit, in seconds since 1970.
        step_s: seconds that the step took, including retries and waits.
        wait_s: seconds of these spent on waiting for the quorum and for the all-reduce between replicas.
        at: position of the writer's stream from which it read its samples, None if it read none (behind).
        digest: digest of the state of all ranks of the writer after the step, None if not wanted.
        parameters: digest of the model with which the writer computed its gradients, None if not wanted or it computed
            none.
        stack: SPARe's S, the number of shard types after which a group takes part in the all-reduce; None without
            SPARe. With SPARe, every step trains every shard type, whichever groups take part.
        owners: the group that has added the gradients of each shard type; empty without SPARe.
        patch: shard types that groups have computed in addition to their first S, because others were lost and no
            present group had them among its first S; empty without SPARe.
        covered: shard types of groups that were lost in the step, which another group had computed among its first S;
            empty without SPARe.
        adopted: shard types in ``patch`` of which no host was present; empty without SPARe.
        computed: shard type -> position in the stream of that type from which the writer read its samples, for the
            types whose gradients the writer has added; None without SPARe.
    """

    step: Count
    quorum: Count
    before: Count
    healthy: tuple[Count, ...]
    behind: tuple[Count, ...]
    batch: Count
    assignment: SampleAssignment
    positions: dict[int, Count]
    wall: float
    step_s: float = 0.0
    wait_s: float = 0.0
    at: Count | None = None
    digest: Count | None = None
    parameters: Count | None = None
    stack: Count | None = None
    owners: tuple[Count, ...] = ()
    patch: tuple[Count, ...] = ()
    covered: tuple[Count, ...] = ()
    adopted: tuple[Count, ...] = ()
    computed: dict[int, Count] | None = None

    @property
    def streams(self) -> tuple[int, ...]:
        """Return the numbers of the sample streams that were trained: the healthy replicas, or with SPARe all shard
        types.
        """
        return self.healthy if self.stack is None else tuple(range(self.assignment.replicas))

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted({*self.healthy, *self.behind}))


class CommitLog:
    """Appends commits to a replica's file. On a full disk, lines wait in memory and training continues.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, folder: Path):
        self._lines = Lines(folder / NAME)

    def write(self, commit: Commit) -> None:
        self._lines.write(msgspec.json.encode(commit) + b"\n")

    def close(self) -> None:
        self._lines.close()


def read(folder: Path, most: int | None = None) -> list[Commit]:
    """Return the commits in a replica's folder in the order written; incomplete lines and unknown keys are ignored.

    Args:
        most: bytes to read from the end of the file; None: all of it.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        with open(folder / NAME, "rb") as stream:
            if most is not None:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - most))
            lines = stream.read().splitlines()
    except FileNotFoundError:
        return []
    return [commit for line in lines if (commit := _parse(line)) is not None]


def newest(run_dir: Path) -> Commit | None:
    """Return the commit in the file ``loader_state``; None if there is no such file, or it is damaged."""
    try:
        return _parse((run_dir / NEWEST).read_bytes())
    except OSError:
        return None


def _parse(line: bytes) -> Commit | None:
    try:
        return _COMMIT.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


_COMMIT = msgspec.json.Decoder(Commit)


class Records:
    """Writes the records of one replica, on its leader."""

    def __init__(self, run_dir: Path, folder: Path, replica: int, batch: int):
        self._replica, self._batch = replica, batch
        self._commits, self._newest = CommitLog(folder), _Newest(run_dir, replica)

    def committed(
        self,
        position: ReplicaPosition,
        quorum: "Quorum",
        work: "Work",
        before: int,
        at: int | None,
        step_s: float,
        wait_s: float,
        digest: int | None,
        parameters: int | None = None,
    ) -> None:
        """Record a committed step. The healthy replica with the smallest number also writes ``loader_state``.

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
        division = work.record()
        commit = Commit(
            step=position.step,
            quorum=quorum.number,
            before=before,
            healthy=quorum.healthy,
            behind=quorum.behind,
            batch=self._batch,
            assignment=position.assignment,
            positions=dict(position.positions),
            wall=round(time.time(), 6),
            step_s=round(step_s, 6),
            wait_s=round(wait_s, 6),
            at=None if division else at,
            digest=digest,
            parameters=parameters,
            **division,
        )
        self._commits.write(commit)
        if self._replica == quorum.healthy[0]:
            self._newest.commits.put(commit)

    def close(self) -> None:
        self._commits.close()
        self._newest.close()


class _Newest(threading.Thread):
    """Writes ``loader_state``, so that training does not wait for the disk.

    Commits that come while it writes are left out, but the last one.
    """

    def __init__(self, run_dir: Path, replica: int):
        super().__init__(name="ft-hsdp-newest", daemon=True)
        # A file of its own for each writer: two replicas may write at once when the quorum changes.
        self._path, self._own = run_dir / NEWEST, run_dir / f".{NEWEST}-{replica}"
        self.commits: queue.SimpleQueue[Commit | None] = queue.SimpleQueue()
        self.start()

    def close(self) -> None:
        """Write the last commit if it is not written yet, and end the thread."""
        self.commits.put(None)
        self.join()

    def run(self) -> None:
        taken: list[Commit | None] = []
        while None not in taken:
            taken = [self.commits.get()]
            while not self.commits.empty():
                taken.append(self.commits.get())
            for commit in [one for one in taken if one is not None][-1:]:
                with contextlib.suppress(OSError):  # training does not depend on the file
                    files.replace(self._own, msgspec.json.encode(commit))
                    self._own.replace(self._path)
