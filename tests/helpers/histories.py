"""Synthetic runs for tests of the report: hand-written event lists."""

import json
from pathlib import Path

from ft.base import events
from ft.base.events import Event, EventLog

START = 1_700_000_000.0


class History:
    """Collects events. `at` is in seconds since the start of the run, with the timestamps of a single host."""

    def __init__(self, world_size: int = 4):
        self.events: list[Event] = []
        self.seats = {str(rank): f"n0.w{rank}" for rank in range(world_size)}
        self.epoch = 0
        self.say(0.0, events.RUN_STARTED, command=["pretrain_gpt.py", "--title", "<b>&"], world_size=world_size)
        self.say(1.0, events.EPOCH_OPENED, epoch=0, seats=dict(self.seats), joiners=[], fresh=True)
        self.say(1.1, events.RESUMED, epoch=0, step=0)

    def say(self, at: float, name: str, **values) -> None:
        event = events.observed(name, {"wall": START + at, "monotonic": 50.0 + at, **values})
        events.check(event)
        self.events.append(event)

    def inject(self, at: float, rank: int, kind: str = "kill") -> None:
        number = 1 + sum(event.name == events.FAULT_INJECTED for event in self.events)
        place = {"node": "n0", "worker": self.seats[str(rank)], "rank": rank, "epoch": self.epoch}
        self.say(at, events.FAULT_INJECTED, number=number, kind=kind, where="backward", **place)

    def detect(self, at: float, rank: int, step: int, action: str = "replace", signal: str = "SIGKILL") -> None:
        place = {"node": "n0", "worker": self.seats[str(rank)], "rank": rank, "epoch": self.epoch, "step": step}
        category = "host fault" if action == "replace" else "transient"
        reason = f"the process was ended by {signal}"
        self.say(at, events.FAULT_DETECTED, category=category, action=action, reason=reason, signal=signal, **place)

    def join(self, at: float, node: str, machine: str) -> None:
        about = {"interfaces": {}, "about": {}, "paths": {}, "clock": START + at}
        self.say(at, events.AGENT_JOINED, node=node, host="10.0.0.1", machine=machine, **about)

    def lose_node(self, at: float, node: str, *ranks: int, named: str = "") -> None:
        """Lose a node with the workers of these ranks; `named`: its name in the reason."""
        told = {"category": "host fault", "action": "replace", "signal": "node lost"}
        told["reason"] = f"node {named or node} is lost: nothing was heard of its agent for 3.7 s"
        for rank in ranks:
            place = {"worker": self.seats[str(rank)], "rank": rank, "epoch": self.epoch, "step": 20}
            self.say(at, events.FAULT_DETECTED, node=node, **place, **told)

    def close(self, at: float) -> None:
        self.say(at, events.EPOCH_CLOSED, epoch=self.epoch, reason="a fault")

    def open(self, at: float, **joiners: str) -> None:
        """Open the next epoch; `r3="n0.w9"` seats a joiner on logical rank 3."""
        taken = {rank[1:]: worker for rank, worker in joiners.items()}
        self.seats.update(taken)
        self.epoch += 1
        ranks = [int(rank) for rank in taken]
        self.say(at, events.EPOCH_OPENED, epoch=self.epoch, seats=dict(self.seats), joiners=ranks, fresh=False)

    def repair(self, at: float, step: int = 20) -> None:
        """Add the events from the last release to the next step, which is 0.31 s after `at`."""
        e = self.epoch
        self.say(at, events.RELEASED, epoch=e - 1)
        self.say(at + 0.04, events.REPAIR_ORDERED, epoch=e, step=step)
        self.say(at + 0.24, events.GROUPS_REBUILT, epoch=e, rebuilt=9, kept=37, deferred=8, seconds=0.15)
        self.say(at + 0.24, events.STATE_RESTORED, epoch=e, step=step, sources={"3": "copy:2"}, seconds=0.05)
        self.say(at + 0.241, events.INVARIANTS_CHECKED, epoch=e, violations=[])
        self.say(at + 0.31, events.RESUMED, epoch=e, step=step)

    def replacement(self, at: float, rank: int, by: str, step: int = 20) -> None:
        """Add a whole recovery: a fault injected `at`, detected 0.02 s later, recovered 0.4 s after it."""
        self.inject(at, rank)
        self.detect(at + 0.02, rank, step)
        self.close(at + 0.02)
        self.open(at + 0.03, **{f"r{rank}": by})
        self.repair(at + 0.09, step)

    def finish(self, at: float, step: int) -> None:
        self.say(at, events.FINISHED, step=step)


def write(folder: Path, history: History, steps: int = 0, step_time_s: float = 0.1) -> Path:
    """Write the folder of a run with that history and `steps` steps."""
    folder.mkdir(parents=True, exist_ok=True)
    with EventLog(folder / "events.jsonl") as log:
        for event in history.events:
            log.write(event)
    figures = [
        {"step": s, "loss": 2 + 4 / s, "step_time_s": step_time_s, "tokens_per_s": 9.0} for s in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in figures))
    return folder
