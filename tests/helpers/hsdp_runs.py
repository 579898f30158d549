"""Folders of synthetic FT-HSDP runs, in which replicas die, return and disagree; written with the code of real runs."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from msgspec.structs import replace

from ft.base import events
from ft.base.events import EventLog
from ft.systems.hsdp.commits import Commit, CommitLog
from ft.systems.hsdp.samples import SampleAssignment

START = 1_700_000_000.0
SEQ = 64


@dataclass(frozen=True)
class Held:
    """The state that a replica has in memory."""

    step: int
    lineage: int
    assignment: SampleAssignment
    positions: dict[int, int]


@dataclass
class Run:
    """A run in the making. `now` is in seconds since its start.

    Attributes:
        state: replica -> its state, None while it has none.
        alive: replicas that will be in the next quorum.
        trained: (step, quorum) of a commit -> the samples of the state that it leads to, in the order of training.
    """

    folder: Path
    replicas: int = 3
    block: int = 2
    batch: int = 4
    step_s: float = 0.1
    now: float = 1.0
    number: int = 0
    state: dict[int, Held | None] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    trained: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    held: dict[tuple[int, int], Held] = field(default_factory=dict)
    _logs: dict[int | None, EventLog] = field(default_factory=dict)
    _last: tuple | None = None

    def __post_init__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begin(Held(0, 0, SampleAssignment(self.replicas, self.block), dict.fromkeys(range(self.replicas), 0)))

    def begin(self, held: Held) -> None:
        """Start all replicas with that state."""
        self.replicas, self.alive = held.assignment.replicas, set(range(held.assignment.replicas))
        self.state = dict.fromkeys(self.alive, held)
        for replica in self.alive:
            (self.folder / f"replica-{replica}").mkdir(exist_ok=True)
            self.own(replica, events.RUN_STARTED, command=["pretrain_gpt.py"], world_size=1)
            self.own(replica, events.WORKER_STARTED, node="n0", worker=f"n0.w{replica}", pid=1)
        self.now += 0.5
        for replica in self.alive:
            self.server(events.REPLICA_ONLINE, replica=replica, life=0, step=held.step)

    def again(self, key: tuple[int, int], replicas: int) -> None:
        """End the whole run and resume from the checkpoint of a commit, with `replicas` replicas."""
        held = self.held[key]
        assignment, positions = held.assignment.after(held.positions, held.step, replicas, self.block)
        self.trained[held.step, 0] = self.trained[key]
        self.now += 2.0
        self.begin(Held(held.step, 0, assignment, positions))

    def step(self, by: set[int] | None = None, took: float | None = None, **changes) -> tuple[int, int]:
        """Run a step in a new quorum of all living replicas, committed by the replicas `by` (default: all); return
        (step, quorum).

        `changes` are applied to every record, to make it wrong.
        """
        self.number += 1
        furthest = max((held.step, held.lineage) for r, held in self.state.items() if r in self.alive and held)
        healthy = tuple(sorted(r for r in self.alive if self._at(r) == furthest))
        behind = tuple(sorted(self.alive.difference(healthy)))
        before = self.state[healthy[0]]
        formed = (healthy, behind, before.step)
        if self._last is None or self._last[:2] != formed[:2] or self._last[2] == before.step:
            values = {"number": self.number, "healthy": healthy, "behind": behind, "reason": "it was so", "wait_s": 0.0}
            self.server(events.QUORUM_FORMED, step=before.step, **values)
        self._last = formed
        took = self.step_s if took is None else took
        self.now += took
        committed = self.alive if by is None else by
        if not committed:
            return before.step, 0
        positions = {r: p + self.batch * (r in healthy) for r, p in before.positions.items()}
        after = Held(before.step + 1, self.number, before.assignment, positions)
        key = (after.step, self.number)
        read = {r: range(before.positions[r], before.positions[r] + self.batch) for r in healthy}
        samples = [before.assignment.stream(r).index(p) for r, places in read.items() for p in places]
        self.trained[key] = self.trained.get((before.step, before.lineage), []) + samples
        self.held[key] = after
        line = Commit(
            *(after.step, self.number, before.lineage, healthy, behind, self.batch, before.assignment, positions),
            *(START + self.now, took, 0.01),
        )
        line = replace(line, **changes)
        for replica in sorted(committed):
            at = before.positions[replica] if replica in healthy else None
            self.write(replica, replace(line, at=at, wall=line.wall + 1e-4 * replica))
            self.state[replica] = after
            if replica in behind:
                self.own(replica, events.CAUGHT_UP, step=before.step, replica=replica, fetch_s=0.01, bytes=9)
        return key

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def dies(self, replica: int) -> None:
        self.alive.discard(replica)
        self.state[replica] = None
        self.server(events.REPLICA_OFFLINE, replica=replica, reason="its leader's connection broke")

    def builds(self, replica: int) -> None:
        self.own(replica, events.WORKER_STARTED, node="n0", worker=f"n0.v{replica}", pid=2)

    def returns(self, replica: int) -> None:
        self.alive.add(replica)
        self.server(events.REPLICA_ONLINE, replica=replica, life=1, step=0)

    def finish(self) -> None:
        for replica in range(self.replicas):
            self.own(replica, events.FINISHED, step=max(step for step, _ in self.trained))
        self.close()

    def close(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def write(self, replica: int, commit: Commit) -> None:
        log = CommitLog(self.folder / f"replica-{replica}")
        log.write(commit)
        log.close()
        figures = {"step": commit.step, "loss": 2 + 4 / commit.step, "step_time_s": 0.5, "global_batch_size": 12}
        with open(self.folder / f"replica-{replica}" / "metrics.jsonl", "a") as file:
            file.write(json.dumps({**figures, "tokens_per_s": 12 * SEQ / 0.5}) + "\n")

    def own(self, by: int, name: str, **values) -> None:
        self._say(by, name, values)

    def server(self, name: str, **values) -> None:
        self._say(None, name, values)

    def _say(self, replica: int | None, name: str, values: dict) -> None:
        if replica not in self._logs:
            folder = self.folder if replica is None else self.folder / f"replica-{replica}"
            self._logs[replica] = EventLog(folder / "events.jsonl")
        stamps = {"wall": START + self.now, "monotonic": self.now}
        self._logs[replica].write(events.observed(name, {**values, **stamps}))

    def _at(self, replica: int) -> tuple[int, int]:
        held = self.state[replica]
        return (held.step, held.lineage) if held else (0, -1)


def eventful(folder: Path, seed: int, steps: int = 60) -> tuple[Run, tuple[int, int]]:
    """Return a run with deaths, returns, partly committed steps, and perhaps a change of the number of replicas.

    Returns:
        (the run, the key of its last surviving commit).
    """
    rng = Random(seed)
    run = Run(folder, replicas=rng.randint(2, 5), block=rng.randint(1, 3))
    run.batch = run.block * rng.randint(1, 3)
    last = run.step()
    for _ in range(steps):
        chance = rng.random()
        if chance < 0.12 and len(run.alive) > 1:
            run.dies(rng.choice(sorted(run.alive)))
            if not any(run.state[r] for r in run.alive):  # only replicas that fetch are left: the run resumes
                run.again(last, run.replicas)
        elif chance < 0.3 and (away := sorted(set(range(run.replicas)) - run.alive)):
            run.builds(away[0])
            run.now += 0.05
            run.returns(away[0])
        elif chance < 0.38:
            run.step(by=set(), took=0.3)
        elif chance < 0.46 and len(run.alive) > 1:
            some = set(rng.sample(sorted(run.alive), rng.randint(1, len(run.alive) - 1)))
            last = run.step(by=some)
            if rng.random() < 0.5:  # and no replica that committed the step survives
                for replica in some:
                    run.dies(replica)
                if not any(run.state[r] for r in run.alive):
                    run.again(last, run.replicas)
        elif chance < 0.48:
            run.again(rng.choice(sorted(run.held)), rng.randint(1, 5))
        else:
            last = run.step()
    last = run.step()
    run.finish()
    return run, last
