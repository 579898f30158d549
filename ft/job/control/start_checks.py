"""Checks at the start of a run that its nodes fit together; a run whose nodes do not is refused before its first step.

Each agent says when it joins how its node is set up: versions, paths of the command line, addresses. Once all have
joined, each agent connects to the next one. Without these checks a run would wait for minutes for a connection that
cannot come, or fail later on one node with an error that does not name the cause.
"""

from collections.abc import Sequence

from ft.base import events
from ft.faults.verdict import USER_CODE
from ft.job import messages as m
from ft.job.control import run_ends as ends
from ft.job.control.state import GATHERING, Agent, ControlState, Decisions

NOTICE_S = 20.0
"""Seconds after the first agent's arrival at which the user is told which agents are missing."""
THERE, MISSING = "there", "missing"
OUTPUT = "folder of "
"""Begins the name of a path that the run itself creates: the folder in which it will be."""
_UNSET = "not set"


def agent_joined(state: ControlState, now: float, agent: Agent, is_complete: bool, out: Decisions) -> None:
    """Compare an agent that has joined with those before it. Once all have joined (``is_complete``), have all agents
    connect to each other.
    """
    if not _is_starting(state) or state.checked:
        return
    state.checked = is_complete
    others = [other for other in state.agents.values() if other is not agent and not other.gone]
    problems = [problem for other in others[:1] for problem in settings_differ(agent.joined, other.joined)]
    problems += [problem for other in others for problem in paths_differ(other.joined, agent.joined)]
    if problems:
        _refuse(state, now, list(dict.fromkeys(problems)), out)
        return
    here = sorted((a for a in state.agents.values() if not a.gone), key=lambda a: (a.joined.node_rank, a.node))
    if is_complete and len(here) > 1 and all(a.joined.rendezvous_address for a in here):
        peers = {a.node: here[(i + 1) % len(here)].node for i, a in enumerate(here)}
        addresses = {a.node: a.joined.rendezvous_address for a in here}
        out.add("all agents are there: each connects to the next one", m.Reach(peers, addresses))


def settings_differ(agent: m.AgentJoined, other: m.AgentJoined) -> list[str]:
    """Return a sentence for each setting that differs between two nodes, with what to do."""
    found = []
    for name in sorted({*agent.about, *other.about} if agent.about and other.about else ()):
        mine, theirs = agent.about.get(name, _UNSET), other.about.get(name, _UNSET)
        if mine != theirs:
            fix = "give every ft run the same flags" if name.startswith("--") else "install the same on every node"
            found.append(f"{name} is {mine} on {_named(agent)} and {theirs} on {_named(other)}\n  fix: {fix}")
    return found


def paths_differ(earlier: m.AgentJoined, later: m.AgentJoined) -> list[str]:
    """Return a sentence for each path of the command line that only one of two nodes has, with what to do.

    A folder that the run itself creates may come to be between the two checks; so it only counts if the agent that
    joined later does not see it.
    """
    found = []
    for name, state in sorted(earlier.paths.items()):
        has, lacks = (earlier, later) if state == THERE else (later, earlier)
        if name not in later.paths or later.paths[name] == state or (name.startswith(OUTPUT) and has is later):
            continue
        found.append(
            f"{name} is on {_named(has)}, and not on {_named(lacks)}\n"
            f"  fix: mount on {lacks.node} what {has.node} has there, or give a path that all nodes share"
        )
    return found


def peer_unreached(state: ControlState, now: float, report: m.PeerUnreached, out: Decisions) -> None:
    """End a run before its first step if one of its nodes cannot connect to another one."""
    agent, peer = state.agents.get(report.node), state.agents.get(report.peer)
    if agent is None or peer is None or peer.gone or agent.gone or not _is_starting(state):
        out.add(f"ignored: {report.node} has not reached {report.peer} at {report.address}: {report.problem}")
        return
    _refuse(state, now, [unreached(agent.joined, peer.joined, report.address, report.problem)], out)


def unreached(agent: m.AgentJoined, peer: m.AgentJoined, address: str, problem: str) -> str:
    """Return the sentence about an agent that cannot connect to another one, with what to do."""
    host = address.rpartition(":")[0]
    interface = next((name for name, own in peer.interfaces.items() if own == host), "")
    where = f"{address}, the address of its interface {interface}" if interface else address
    usable = {name: own for name, own in peer.interfaces.items() if own != host and not own.startswith("127.")}
    others = ", ".join(f"{own} ({name})" for name, own in usable.items())
    choice = f"one of {others}" if others else "an address that the other nodes reach"
    return (
        f"{_named(agent)} cannot connect to {_named(peer)} at {where}: {problem}\n"
        f"  fix: start ft run on {peer.node} with --local-addr ADDRESS, {choice};\n"
        f"       or have the firewall between the two nodes let all ports through"
    )


def node_refused(state: ControlState, now: float, report: m.NodeRefused, out: Decisions) -> None:
    """End a run before its first step if a node has found that it can never take part."""
    if state.checked or not _is_starting(state):
        out.add(f"ignored: {report.node} could not take part: {report.reason}")
        return
    _refuse(state, now, [f"{report.node}: {report.reason}"], out)


def notice(state: ControlState, now: float, out: Decisions) -> None:
    """Tell the user once which agents are missing, long before the run gives them up: they may still be starting."""
    if state.noticed or not state.agents or state.phase != GATHERING or now <= state.since + NOTICE_S:
        return
    if state.nodes_seen() >= state.options.nodes:
        return
    state.noticed = True
    missing = sorted(set(range(state.options.nodes)) - {agent.joined.node_rank for agent in state.agents.values()})
    message = missing_agents(missing, state.options.nodes, state.options.timeouts.join_s - NOTICE_S)
    message += _twice(list(state.agents.values()))
    out.add(message, m.Notice(message)).note(events.AGENTS_MISSING, missing=missing, message=message)


def missing_agents(missing: Sequence[int], nodes: int, left_s: float) -> str:
    """Return the message about agents that have not come, with what to do."""
    names = ", ".join(map(str, missing)) or "of some nodes"
    return (
        f"no agent has come from node(s) {names} of {nodes}; the run waits {left_s:.0f} s more\n"
        "  fix: start ft run there with the same --run-dir and --rdzv-endpoint and its own --node-rank; if it runs, it "
        "ends with the reason as soon as it knows one"
    )


def _twice(agents: Sequence[Agent]) -> str:
    """Return a line about two agents with the same node number, "" if there are none."""
    of_rank: dict[int, list[Agent]] = {}
    for agent in agents:
        if not agent.gone:
            of_rank.setdefault(agent.joined.node_rank, []).append(agent)
    twice = [same for same in of_rank.values() if len(same) > 1]
    lines = [
        f"\n  {' and '.join(_named(each.joined) for each in same)} both have --node-rank {same[0].joined.node_rank}"
        for same in twice
    ]
    return "".join(lines)


def _is_starting(state: ControlState) -> bool:
    return not state.protected and not state.restarts


def _refuse(state: ControlState, now: float, problems: list[str], out: Decisions) -> None:
    ends.stop(state, now, USER_CODE, "the nodes do not fit together:\n" + "\n".join(problems), out)
    out.note(events.START_REFUSED, problems=problems)


def _named(agent: m.AgentJoined) -> str:
    return f"{agent.node} ({agent.machine})" if agent.machine else agent.node
