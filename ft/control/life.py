"""Who comes and who leaves in good order."""

from ft import events
from ft import messages as m
from ft.control.decision import Decision
from ft.control.state import ENDED, GATHERING, RUNNING, Agent, State, Worker


def agent_joined(state: State, now: float, report: m.AgentJoined, decision: Decision) -> None:
    if report.node in state.agents:
        return
    state.agents[report.node] = Agent(report.node, report.node_rank, report.host, report.seats, report.standbys, now)
    ranks = 0
    for agent in sorted(state.agents.values(), key=lambda a: a.node_rank):
        state.fresh_ranks[agent.node] = list(range(ranks, ranks + agent.seats))
        ranks += agent.seats
    if len(state.agents) == state.options.nodes and ranks != state.options.world_size:
        counts = ", ".join(f"{a.node}: {a.seats}" for a in state.agents.values())
        stop(
            state,
            2,
            f"{state.options.world_size} workers were announced, the nodes have {ranks} ({counts})\n"
            "  fix: give every ft run the same --nproc-per-node",
            decision,
        )
    if len(state.agents) == 1:
        decision.event(events.RUN_STARTED, command=state.options.command, world_size=state.options.world_size)
        state.deadline = now + state.options.timeouts.join_s


def worker_started(state: State, now: float, report: m.WorkerStarted, decision: Decision) -> None:
    if report.worker in state.workers:
        return
    if report.rank is None:
        state.spawning = max(0, state.spawning - 1)
    state.workers[report.worker] = Worker(report.worker, report.node, report.pid, report.rank)
    decision.event(events.WORKER_STARTED, node=report.node, worker=report.worker, rank=report.rank, pid=report.pid)


def worker_ready(state: State, now: float, report: m.WorkerReady, decision: Decision) -> None:
    worker = state.workers.get(report.worker)
    if worker is None:  # its start is under way still: reports of one agent come in order, so this is a stranger
        return
    worker.address, worker.ready, state.protected = report.address, True, True
    if worker.rank is None:
        decision.event(events.STANDBY_READY, node=worker.node, worker=worker.name)


def worker_done(state: State, now: float, report: m.WorkerDone, decision: Decision) -> None:
    worker = state.workers.get(report.worker)
    if worker is None or report.epoch != state.epoch or state.phase != RUNNING:
        return
    worker.done = True
    state.step = max(state.step, report.step)
    if all(state.workers[name].done for name in state.seats.values()):
        end(state, m.Finish(), decision.because("all workers are done"))
        decision.event(events.FINISHED, step=report.step)


def agent_leaving(state: State, now: float, report: m.AgentLeaving, decision: Decision) -> None:
    """Its workers have ended, or will: what follows from that is no fault."""
    state.leaving = state.leaving or report.signum
    agent = state.agents.get(report.node)
    if agent is None or not report.signum:
        return
    decision.because(f"the agent of {report.node} was told to end by signal {report.signum}")
    stop(state, 128 + report.signum, "", decision)


def stop(state: State, code: int, message: str, decision: Decision) -> None:
    """Ends the run."""
    end(state, m.Stop(code, message), decision)
    decision.event(events.STOPPED, code=code, message=message)


def end(state: State, order: m.Finish | m.Stop, decision: Decision) -> None:
    decision.order(order)
    state.phase, state.deadline = ENDED, None


def plain_exit(state: State, worker: Worker, decision: Decision) -> None:
    """A worker of a script that never attached has ended: torchrun's rules."""
    if worker.exit_code:
        how = f"killed by signal {-worker.exit_code}" if worker.exit_code < 0 else f"exit code {worker.exit_code}"
        decision.because(f"worker {worker.name} of a script without fault tolerance ended: {how}")
        stop(
            state,
            worker.exit_code if worker.exit_code > 0 else 128 - worker.exit_code,
            f"{worker.name} (logical rank {worker.rank}): {how}; the job ends",
            decision,
        )
        return
    of_run = [w for w in state.workers.values() if w.rank is not None]
    if state.phase == GATHERING and len(of_run) == state.options.world_size and all(w.exit_code == 0 for w in of_run):
        end(state, m.Finish(), decision.because("all workers have exited with 0"))
        decision.event(events.FINISHED, step=state.step)
