"""All timeouts of failure detection and recovery, in one table."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ft.base import bounded_json, files, quantities, timeout_order
from ft.base.errors import Problems, UserError

VARIABLE = "FT_LIMITS"
"""Environment variable in which an agent passes the timeouts that are not the defaults on to its workers."""


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of the control plane, the agents and the workers, all in seconds.

    The timeouts marked "+ 3 steps" grow: ``calibrated`` adds three times the step time to each; "+ 10 steps" likewise.

    Attributes:
        beat_s: interval between heartbeats of a worker. A Python thread sends them, so they stop while another thread
            holds the interpreter lock.
        agent_beat_s: interval between heartbeats of an agent. Each carries the last heartbeats of its workers.
        stopped_s: a worker without a heartbeat for so long counts as hung if its process is stopped (state T in /proc).
        silent_s: a worker without a heartbeat for so long counts as hung although its process is not stopped. This is
            longer than a garbage collection, an import or a compilation holds the interpreter lock. A worker for which
            others wait counts as hung after stall_s.
        stuck_s: the warm pool (the process that forks workers) or a control plane that is starting counts as hung if it
            owes a result and uses no CPU for so long (imports use CPU). It is killed and started again; after the third
            time the run ends.
        mute_s: a worker of the first start that uses no CPU for so long, while others have connected, counts as hung.
        suspicion_s: after a lost connection, so long the control plane waits for news that the peer has died. Then it
            blames the connection.
        quorum_s: a control plane that has heard nothing from most agents for so long stops renewing its lease, so that
            another agent can take over: the control plane itself may be partitioned.
        contact_s: an agent whose control plane has not answered for so long searches for a control plane again.
        fence_s: an agent that is partitioned from a control plane which runs elsewhere kills its workers after so long,
            because their logical ranks are about to be given to other workers.
        agent_lost_s: a node counts as lost if its agent has sent no heartbeat for so long (several heartbeats).
        lease_beat_s: interval between renewals of the control plane's lease.
        lease_s: a lease that was not renewed for so long has expired, and the next agent in order starts a control
            plane. Each agent waits one turn_s longer than the agent before it.
        turn_s: extra waiting time of each agent in this order.
        away_s: so long agents search for a control plane before they end the run.
        stall_s: a worker that sends heartbeats and computes while others wait for it counts as hung after so long (a
            checkpoint save may take this time); + 3 steps.
        start_s: replaces stall_s until a worker's first step has ended: compilation, caches, first allocations.
        collective_s: if all workers wait in communication operations for so long, a connection is at fault, not a slow
            worker; + 3 steps.
        inspection_s: so long a verdict on a hang waits for an inspection, in which all workers say what they wait for.
        endless_s: a worker whose step has not ended after so long counts as hung, also if no other worker waits for it.
            Evaluations and checkpoint saves do not count; + 10 steps, and + start_s until a worker's first step has
            ended.
        drain_s: limit for leaving a closed epoch. A worker leaves at its next communication operation or copy to host
            memory; + 3 steps.
        launch_s: limit for NCCL to take an operation, while it connects to other ranks; a whole number. Torch notices
            an abort meanwhile only at this limit (TORCH_NCCL_NONBLOCKING_TIMEOUT).
        abort_s: limit for the abort of a group's NCCL communicator; then the worker is replaced.
        verdict_s: a worker whose connection failed waits so long for the epoch to be closed before it raises; + 3
            steps.
        repair_s: limit for rebuilding process groups and restoring state, and again for the first step to begin.
        assemble_s: limit for a worker that is new to its seat to build model and optimizer.
        ready_s: limit for a started worker to connect: imports, on a machine that is busy with training.
        device_s: limit for the process of a lost worker to end and to free its device (GPU). After that the device
            counts as unusable.
        exit_s: after SIGTERM or SIGINT, so long all workers may get nowhere: none ends an operation, begins a step, or
            works on an evaluation or a save (for start_s at most). Then they are killed; + 3 steps, and + start_s until
            a worker's first step has ended.
        leave_s: after a worker has exited with code 0, so long the others may continue before the exit counts as a
            loss.
        join_s: limit for all agents to join and all workers to connect at the start.
    """

    beat_s: float = 0.1
    agent_beat_s: float = 0.25
    stopped_s: float = 0.25
    silent_s: float = 30.0
    stuck_s: float = 18.0
    mute_s: float = 50.0
    suspicion_s: float = 0.3
    quorum_s: float = 0.75
    contact_s: float = 1.5
    fence_s: float = 3.0
    agent_lost_s: float = 3.5
    lease_beat_s: float = 0.25
    lease_s: float = 1.25
    turn_s: float = 0.25
    away_s: float = 120.0
    stall_s: float = 10.0
    start_s: float = 300.0
    collective_s: float = 15.0
    inspection_s: float = 3.0
    endless_s: float = 600.0
    drain_s: float = 20.0
    launch_s: float = 15.0
    abort_s: float = 10.0
    verdict_s: float = 40.0
    repair_s: float = 60.0
    assemble_s: float = 120.0
    ready_s: float = 180.0
    device_s: float = 30.0
    exit_s: float = 60.0
    leave_s: float = 15.0
    join_s: float = 600.0

    def check(self) -> "Timeouts":
        """Return this object if all values are valid.

        Raises:
            UserError: a timeout is not positive, or not longer than the timeouts that have to expire before it.
        """
        timeout_order.check(self, "timeout", _ORDER)
        return self

    def calibrated(self, step_s: float | None) -> "Timeouts":
        """Return the timeouts with three or ten step times added to each one that a long step may delay.

        ``step_s`` is the step time in seconds, or None before a step has ended; then start_s replaces stall_s and
        collective_s, and is added to endless_s and exit_s.
        """
        if step_s is None:
            endless_s, exit_s = self.endless_s + self.start_s, self.exit_s + self.start_s
            return replace(self, stall_s=self.start_s, collective_s=self.start_s, endless_s=endless_s, exit_s=exit_s)
        slack = 3.0 * step_s
        names = ("stall_s", "collective_s", "drain_s", "verdict_s", "exit_s")
        grown = {name: getattr(self, name) + slack for name in names}
        return replace(self, **grown, endless_s=self.endless_s + 10.0 * step_s)

    def changed(self) -> dict[str, float]:
        """Return the timeouts that are not the defaults, by name."""
        defaults = asdict(Timeouts())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    @classmethod
    def of_worker(cls, environment: Mapping[str, str]) -> "Timeouts":
        """Return the timeouts that the agent has passed to a worker in its ``environment``."""
        return cls(**bounded_json.loads(environment.get(VARIABLE, "{}")))


