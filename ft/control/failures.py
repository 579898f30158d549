"""Signs of failure and what is made of them."""

from ft import events
from ft import messages as m
from ft.control import life, recovery, verdict
from ft.control.decision import Decision
from ft.control.state import ENDED, GATHERING, RUNNING, State, Worker
from ft.control.verdict import REPLACE, RESTART, RETRY, STOP, Verdict

_TRANSIENT_WINDOW_S = 60.0
_TRANSIENT_LIMIT = 3


def worker_exited(state: State, now: float, report: m.WorkerExited, decision: Decision) -> None:
    worker = state.workers.get(report.worker)
    if worker is None or worker.exit_code is not None:
        return
    worker.exit_code = report.code
    seated = worker.name in state.seats.values()
    expected = worker.killed
    if not worker.ready and not state.protected and not expected:
        life.plain_exit(state, worker, decision)
        return
    if not seated and not (state.phase == GATHERING and worker.rank is not None):
        if not expected:
            decision.event(
                events.WORKER_LOST,
                node=worker.node,
                worker=worker.name,
                reason=verdict.of_exit(report.code, worker.ready).reason,
            )
            state.standbys_asked = False
        return
    if not expected:
        react(state, now, worker, verdict.of_exit(report.code, worker.ready), decision)


def worker_silent(state: State, now: float, report: m.WorkerSilent, decision: Decision) -> None:
    worker = state.workers.get(report.worker)
    if worker is None or not worker.lives:
        return
    kill(state, worker, "silent", decision)
    if worker.name in state.seats.values():
        react(state, now, worker, verdict.of_silence(report.silent_s, report.state), decision)


def worker_failed(state: State, now: float, report: m.WorkerFailed, decision: Decision) -> None:
    worker = state.workers.get(report.worker)
    if worker is None or not worker.lives or report.epoch != state.epoch:
        return
    found = verdict.of_error(report.kinds, report.message)
    key = f"{report.kinds[:1]}{report.message[:200]}@{report.step}"
    if found.action == RESTART and found.category == verdict.SOFTWARE:
        state.software[key] = state.software.get(key, 0) + 1
        if state.software[key] > 1:
            found = Verdict(
                found.category, STOP, f"{found.reason}; the same error at the same step again", found.signal
            )
    if found.action == REPLACE:
        kill(state, worker, found.reason, decision)
    react(state, now, worker, found, decision)


def worker_suspects(state: State, now: float, report: m.WorkerSuspects, decision: Decision) -> None:
    """The death behind a lost connection is usually on its way: if none is seen, the connection itself is blamed."""
    worker = state.workers.get(report.worker)
    if worker is None or report.epoch != state.epoch or state.phase != RUNNING:
        return
    if state.suspicion is None:
        state.suspicion = (now, report.worker, report.group, report.message)


def judge_time(state: State, now: float, decision: Decision) -> None:
    """What follows from time having passed."""
    limits = state.limits()
    for agent in list(state.agents.values()):
        if now - agent.last_beat > limits.agent_lost_s and not agent.suspect:
            _lose_agent(state, now, agent.node, now - agent.last_beat, decision)
            if state.phase == ENDED:
                return
    if state.phase != RUNNING:
        return
    if state.suspicion is not None:
        since, name, group, message = state.suspicion
        if now - since > limits.suspicion_s:
            state.suspicion = None
            react(state, now, state.workers[name], verdict.of_suspicion(group, message), decision)
            return
    _judge_stalls(state, now, decision)


def react(state: State, now: float, worker: Worker, found: Verdict, decision: Decision) -> None:
    """Does what the verdict on a worker says."""
    rank = state.rank_of(worker.name)
    if found.action == RETRY and rank is not None:
        recent = [t for t in state.transient.get(rank, []) if now - t < _TRANSIENT_WINDOW_S]
        state.transient[rank] = [*recent, now]
        if len(recent) + 1 >= _TRANSIENT_LIMIT:
            found = verdict.elevated(found, len(recent) + 1)
            kill(state, worker, found.reason, decision)
    if found.node_suspect and worker.node in state.agents and len(state.agents) > 1:
        state.agents[worker.node].suspect = True
    decision.because(
        f"{worker.name} (logical rank {rank if rank is not None else worker.rank}): "
        f"{found.category}: {found.reason} -> {found.action}"
    )
    decision.event(
        events.FAULT_DETECTED,
        epoch=state.epoch,
        worker=worker.name,
        node=worker.node,
        rank=rank if rank is not None else worker.rank,
        step=state.step,
        category=found.category,
        action=found.action,
        reason=found.reason,
        signal=found.signal,
    )
    if found.action == STOP:
        life.stop(state, 2 if found.category == verdict.USER else 1, f"{worker.name}: {found.reason}", decision)
    elif found.action == RESTART:
        recovery.restart(state, now, found.reason, decision)
    elif state.phase == GATHERING:
        recovery.restart(state, now, f"{found.reason}, before training began", decision)
    else:
        recovery.close(state, now, found.reason, decision)


def kill(state: State, worker: Worker, reason: str, decision: Decision) -> None:
    if worker.lives:
        worker.killed = True
        decision.order(m.Kill(worker.name, reason))


def _lose_agent(state: State, now: float, node: str, seconds: float, decision: Decision) -> None:
    agent = state.agents[node]
    agent.suspect = True
    lost = [w for w in state.workers.values() if w.node == node and w.exit_code is None]
    for worker in lost:
        worker.exit_code = -9
        worker.killed = True
        decision.order(m.Kill(worker.name, "its node is lost"))
    seated = [w for w in lost if w.name in state.seats.values()]
    if seated:
        react(state, now, seated[0], verdict.of_lost_agent(node, seconds), decision)
    elif state.phase == GATHERING and agent.seats:
        life.stop(state, 1, f"node {node} was lost before training began", decision)


def _judge_stalls(state: State, now: float, decision: Decision) -> None:
    """A worker that computes for long while others wait is hung; if all wait for long, connections are at fault."""
    limits = state.limits()
    seen = {
        name: got[1] for name in state.seats.values() if (got := state.beats.get(name)) and got[1].epoch == state.epoch
    }
    if len(seen) < len(state.seats):
        return
    waiting = [name for name, beat in seen.items() if beat.doing == "wait"]
    for name, beat in seen.items():
        if beat.doing == "compute" and waiting and beat.since_s > limits.stall_s:
            worker = state.workers[name]
            kill(state, worker, "stalled", decision)
            react(state, now, worker, verdict.of_stall(beat.where, beat.since_s, limits.stall_s), decision)
            return
    if waiting and len(waiting) == len(seen) and min(beat.since_s for beat in seen.values()) > limits.collective_s:
        name = waiting[0]
        react(
            state,
            now,
            state.workers[name],
            verdict.of_suspicion(seen[name].where, "every worker waits and none computes"),
            decision,
        )
