"""Handlers of the control plane for reports of normal operation: agents and workers that join, progress and finish.

Each handler takes the state, the time in seconds, the report and the list of decisions, to which it appends. A report
that arrives late or twice is ignored; the decisions record this. The training script is the user's program, which the
agents start in every worker.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from ft.base import events
from ft.faults import verdict
from ft.faults.verdict import USER_CODE, signal_name
from ft.job import messages as m
from ft.job.control import devices, epochs, history, start_checks
from ft.job.control import run_ends as ends
from ft.job.control.failures import WorkerFault, lose_agent, remove, tell
from ft.job.control.state import (
    CLOSED,
    EPOCH_OPEN,
    GATHERING,
    REPAIRING,
    RESUMING,
    Agent,
    ControlState,
    Decisions,
    GridPosition,
    Worker,
)
from ft.net.codec import BadMessage, from_json


def agent_joined(state: ControlState, now: float, report: m.AgentJoined, out: Decisions) -> None:
    """Register an agent. At the start, end the run if the nodes have another number of workers than announced."""
    if report.node in state.agents:
        out.add(f"ignored: the agent of {report.node} has joined before")
        return
    first = not state.agents
    state.agents[report.node] = Agent(report, now, report.seats)
    out.add(f"the agent of {report.node} is there, {state.nodes_seen()} of {state.options.nodes}")
    for device, problem in report.unusable.items():
        devices.reject(state, state.agents[report.node], device, problem, out)
    if first:
        state.since = now
    if first and not state.options.restarts:
        out.note(events.RUN_STARTED, command=list(state.options.command), world_size=state.options.world_size)
    told = events.SCHEMA[events.AGENT_JOINED].detail
    out.note(events.AGENT_JOINED, node=report.node, **{name: getattr(report, name) for name in told})
    seats = {agent.node: agent.joined.seats for agent in state.agents.values()}
    at_start = state.phase == GATHERING and not state.restarts and state.nodes_seen() == state.options.nodes
    if at_start and sum(seats.values()) != state.options.world_size:
        counts = ", ".join(f"{node}: {count}" for node, count in sorted(seats.items()))
        message = f"{state.options.world_size} workers were announced, the nodes have {sum(seats.values())} ({counts})"
        message += "\n  fix: give every ft run the same --nproc-per-node"
        ends.stop(state, now, USER_CODE, message, out)
        return
    start_checks.agent_joined(state, now, state.agents[report.node], at_start, out)


def agent_beat(state: ControlState, now: float, report: m.AgentBeat, out: Decisions) -> None:
    """Store the heartbeat of an agent and of its workers.

    If the agent was silent before, its devices may be released later by the time of the silence.
    """
    agent = state.agents.get(report.node)
    if agent is not None and not agent.gone:
        devices.heard(agent, now, state.options.timeouts.contact_s, out)
    store_beat(state, now, report)


def store_beat(state: ControlState, now: float, report: m.AgentBeat) -> None:
    """Replace the heartbeat of an agent, unless the agent is unknown or lost."""
    agent = state.agents.get(report.node)
    if agent is not None and not agent.gone:
        agent.heard_at, agent.beats = now, dict(report.workers)


def agent_leaving(state: ControlState, now: float, report: m.AgentLeaving, out: Decisions) -> None:
    """Handle an agent that exits on purpose; its workers are lost, or the run ends with them."""
    agent = state.agents.get(report.node)
    if agent is None or agent.gone:
        out.add(f"ignored: the agent of {report.node} is known to be gone")
    elif report.signum and (state.phase == GATHERING or any(w.node == agent.node for w in state.seated())):
        ends.agent_left(state, now, agent, report.signum, out)
    elif report.signum:  # it had no seated worker: the other nodes continue, or save and exit on their own signal
        lose_agent(state, now, agent, f"its agent was told to end by {signal_name(report.signum)}", out)
    else:
        lose_agent(state, now, agent, "its agent has ended", out)


def worker_started(state: ControlState, now: float, report: m.WorkerStarted, out: Decisions) -> None:
    """Register a worker whose process has been started."""
    agent = state.agents.get(report.node)
    if agent is None or agent.gone or report.worker in agent.started:
        out.add(f"ignored: {report.worker} is known, or its node is not")
        return
    agent.started.append(report.worker)
    if report.rank is not None and report.restart not in (None, state.restarts):
        out.add(f"ignored: {report.worker} was started for restart {report.restart}, the last one is {state.restarts}")
        return
    started = Worker(report.worker, report.node, report.pid, report.rank, now, local_rank=report.local_rank)
    state.workers[report.worker] = started
    if report.rank is None and state.spawning.get(report.node):
        state.spawning[report.node].pop(0)
    out.add(f"{report.worker} was started " + ("as a standby" if report.rank is None else f"for rank {report.rank}"))
    out.note(events.WORKER_STARTED, node=report.node, worker=report.worker, rank=report.rank, pid=report.pid)


def worker_ready(state: ControlState, now: float, report: m.WorkerReady, out: Decisions) -> None:
    """Mark a worker as ready to take a seat."""
    worker = state.workers.get(report.worker)
    if worker is None or worker.ready:
        out.add(f"ignored: {report.worker} is " + ("unknown or gone" if worker is None else "ready already"))
        return
    if not state.attached and state.phase == GATHERING:
        state.since = now
    worker.address, worker.ready, state.attached = report.address, True, True
    out.add(f"{report.worker} is ready")
    if worker.started_for is None:
        state.failed_starts = 0
        out.note(events.STANDBY_READY, node=worker.node, worker=worker.name)


def worker_released(state: ControlState, now: float, report: m.WorkerReleased, out: Decisions) -> None:
    """Record that a worker has left the closed epoch."""
    worker = state.workers.get(report.worker)
    if worker is None or worker.leaving_epoch < 0 or report.epoch != worker.leaving_epoch:
        if worker is None:
            known = "is not a worker of this run any more"
        elif worker.leaving_epoch < 0:
            known = "has reported this before"
        else:
            known = f"has yet to leave epoch {worker.leaving_epoch}"
        out.add(f"ignored: {report.worker} reports that it has left epoch {report.epoch}, but it {known}")
        return
    worker.leaving_epoch, worker.release = -1, report
    out.add(f"{report.worker} has left epoch {report.epoch}, at step {report.step}")


def worker_arrived(state: ControlState, now: float, report: m.WorkerArrived, out: Decisions) -> None:
    """Record that a joiner has built model and optimizer, and can be connected to the other workers.

    A joiner repeats this report until it is told to repair, and sends it again if another epoch is opened before that.
    """
    worker = state.workers.get(report.worker)
    if worker is None or worker.rank is None or not worker.empty:
        out.add(f"ignored: {report.worker} is not about to join an epoch")
        return
    if worker.assembled and report.epoch < state.epoch:
        out.add(f"ignored: {report.worker} has arrived in epoch {report.epoch}, the epoch is {_where(state)}")
        return
    again, worker.assembled, worker.arrived = worker.assembled, True, report
    if again:
        out.add(f"{report.worker} has arrived again")
        return
    inherits = f", with its predecessor's snapshots of step(s) {report.holdings.own}" if report.holdings.own else ""
    out.add(f"{report.worker} has arrived for logical rank {worker.rank}{inherits}")
    out.note(events.JOINER_ARRIVED, epoch=state.epoch, worker=worker.name, node=worker.node, rank=worker.rank)


def worker_inherited(state: ControlState, now: float, report: m.WorkerInherited, out: Decisions) -> None:
    """Record that a worker has taken over the snapshots of another one, which has ended."""
    worker = state.workers.get(report.worker)
    if worker is None:
        out.add(f"ignored: {report.worker}, which has inherited snapshots, is unknown or gone")
        return
    worker.inherited = report.holdings
    ranks = ", ".join(map(str, report.holdings.whole))
    out.add(f"{report.worker} serves what workers of its node have left, which held logical rank(s) {ranks}")


def worker_repaired(state: ControlState, now: float, report: m.WorkerRepaired, out: Decisions) -> None:
    """Record that a worker has rebuilt its groups and restored its state."""
    worker = state.workers.get(report.worker)
    if worker is None or worker.rank is None or report.epoch != state.epoch or state.phase != REPAIRING:
        out.add(f"ignored: {report.worker} is repaired for epoch {report.epoch}, the epoch is {_where(state)}")
    elif worker.repaired is not None:
        out.add(f"ignored: {report.worker} has reported this before")
    else:
        worker.repaired = report
        out.add(f"{report.worker} is repaired")


def worker_resumed(state: ControlState, now: float, report: m.WorkerResumed, out: Decisions) -> None:
    """Record that a worker begins to train in the present epoch."""
    worker = state.workers.get(report.worker)
    if worker is None or worker.rank is None or report.epoch != state.epoch or state.phase != RESUMING:
        out.add(f"ignored: {report.worker} resumes epoch {report.epoch}, the epoch is {_where(state)}")
        return
    worker.resumed, state.protected = report.epoch, True
    if state.fresh:  # a joiner's heap has the memory that it was told to keep ready
        state.footprint = max(state.footprint[0], report.heap), max(state.footprint[1], report.snapshot)
    state.step = max(state.step, report.step) if state.fresh else state.step
    out.add(f"{report.worker} begins epoch {report.epoch} after step {report.step}")


def worker_done(state: ControlState, now: float, report: m.WorkerDone, out: Decisions) -> None:
    """Record that a worker has done its last step; end the run when all workers have."""
    worker = state.workers.get(report.worker)
    if worker is None or worker.rank is None or report.epoch != state.epoch or state.phase not in EPOCH_OPEN:
        out.add(f"ignored: {report.worker} is done in epoch {report.epoch}, the epoch is {_where(state)}")
        return
    worker.done, worker.end = True, report
    out.add(f"{report.worker} is done, at step {report.step}")
    state.step = max(state.step, report.step)
    ends.finish_if_done(state, now, out)


def master_chosen(state: ControlState, now: float, report: m.MasterChosen, out: Decisions) -> None:
    """Send all agents the address (MASTER_ADDR, MASTER_PORT) at which the training script initializes
    ``torch.distributed`` in a warm restart.
    """
    where = f"{report.host}:{report.port}"
    out.add(f"in restart {report.number} the training script has its rendezvous at {where}", report)


def observed(state: ControlState, now: float, report: m.Observed, out: Decisions) -> None:
    """Record an event that a worker has observed.

    A layout (of ranks and their copies) is stored. The settings of a worker (``EVENT``) are compared with those
    of the other workers. A finding of a node about itself is logged and weighed. An injected fault is logged, and its
    number is stored, so that it does not happen again. That a step differs from its first try is printed, for the first
    rank of an epoch that says so. All other events are only logged.
    """
    detail = report.detail
    if report.event == "layout":
        _layout(state, detail, out)
        return
    if report.event == EVENT:
        worker, settings = state.workers.get(str(detail.get("worker"))), detail.get("settings", {})
        if worker is not None and isinstance(settings, dict):
            compare(state, now, worker, settings, out)
        return
    if report.event == events.HEALTH_FOUND:
        history.record_finding(state, now, detail, out)
        return
    if report.event == events.STEP_DIFFERS:
        _step_differs(state, detail, out)
        return
    number = detail.get("number")
    if report.event == events.FAULT_INJECTED and isinstance(number, int) and number not in state.fired:
        state.fired.append(number)
    out.add(f"observed: {report.event}").note(report.event, **detail)


@dataclass(frozen=True)
class _Layout:
    """What a worker says about ranks and about the run; the state has the same fields.

    Attributes:
        worker: the worker that says it, if it speaks of itself.
        evict_stragglers: ``ControlState.evict_factor``.
    """

    worker: str | None = None
    dp_peers: dict[int, list[int]] = field(default_factory=dict)
    shards: dict[int, list[str]] = field(default_factory=dict)
    copies: dict[int, list[int]] = field(default_factory=dict)
    complete: dict[int, bool] = field(default_factory=dict)
    places: dict[int, GridPosition] = field(default_factory=dict)
    checkfree: str | None = None
    evict_stragglers: float | None = None


def _layout(state: ControlState, detail: dict[str, object], out: Decisions) -> None:
    known = {one.name for one in fields(_Layout)}
    try:
        said: _Layout = from_json(_Layout, {name: value for name, value in detail.items() if name in known})
    except BadMessage as error:
        out.add(f"ignored: a layout that cannot be read: {error}")
        return
    if said.worker is not None and said.worker not in state.workers:
        out.add(f"ignored: the layout of {said.worker}, which is unknown or gone")
        return
    for name in ("dp_peers", "shards", "copies", "complete", "places"):
        getattr(state, name).update(getattr(said, name))
    state.checkfree = state.checkfree if said.checkfree is None else said.checkfree
    state.evict_factor = state.evict_factor if said.evict_stragglers is None else said.evict_stragglers
    about = ", ".join(f"rank {rank}" for rank in sorted({*said.shards, *said.copies, *said.places}))
    out.add(f"the layout of {about}" if about else f"stragglers are replaced from {state.evict_factor} on")


def _step_differs(state: ControlState, detail: dict[str, object], out: Decisions) -> None:
    step, epoch, found, rank = (detail.get(name) for name in ("step", "epoch", "differences", "rank"))
    if not (isinstance(step, int) and isinstance(epoch, int) and isinstance(found, list) and found):
        out.add(f"ignored: a step that differs, without step, epoch or differences: {detail}")
        return
    orders = []
    if epoch > state.told_of_difference:
        state.told_of_difference = epoch
        rank = rank if isinstance(rank, int) else None
        orders.append(m.Notice(step_differs(step, rank, [str(each) for each in found])))
    out.add(f"step {step} differs from its first try", *orders).note(events.STEP_DIFFERS, **detail)


def step_differs(step: int, rank: int | None, found: list[str]) -> str:
    """Return the message about a step that a recovery had done again, and that differs from its first try."""
    return (
        f"step {step} was done again after the recovery and differs from its first try, on rank {rank}: "
        f"{'; '.join(found)}\n"
        "  fix: read each step's batches by the number of the step, and keep nothing else from step to step outside of "
        "model, optimizer, scheduler and position (docs/hot-swap.md, A training loop of your own)"
    )


def _where(state: ControlState) -> str:
    return f"{state.epoch}, {state.phase}"


EVENT = "settings"
_UNSET = "not set"
_MOST = 20


def compare(state: ControlState, now: float, worker: Worker, settings: Mapping[str, str], out: Decisions) -> None:
    """Compare the settings that ``worker`` reported with those of the first worker.

    Before training begins, a difference ends the run: nothing is lost yet, and only the user knows which setting is
    right. Later, only the new worker is rejected, and the run continues without it. If seats are empty, and workers
    were rejected for them several times in a row, the run ends: the next worker would be rejected, too.
    """
    if not state.settings:
        state.settings, state.settings_of = dict(settings), worker.name
        out.add(f"{worker.name} says how it is set up: {len(settings)} settings")
        return
    found = differences(settings, worker.name, state.settings, state.settings_of)
    if not found:
        out.add(f"{worker.name} is set up as {state.settings_of} is")
        return
    state.failed_starts += 1
    in_vain = state.phase == CLOSED and state.failed_starts >= epochs.MOST_FAILED_STARTS
    ends_run, judged = state.phase == GATHERING or in_vain, verdict.of_drift(found)
    fault = WorkerFault(worker, judged if ends_run else replace(judged, action=verdict.REPLACE))
    tell(state, fault, out)
    if ends_run:
        message = f"{worker.name}: {judged.reason}\n  fix: start every node with the same flags, environment and code"
        ends.stop(state, now, verdict.USER_CODE, message, out)
        return
    remove(state, now, fault, out)


def differences(mine: Mapping[str, str], who: str, theirs: Mapping[str, str], whose: str) -> list[str]:
    """Return one sentence for each setting that differs between the workers ``who`` and ``whose``."""
    differ = [name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)]
    found = [
        f"{name}: {mine.get(name, _UNSET)} ({who}), {theirs.get(name, _UNSET)} ({whose})" for name in differ[:_MOST]
    ]
    return found + ([f"and {len(differ) - _MOST} more"] if len(differ) > _MOST else [])


def control_back(state: ControlState, now: float, report: m.ControlBack, out: Decisions) -> None:
    """After a failover, restart every timer at ``now``: the agents resend all reports that the previous control plane
    has not recorded. After a pause of this control plane, extend every timer by the pause.
    """
    if report.paused_s:
        forgive(state, now, report.paused_s)
        out.add(f"the control plane was paused for {report.paused_s:.1f} s, which counts for no limit")
        return
    away = now - max([state.since, *(agent.heard_at for agent in state.agents.values())])
    forgive(state, now)
    out.add(f"the control plane is back, beside the agent of {report.node} (term {report.term}), after {away:.1f} s")
    if report.damaged:
        text = f"{report.damaged} damaged line(s) of the control plane's journal were skipped: what they said is lost"
        out.add(text, m.Notice(text))
    out.note(events.CONTROL_BACK, node=report.node, term=report.term, away=round(away, 3), damaged=report.damaged)


def forgive(state: ControlState, now: float, seconds: float = math.inf) -> None:
    """Let every timer begin ``seconds`` later, but not after ``now``."""

    def later(at: float) -> float:
        return min(now, at + seconds)

    state.since = later(state.since)
    for agent in state.agents.values():
        agent.heard_at = later(agent.heard_at)
        agent.held = {worker: replace(hold, since=later(hold.since)) for worker, hold in agent.held.items()}
    for worker in state.workers.values():
        worker.since, worker.left_at = later(worker.since), later(worker.left_at)
    for node, times in state.spawning.items():
        state.spawning[node] = [later(at) for at in times]
    state.suspicions = {
        name: replace(suspicion, since=later(suspicion.since)) for name, suspicion in state.suspicions.items()
    }