BEHIND_ETCD = {"contact_s": 3.0, "lease_s": 3.0, "fence_s": 5.5, "agent_lost_s": 6.0}
"""Values for a run whose shared state is on etcd.

A leader election of etcd (1 to 2 s with its defaults) or a paused etcd server must not look like a control plane that
does not renew its lease, and a control plane that waits 2 s for etcd not like a silent one.
"""

_ORDER = (
    ("beat_s", "stopped_s"),
    ("beat_s", "stall_s"),
    ("stopped_s", "stall_s"),
    ("stall_s", "silent_s"),
    ("silent_s", "start_s"),
    ("agent_beat_s", "agent_lost_s"),
    ("agent_beat_s", "contact_s"),
    ("contact_s", "fence_s"),
    ("fence_s", "agent_lost_s"),
    ("lease_beat_s", "lease_s"),
    ("agent_beat_s", "quorum_s"),
    ("quorum_s", "contact_s"),
    ("lease_s", "fence_s"),
    ("lease_s", "away_s"),
    ("stall_s", "start_s"),
    ("start_s", "endless_s"),
    ("stopped_s", "stuck_s"),
    ("stuck_s", "mute_s"),
    ("stuck_s", "away_s"),
    ("mute_s", "join_s"),
    ("stall_s", "collective_s"),
    ("agent_beat_s", "inspection_s"),
    ("inspection_s", "agent_lost_s"),
    ("agent_lost_s", "drain_s"),
    ("collective_s", "drain_s"),
    ("launch_s", "drain_s"),
    ("abort_s", "drain_s"),
    ("suspicion_s", "verdict_s"),
    ("collective_s", "verdict_s"),
    ("collective_s", "exit_s"),
    ("drain_s", "repair_s"),
    ("drain_s", "assemble_s"),
    ("assemble_s", "join_s"),
    ("ready_s", "join_s"),
    ("stopped_s", "device_s"),
    ("device_s", "ready_s"),
)
"""Pairs (shorter, longer) of timeouts: the first has to expire before the second."""


_NAMES = [entry.name for entry in fields(Timeouts)]


def timeouts_of(path: str | None, base: Mapping[str, float]) -> Timeouts:
    """Return the timeouts of a run: those of the file, then those of ``base``, then the defaults.

    Args:
        path: YAML, TOML or JSON file: name of a timeout -> a number of seconds, or a text such as "2m"; None: no file.
        base: timeouts, in seconds, that replace the defaults.

    Raises:
        UserError: the file cannot be read, a name or a value is wrong, or the timeouts do not fit each other.
    """
    values = {} if path is None else files.read_structured(path, "limits")
    if not isinstance(values, dict):
        raise UserError(f"limits {path} is not a table of timeouts by name", "write lines such as: stall_s: 20")
    problems, given = Problems(), {}
    for name, value in values.items():
        with problems:
            given[_known(path, name)] = _seconds(path, name, value)
    problems.refuse()
    try:
        return Timeouts(**{**base, **given}).check()
    except UserError as error:
        raise UserError.of([(f"limits {path}: {problem}", fix) for problem, fix in error.problems]) from error


def _known(path: str | None, name: Any) -> str:
    if name in _NAMES:
        return str(name)
    near = difflib.get_close_matches(str(name), _NAMES, n=3) or _NAMES
    raise UserError(f"limits {path}: there is no timeout {name}", f"did you mean {' or '.join(near)}?")


def _seconds(path: str | None, name: Any, value: Any) -> float:
    try:
        return quantities.seconds(value, bare=1.0)
    except ValueError as error:
        raise UserError(f"limits {path}: {name} {value!r}: {error}", "give seconds, or a text such as 2m") from error
