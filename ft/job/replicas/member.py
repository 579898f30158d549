"""The agents of the replicas on one node: their processes, lives and exits, as the launcher sees them.

The agent of a replica is an ordinary ``ft run``, configured by the launcher (:func:`main`). A new agent begins a new
life of its replica.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ft import faults as inject
from ft.base import bounded_json, events, files
from ft.base.errors import UserError
from ft.job.agent.devices import LeftOut
from ft.job.agent.options import Cluster, RunOptions, Script
from ft.job.control.timeouts import Timeouts
from ft.job.replicas import policy
from ft.job.replicas.places import LauncherPart
from ft.platform import election, processes
from ft.platform.supervisor import Supervisor


def pack(options: RunOptions, faults: list[inject.Fault], began: float | None) -> str:
    """Encode the arguments of :func:`main` as JSON. ``began``: wall-clock time of the replica's first epoch, None
    before it.
    """
    values = {**asdict(options), "run_dir": str(options.run_dir)}
    return json.dumps({"options": values, "faults": inject.to_json(faults), "began": began})


def unpack(text: str) -> tuple[RunOptions, list[inject.Fault], float | None]:
    """Decode what :func:`pack` has encoded."""
    given = bounded_json.loads(text, non_finite=True)
    values = given["options"]
    values |= {"script": Script(**values["script"]), "cluster": Cluster(**values["cluster"])}
    values |= {"run_dir": Path(values["run_dir"]), "timeouts": Timeouts(**values["timeouts"])}
    values |= {"left_out": LeftOut(**values["left_out"])}
    return RunOptions(**values), inject.from_json(given["faults"]), given["began"]


def main() -> None:
    """Run the agent described by the file ``sys.argv[1]``, written with :func:`pack`; exit with its exit code."""
    from ft.job.agent.agent import carry_out

    options, faults, began = unpack(Path(sys.argv[1]).read_text())
    processes.set_name(f"ft-{options.run_dir.name}")
    try:
        code = carry_out(options, faults, began=began)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may be inside torch's store: a normal interpreter shutdown would abort the process


@dataclass
class ReplicaMember:
    """One replica of the launcher, and the process of its agent.

    Attributes:
        part: the workers of the replica that are on this node.
        options: options of its agents; ``life`` is filled in at each start.
        faults: injected faults of the replica.
        environment: variables set in addition to those of this process.
        supervisor: supervisor of the launcher's child processes.
        is_late: whether the other replicas may be training already.
        on_exit: called with this member and the exit code when an agent has ended.
        process: process of its agent, or None.
        lives: lifetimes in seconds of the agents that have ended.
        due: time (monotonic) at which the next agent is to be started.
        left_at: time (monotonic) at which the last agent ended.
        code: exit code of the last agent, once it is certain that no other agent follows.
        given_up: whether no other agent follows because the replica failed.
        restarts_then: number of warm restarts inside the replica when the first replica of the run had finished; None
            before.
    """

    part: LauncherPart
    options: RunOptions
    faults: list[inject.Fault]
    environment: Mapping[str, str]
    supervisor: Supervisor
    is_late: bool = False
    on_exit: Callable[["ReplicaMember", int], None] = lambda member, code: None
    process: subprocess.Popen[bytes] | None = None
    lives: list[float] = field(default_factory=list)
    due: float = 0.0
    left_at: float = 0.0
    code: int | None = None
    given_up: bool = False
    restarts_then: int | None = None
    _since: float = 0.0

    @property
    def replica(self) -> int:
        return self.part.replica

    @property
    def folder(self) -> Path:
        return self.options.run_dir

    @property
    def out(self) -> Path:
        """Return the file with the agent's standard output: the output of the workers, and the agent's messages."""
        return self.folder / "logs" / f"agent{self._suffix}.out"

    @property
    def err(self) -> Path:
        """Return the file with the agent's standard error."""
        return self.folder / "logs" / f"agent{self._suffix}.err"

    @property
    def _order(self) -> Path:
        """Return the file with the agent's arguments, which may be too long for a command line when there are many
        faults.
        """
        return self.folder / f"agent{self._suffix}.json"

    @property
    def _suffix(self) -> str:
        part = self.part
        return str(part.node_rank) if part.nodes > 1 else ""

    @property
    def waits(self) -> bool:
        """Return whether an agent is to be started."""
        return self.process is None and self.code is None

    @property
    def joins(self) -> bool:
        """Return whether the next agent joins a life that the agent of the replica's first node begins."""
        return self.part.node_rank > 0 and bool(self.lives)

    def start(self) -> None:
        """Start an agent, in the next life of the replica.

        Raises:
            OSError: the folder cannot be written, or no process can be created.
        """
        self.out.parent.mkdir(parents=True, exist_ok=True)
        life = next_life(self.folder, self.part.node_rank)
        options = replace(self.options, life=life, max_restarts=life + self.options.max_restarts)
        left = inject.left(self.faults, self.folder)
        files.replace(self._order, pack(options, left, began(self.folder)))
        environment = {**self.environment, "FT_HSDP_LIFE": str(life or int(self.is_late))}
        self.process = self.supervisor.start(
            "ft.job.replicas.member",
            [str(self._order)],
            self.out,
            lambda code: self.on_exit(self, code),
            err=self.err,
            environment={**os.environ, **environment},
            ignores_signals=False,
        )
        self._since = time.monotonic()

    def ended(self, code: int, ending: bool) -> policy.Reaction:
        """Record that the agent has ended; return what the launcher does next.

        ``ending``: whether the run is ending, so that no other agent is started however this one ended.
        """
        self.process = None
        self.left_at = now = time.monotonic()
        self.lives.append(now - self._since)
        answer = policy.after_exit(code, processes.how_it_ended(code), self.lives)
        if answer.action == policy.AGAIN and not ending:
            self.due = now + answer.pause_s
            return answer
        self.code = 128 - code if code < 0 else code
        self.given_up = answer.action == policy.GIVE_UP and not ending
        return answer

    def send(self, signum: int) -> None:
        """Send a signal to the agent."""
        if self.process is not None:
            processes.send(self.process.pid, signum)


def next_life(folder: Path, node_rank: int) -> int:
    """Return the number of the life that a new agent begins: greater than all numbers in the journal and the lease
    record.

    Only the agent of the replica's node 0 begins a new life. Agents on other nodes join the latest life, and are
    notified if there is a newer one.
    """
    standing = election.read(folder)
    if node_rank:
        return standing.life if standing is not None else 0
    numbers = [
        int(event.detail.get("number", 0)) for event in events.read(folder / "events.jsonl") if _is_restart(event)
    ]
    numbers += [standing.life] if standing is not None else []
    return max(numbers, default=-1) + 1


def began(folder: Path) -> float | None:
    """Return the wall-clock time of the replica's first epoch, None before it."""
    opened = (event.wall for event in events.read(folder / "events.jsonl") if event.name == events.EPOCH_OPENED)
    return next(opened, None)


def _is_restart(event: events.Event) -> bool:
    return event.name in (events.RESTARTED, events.CONTROL_RESTARTED)
