"""One run in which the recovery ladder is used from its first level to its last, and a picture of it.

    python tools/experiments/every_level.py --into FOLDER --plot tools/experiments/results/every_level.png \\
        > tools/experiments/results/every_level.txt

Two replicas of four data-parallel workers, with a standby each, hot-swap and CheckFree; a few minutes on 2 cores. Each
planned loss needs a level that the earlier ones do not. With SPARe, reordering takes the place of "another replica", so
that this run cannot have both.
"""

import argparse
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import fault_campaign
import replica_runs

from ft.base import events
from ft.job.control import recovery
from ft.show import axes, palette
from ft.show.text import table

STEPS, REPLICAS, WORKERS = 104, 2, 4
FLAGS = "--use-distributed-optimizer --ft-hot-swap --ft-checkfree"
SAVE_INTERVAL = 6
LIMIT_S = 420.0


@dataclass(frozen=True)
class Loss:
    """A planned loss: its step, its fault, {replica: ranks} that it strikes, and the level that has to follow."""

    step: int
    fault: str
    struck: dict[int, tuple[int, ...]]
    level: str

    @property
    def committed(self) -> int:
        """Return the last committed step when the fault strikes, as events have it."""
        return self.step - 1

    @property
    def specs(self) -> list[str]:
        """The first of a replica is struck before the step, the others as they leave it: none leaves it unharmed."""
        kind, _, how = self.fault.partition(":")
        first, rest = f"step={self.step}{how and ':' + how}", f"step={self.committed}:phase=leave"
        place = [(a, b, rest if i else first) for a, ranks in self.struck.items() for i, b in enumerate(ranks)]
        return [f"{kind}@replica={a}:rank={b}:{when}" for a, b, when in place]


ALL = tuple(range(WORKERS))
LOSSES = (
    Loss(4, "exception:error=recoverable", {0: (1,)}, recovery.IN_PLACE),
    Loss(8, "kill", {0: (1,)}, recovery.STANDBY),
    Loss(12, "kill", {0: (0, 2)}, recovery.COPY),
    Loss(16, "kill", {1: ALL}, recovery.REPLICA),
    Loss(80, "kill", {0: (0, 1), 1: (0, 1)}, recovery.CHECKFREE),
    Loss(86, "kill", {0: ALL, 1: ALL}, recovery.CHECKPOINT),
    Loss(98, "exception:error=user", {0: (0,), 1: (0,)}, recovery.END),
)
"""A worker's copy is at the worker after it. So two workers that are not neighbours leave a copy of each, two that are
do not; the first of them then takes the weights of a data-parallel peer, in both replicas."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="folder for what the run writes")
    parser.add_argument("--again", action="store_true", help="run nothing, and show the run that is there")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the losses and the levels, as PNG")
    given = parser.parse_args(argv)
    done = replica_runs.Done(0, "", given.into / "run") if given.again else _run(given.into)
    found = [(loss, _level(done, loss)) for loss in LOSSES]
    rows = [
        (str(loss.step), loss.fault, _struck(loss), loss.level, seen or "another level", _seconds(done, loss))
        for loss, seen in found
    ]
    print("$ python tools/experiments/every_level.py")
    print(table(("step", "fault", "strikes", "level", "seen", "seconds"), rows))
    if given.plot:
        _plot(done, given.plot)
    return 0 if all(seen == loss.level for loss, seen in found) else 1


def _run(into: Path) -> replica_runs.Done:
    into.mkdir(parents=True, exist_ok=True)
    for name in ("run", "save"):
        shutil.rmtree(into / name, ignore_errors=True)
    saves = f"--save {into / 'save'} --save-interval {SAVE_INTERVAL}"
    flags = replica_runs.flags(fault_campaign.corpus(into), f"{FLAGS} {saves}", STEPS, batch=16)
    specs = ",".join(spec for loss in LOSSES for spec in loss.specs)
    os.environ["OMP_NUM_THREADS"] = "1"
    options = f"--standby 1 --inject {specs}"
    return replica_runs.train(
        into / "run", flags, limit_s=LIMIT_S, replicas=REPLICAS, nproc=REPLICAS * WORKERS, options=options
    )


def _events(done: replica_runs.Done, replica: int) -> list[events.Event]:
    return events.read(done.folder / f"replica-{replica}" / "events.jsonl")


def _level(done: replica_runs.Done, loss: Loss) -> str:
    """Return the level that followed the loss on the replicas that it struck, "" if they took different ones."""
    taken = {_level_of(done, loss, replica) for replica in loss.struck}
    return taken.pop() if len(taken) == 1 else ""


def _level_of(done: replica_runs.Done, loss: Loss, replica: int) -> str:
    after = iter(_events(done, replica))
    for event in after:
        if event.name == events.FAULT_INJECTED and event.step == loss.committed:
            break
    for event in after:
        if event.name == events.REPAIR_ORDERED:
            return event.detail["level"]
        if event.name == events.RESTARTED:
            return recovery.CHECKPOINT if _has_no_state(done, replica, event.wall) else event.detail["level"]
        if event.name == events.STOPPED:
            return recovery.END
    return ""


def _has_no_state(done: replica_runs.Done, replica: int, since: float) -> bool:
    """Return whether the next quorum with a replica was one in which no replica had a state, so that all load one."""
    formed = (e for e in events.read(done.folder / "events.jsonl") if e.name == events.QUORUM_FORMED and e.wall > since)
    return next((e.step == 0 for e in formed if replica in (*e.detail["healthy"], *e.detail["behind"])), False)


def _seconds(done: replica_runs.Done, loss: Loss) -> str:
    """Return how long it took from the fault to the commit of the step that it interrupted."""
    faults = [e.wall for e in done.injected() if e.step == loss.committed]
    commits = [step.when for step in done.proof.lineage.steps if step.number == loss.step and faults]
    return f"{commits[0] - min(faults):.2f}" if commits and commits[0] > min(faults) else "-"


def _struck(loss: Loss) -> str:
    return ", ".join(f"replica {a}: {len(ranks)} of {WORKERS}" for a, ranks in loss.struck.items())


def _committed(done: replica_runs.Done) -> tuple[list, list]:
    """Return the steps of the surviving state, and the committed steps that were done again."""
    return done.proof.lineage.steps, done.proof.lineage.superseded


def _plot(done: replica_runs.Done, file: str) -> None:
    told = {line["step"]: line["loss"] for replica in range(REPLICAS) for line in done.metrics_of(replica)}
    steps, again = ([s for s in some if s.number in told] for some in _committed(done))
    began = steps[0].when
    kept = [(step.when - began, told[step.number]) for step in steps]
    redone = [(step.when - began, told[step.number]) for step in again]
    figure, place = axes.rows("One run, every level of the recovery ladder", [3.6])
    axes.plain(place, "loss by the time of the commit; crosses are steps that were done again", pad=60)
    place.plot(*zip(*kept, strict=True), color=palette.LOSS, linewidth=1.2, marker=".", markersize=4)
    if redone:
        place.plot(*zip(*redone, strict=True), color=palette.QUIET, linestyle="", marker="x", markersize=5)
    top = max(loss for _, loss in kept)
    for loss in LOSSES:
        at = min((e.wall - began for e in done.injected() if e.step == loss.committed), default=None)
        if at is not None:
            place.axvline(at, color=palette.FAULT, linewidth=0.8, linestyle="--")
            place.text(at, top, f" {loss.level}", rotation=45, va="bottom", ha="left", **axes.STYLE)
    place.set_xlabel("seconds", **axes.STYLE)
    figure.savefig(file, format="png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
