"""Runs of `ft run --ft-hsdp-replicas` with the real trainer, and their verification; for tests and the campaign."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import small_runs
from ft_runs import Finished, Running

from ft.base import events
from ft.observe.report import record
from ft.observe.report.lineage import Audit, Lineage, audit, lineage
from ft.systems.hsdp import commits
from ft.systems.hsdp.commits import Commit

LIMIT_S = 400.0


@dataclass(frozen=True)
class Proof:
    """What the records of a run prove, whether it has ended or not."""

    folder: Path
    lines: dict[int, list[Commit]]

    @cached_property
    def lineage(self) -> Lineage:
        return lineage(self.lines)

    @cached_property
    def audit(self) -> Audit:
        return audit(self.lineage)

    @property
    def steps(self) -> list[int]:
        return [step.number for step in self.lineage.steps]

    def unequal(self) -> list[str]:
        """List replicas that committed a step in one quorum but are not equal bit for bit, or have no digest."""
        by: dict[tuple[int, int], dict[int, int | None]] = {}
        for replica, lines in self.lines.items():
            for commit in lines:
                by.setdefault((commit.step, commit.quorum), {})[replica] = commit.digest
        return [
            f"step {step} of quorum {quorum}: digests {digests}"
            for (step, quorum), digests in sorted(by.items())
            if len(set(digests.values())) > 1 or None in digests.values()
        ]

    def problems(self, steps: int, most_superseded: float) -> list[str]:
        """List all that is wrong with a run that should train ``steps`` steps.

        Args:
            steps: number of steps.
            most_superseded: maximum number of commits that were done again: one for each failure. Infinite: not
                checked.
        """
        found = self.unequal()
        if self.steps != list(range(1, steps + 1)):
            found.append(f"surviving steps {_shortened(self.steps)}, not 1 to {steps}")
        if not self.audit.is_clean:
            found += ["the audit is not clean", *self.audit.problems[:5], *self.audit.examples]
        if len(self.lineage.superseded) > most_superseded:
            superseded = [(step.number, step.commit.quorum) for step in self.lineage.superseded]
            found.append(f"superseded (step, quorum): {superseded}; at most {most_superseded} may be")
        return found


def proof(folder: Path) -> Proof:
    """Read the records in a run's folder."""
    folders = {int(path.name.rpartition("-")[2]): path for path in folder.glob("replica-*")}
    return Proof(folder, {replica: commits.read(path) for replica, path in sorted(folders.items())})


@dataclass
class Done(Finished):
    """A run of replicas that has ended."""

    @property
    def proof(self) -> Proof:
        return proof(self.folder)

    def of(self, replica: int, name: str) -> list[events.Event]:
        history = events.read(self.folder / f"replica-{replica}" / "events.jsonl")
        return [event for event in history if event.name == name]

    def metrics_of(self, replica: int) -> list[dict]:
        return small_runs.metrics(self.folder / f"replica-{replica}" / "metrics.jsonl")

    def losses(self) -> list[float]:
        """Return the loss of every step, from any replica that was in it."""
        found = {line["step"]: line["loss"] for replica in self.proof.lines for line in self.metrics_of(replica)}
        return [found[step] for step in sorted(found)]

    def losses_of(self, replica: int) -> list[float]:
        return [step["loss"] for step in self.metrics_of(replica)]

    def logs_of(self, replica: int) -> str:
        """Return the logs of all workers of a replica."""
        logs = self.folder / f"replica-{replica}" / "logs"
        return "".join(log.read_text() for log in sorted(logs.glob("*.w*.log")))

    def injected(self) -> list[events.Event]:
        """Return the faults that occurred, in order of time."""
        found = record.load(self.folder)
        return [event for _, event in found.history if event.name == events.FAULT_INJECTED]

    def check(self, steps: int, failures: int) -> None:
        """Assert what is true of every run that ends well: see :meth:`Proof.problems`."""
        problems = self.proof.problems(steps, failures)
        assert self.code == 0 and not problems, f"{problems}\n{self.explain()}"

    def explain(self) -> str:
        logs = sorted(self.folder.glob("logs/*.log")) + sorted(self.folder.glob("replica-*/logs/*"))
        tails = "".join(f"\n--- {log.relative_to(self.folder)}\n{log.read_text()[-1500:]}" for log in logs)
        history = (self.folder / "events.jsonl").read_text()[-6000:] if (self.folder / "events.jsonl").exists() else ""
        return f"exit code {self.code}\n{self.output[-4000:]}\n--- quorum server\n{history}{tails}"


class Replicas(Running):
    """A run of replicas in progress."""

    def __init__(self, folder: Path, flags: str, *, replicas: int, options: str = "", script="pretrain_gpt.py", **how):
        options = f"--ft-hsdp-replicas {replicas} {options}"
        super().__init__(folder, script, flags, standby=0, options=options, **how)

    def _begin(self, words: list) -> None:
        super()._begin(words, FT_HSDP_DIGESTS="1")

    def wait(self, limit_s: float = LIMIT_S) -> Done:
        done = super().wait(limit_s)
        return Done(done.code, done.output, done.folder)

    def stop(self) -> Done:
        done = super().stop()
        return Done(done.code, done.output, done.folder)

    def step(self) -> int:
        """Return the newest step that any replica has committed."""
        return max((lines[-1].step for lines in proof(self.folder).lines.values() if lines), default=0)

    def server(self) -> int:
        """Return the process id of the quorum server."""
        return json.loads((self.folder / "quorum.json").read_text())["pid"]


def flags(corpus: str, extra: str = "", steps: int = 12, batch: int = 12) -> str:
    """Return the flags of a tiny run. ``batch``: global batch size."""
    base = small_runs.BASE.replace("--global-batch-size 8", f"--global-batch-size {batch}")
    return f"{base} --train-iters {steps} --data-path {corpus} {extra}"


def train(
    folder: Path, flags: str, *, limit_s: float = LIMIT_S, good: Callable[[Done], bool] = lambda done: True, **how
) -> Done:
    """Run replicas from start to end.

    ``good``: whether a run is one that a test can judge. On a busy machine, a replica can be too slow for a step, and
    the others rightly train without it. A run that is not good is repeated, twice at most, without its checkpoints.
    """
    done = Replicas(folder, flags, **how).wait(limit_s)
    for attempt in (2, 3):
        if done.code != 0 or good(done):
            break
        print(f"try {attempt}, because of {[(step.number, step.commit.healthy) for step in done.proof.lineage.steps]}")
        if saved := re.search(r"--save (\S+)", flags):
            shutil.rmtree(saved[1])
        done = Replicas(folder.with_name(f"{folder.name}-{attempt}"), flags, **how).wait(limit_s)
    return done


def all_injected(faults: int) -> Callable[[Done], bool]:
    """Return a function that says whether so many faults were injected: one in a recovery is not if a copy was late."""
    return lambda done: len(done.injected()) == faults


def together(steps: int) -> Callable[[Done], bool]:
    """Return a function that says whether all replicas were in each of the first ``steps`` steps of a run."""
    return lambda done: all(
        set(step.commit.healthy) == set(done.proof.lines) for step in done.proof.lineage.steps if step.number <= steps
    )


def _shortened(steps: list[int]) -> str:
    text = str(steps)
    return text if len(text) < 300 else f"{text[:150]} ... {text[-150:]}"
