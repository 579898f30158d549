"""Conversations about the records of FT-HSDP: replicas that die, return and disagree, and what is told of them."""

import shutil
from dataclasses import replace as changed_held
from itertools import groupby

import msgspec
from conversations import Player
from hsdp_runs import Run
from msgspec.structs import replace
from record_conversations import Page

from ft import faults
from ft.base import events
from ft.observe.report.record import load
from ft.observe.report.text import facts
from ft.systems.hsdp import commits


class Hsdp(Player):
    """A run of replicas, made by hand; each ``new`` one has a folder of its own, which is RUN from then on."""

    plays = "run"

    def __init__(self, folder):
        super().__init__(folder)
        self._root, self._count = folder, 0

    def _new(self):
        self._count += 1
        self.folder = self._root / str(self._count)

    def do_new(self, **how):
        """All replicas start; ``how``: fields of :class:`hsdp_runs.Run`."""
        self._new()
        self.run = Run(self.folder, **how)

    def do_from_checkpoint(self):
        """Another run goes on in a new folder from the state of the one before."""
        self._new()
        held = self.run.state[0]
        self.run = Run(self.folder)
        self.run.begin(changed_held(held, lineage=0))

    def do_step(self, by=None, took=None):
        """A step that the replicas ``by`` commit, or all; it can be gone back to."""
        self.checkpoint = self.run.step(by=None if by is None else set(by), took=took)

    def do_again(self, replicas):
        """The whole run resumes from the last single step, with so many replicas."""
        self.run.again(self.checkpoint, replicas)

    def do_host(self, replica, node, machine):
        told = {"interfaces": {}, "about": {}, "paths": {}, "host": "10.0.0.1", "clock": 0.0}
        self.run.own(replica, events.AGENT_JOINED, node=node, machine=machine, **told)

    def do_rewrite(self, *steps, of=None, **values):
        """Replicas (``of``, or all) have written these fields of the commits of some steps, or of all steps, wrongly.

        ``digest=step``: the number of the step; ``at=-2``: so many samples less than they have.
        """
        self.run.close()
        for replica in range(self.run.replicas) if of is None else of:
            lines = [self._wrong(one, steps, values) for one in commits.read(self.folder / f"replica-{replica}")]
            self._write(replica, lines)

    def _wrong(self, one, steps, values):
        if steps and one.step not in steps:
            return one
        new = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if "at" in new:
            new["at"] += one.at
        if new.get("digest") == "step":
            new["digest"] = one.step
        return replace(one, **new)

    def do_unwritten(self, *steps):
        """No replica has written these steps."""
        self.run.close()
        for replica in range(self.run.replicas):
            lines = commits.read(self.folder / f"replica-{replica}")
            self._write(replica, [one for one in lines if one.step not in steps])

    def _write(self, replica, lines):
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        (self.folder / f"replica-{replica}" / "commits.jsonl").write_bytes(text)

    def do_removed(self, replica):
        """The folder of a replica is gone."""
        self.run.close()
        shutil.rmtree(self.folder / f"replica-{replica}")

    def do_without_events(self):
        self.run.close()
        for path in self.folder.rglob("events.jsonl"):
            path.unlink()

    def do_bare(self, replica):
        """There is nothing but the folder of a replica."""
        self._new()
        (self.folder / f"replica-{replica}").mkdir(parents=True)

    def do_planned(self, replica, kind, step):
        path = self.folder / f"replica-{replica}" / "faults.n0.json"
        faults.write(path, [faults.Fault(1, kind, step=step, rank=0)])

    def do_tell(self):
        """Show what is made of the records: steps, audit, incidents, times, and states of the replicas."""
        self.run.close()
        story = load(self.folder)
        numbers = [one.number for one in story.steps]
        gone = [one.number for one in story.lineage.superseded]
        audit, spent = story.audit, story.effective
        counted = {name: getattr(audit, name) for name in ("trained", "waiting", "earlier", "unproven")}
        wrong = {name: getattr(audit, name) for name in ("duplicates", "gaps", "unaccounted")}
        lines = [
            f"{story.state}: {_ranges(numbers)}; superseded {_ranges(gone)}; missing {story.lineage.missing}",
            f"audit {'clean' if audit.is_clean else 'NOT CLEAN'}: {counted}, {audit.replicas}, {wrong}",
            *(f"  {problem}" for problem in (*audit.problems, *audit.examples)),
        ]
        for one in story.incidents:
            away = [round(each, 2) for each in one.away_s]
            told = f"{one.kind} of {one.replicas}, steps {one.first} to {one.last}, {one.retries} retries"
            lines.append(f"{told}, stall {one.stall_s:.2f} s, away {away}: {one.reason or 'no reason'}")
        if spent.measured is not None:
            more = "" if spent.formula is None else f", formula {spent.formula:.3f}, stall {spent.stall_s:.2f} s"
            lines.append(f"effective {spent.measured:.3f}{more}")
        for replica, lanes in groupby(story.lanes, lambda lane: lane.replica):
            states = ", ".join(f"{lane.state} {lane.end - lane.begin:.2f} s" for lane in lanes)
            lines.append(f"replica {replica}: {states}")
        shown = {"faults", "replicas"}
        return [*lines, *(f"{name}: {text}" for name, text in facts(story) if name in shown)]

    def do_losses(self):
        """Show over what the losses are drawn, and the first and the last point."""
        losses = load(self.folder).losses
        return [f"over {losses.over}: {losses.points[0]} to {losses.points[-1]}"]

    def ft(self, words):
        self.run.close()
        return super().ft(words)

    def do_page(self, *patterns):
        """Show the lines of ``report.html`` that have one of these words."""
        lines = Page(self.folder / "report.html").lines
        return [line for line in lines if any(pattern in line for pattern in patterns)]


def _ranges(numbers: list[int]) -> str:
    """Return ``1-5, 7`` for numbers in their order."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, one)) for one in found) or "none"


PLAYERS = {"hsdp": Hsdp}
