"""The devices (GPUs) of the nodes: which of them are in use, which come free, and which no worker can use.

A worker gets a device when it takes a seat (a logical rank). A standby makes one ready if its node has one to spare;
the device is kept for it, and goes to another worker only if no other one is free. Two workers never train on one: NCCL
refuses a communicator with two ranks on one GPU, and a training worker usually fills the memory. The device of a lost
worker is held until that worker's process has ended and its memory is free, which its agent reports. A node without
devices (a CPU) has room for any number of workers.
"""

import itertools
from collections.abc import Collection
from dataclasses import replace

from ft.base import events
from ft.job import messages as m
from ft.job.control.state import GATHERING, Agent, ControlState, Decisions, Hold, Vacancy, Worker

_NO_LIMIT = 1 << 30


def room(agent: Agent, others: int = 0) -> int:
    """Return how many further workers the node's devices can serve besides ``others`` that are in use, now or once the
    held devices are free.
    """
    if not agent.joined.devices:
        return _NO_LIMIT
    stuck = {hold.device for hold in agent.held.values() if hold.overdue}
    return agent.joined.devices - len(stuck | set(agent.unusable)) - others


def choose(
    agent: Agent,
    vacancy: Vacancy,
    taken: Collection[tuple[str, int]],
    kept: Collection[tuple[str, int]] = (),
    own: int | None = None,
) -> int | None:
    """Return the device for the next worker of a node, None if none is free now.

    It is the device that is kept for this worker, else that of the lost worker if it was there, else the first free
    one. One that is kept for another worker comes last.

    Args:
        taken: (node, device) of the devices in use.
        kept: (node, device) of the devices that are kept for standbys.
        own: the device that is kept for this worker; None: there is none.
    """
    blocked = {device for node, device in taken if node == agent.node}
    blocked |= {hold.device for hold in agent.held.values()} | set(agent.unusable)
    of_others = {device for node, device in kept if node == agent.node and device != own}
    first = [*([] if own is None else [own]), *([vacancy.local_rank] if vacancy.node == agent.node else [])]
    for unwanted in (blocked | of_others, blocked):
        indices = range(agent.joined.devices) if agent.joined.devices else itertools.count()
        found = next((device for device in itertools.chain(first, indices) if device not in unwanted), None)
        if found is not None:
            return found
    return None


def kept(state: ControlState) -> set[tuple[str, int]]:
    """Return (node, device) of the devices that are kept for standbys."""
    return {(worker.node, worker.local_rank) for worker in state.standbys() if worker.keeps_device}


def keep(state: ControlState, standbys: Collection[Worker]) -> dict[str, int]:
    """Keep a device for each of these standbys whose node has one to spare; return standby -> device."""
    found = {}
    for worker in standbys:
        agent = state.agents[worker.node]
        used = {(other.node, other.local_rank) for other in state.seated()} | kept(state)
        device = choose(agent, Vacancy("", "", 0), used) if agent.joined.devices else None
        if device is not None:
            worker.local_rank, worker.keeps_device = device, True
            found[worker.name] = device
    return found


def hold(state: ControlState, worker: Worker, now: float) -> None:
    """Hold the device of a lost worker, unless its agent has reported before that the device is released."""
    agent = state.agents.get(worker.node)
    has_device = worker.rank is not None or worker.keeps_device
    if agent is not None and agent.joined.devices and has_device and not worker.released:
        agent.held[worker.name] = Hold(worker.local_rank, now)


def reject(state: ControlState, agent: Agent, device: int, problem: str, out: Decisions) -> None:
    """Record that no worker can use a device of a node."""
    if agent.unusable.get(device) == problem:
        return
    agent.unusable[device] = problem
    out.add(f"device {device} of {agent.node} is not used any more: {problem}")
    out.note(events.DEVICE_UNUSABLE, node=agent.node, device=device, reason=problem)


def released(state: ControlState, now: float, report: m.DeviceReleased, out: Decisions) -> None:
    """Record that the device of an ended worker is free or unusable, or that a device has become unusable by itself."""
    agent = state.agents.get(report.node)
    if agent is None or agent.gone:
        out.add(f"ignored: device {report.device} of {report.node}, which is unknown or lost")
        return
    if report.worker in state.workers:
        state.workers[report.worker].released = True
    agent.held.pop(report.worker, None)
    if report.problem:
        reject(state, agent, report.device, report.problem, out)
    elif report.worker:
        out.add(f"{report.worker} has released device {report.device} of {agent.node}")


def heard(agent: Agent, now: float, contact_s: float, out: Decisions) -> None:
    """Extend the deadlines of an agent's devices by the time since its previous heartbeat, if that is a long time.

    An agent that was stopped could not report that a device is free. Call this function before ``agent.heard_at`` is
    updated. The extension is a decision, so that it is in the journal, which leaves out most heartbeats.
    """
    if agent.held and is_silent(agent, now, contact_s):
        silent_s = now - agent.heard_at
        agent.held = {worker: replace(hold, since=hold.since + silent_s) for worker, hold in agent.held.items()}
        said = f"the agent of {agent.node} was silent for {silent_s:.1f} s"
        out.add(f"{said}, by which its devices may be released later")


def overdue(state: ControlState, now: float, out: Decisions) -> None:
    """Count the devices as unusable whose former workers have not released them within ``Timeouts.device_s`` seconds.

    A device of a silent agent is not counted, because only the agent can report that the device is free.
    """
    limit_s, contact_s = state.options.timeouts.device_s, state.options.timeouts.contact_s
    for agent in state.agents.values():
        if is_silent(agent, now, contact_s):
            continue
        for worker, held in agent.held.items():
            if now > held.since + limit_s and not held.overdue and not agent.gone:
                agent.held[worker] = replace(held, overdue=True)
                reason = f"{worker} has not released it within {limit_s:g} s"
                out.add(f"device {held.device} of {agent.node} cannot be used: {reason}")
                out.note(events.DEVICE_UNUSABLE, node=agent.node, device=held.device, reason=reason)


def is_silent(agent: Agent, now: float, contact_s: float) -> bool:
    """Return whether nothing was heard of the agent for ``contact_s`` seconds."""
    return now > agent.heard_at + contact_s


def crowded(state: ControlState) -> str:
    """Return why the nodes cannot serve the workers that a fresh start has assigned to them, or ""."""
    if state.phase != GATHERING or state.nodes_seen() < state.options.nodes:
        return ""
    found = []
    for agent in state.agents.values():
        if not agent.gone and agent.places > room(agent):
            why = "; ".join(f"device {index}: {problem}" for index, problem in sorted(agent.unusable.items()))
            found.append(f"{agent.node} has devices for {room(agent)} of its {agent.places} workers ({why})")
    return ", ".join(found)
