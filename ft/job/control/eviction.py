"""What the control plane does about stragglers: it names them, and replaces them if the run asks for that.

A straggler is a worker whose own work takes persistently longer than that of workers with the same work
(:mod:`ft.job.control.stragglers`). It has failed in nothing, so it is replaced only where that is certain to help: one
at a time, by a standby that is ready and uses another device, and then not again for many steps.
"""

from ft.base import events
from ft.faults import verdict
from ft.job import messages as m
from ft.job.control import devices
from ft.job.control.decision import Decisions
from ft.job.control.failures import Fault, react
from ft.job.control.state import RUNNING, State, Straggler, Vacancy, Worker

PAUSE_STEPS = 200
"""After a straggler was replaced, none is replaced for so many steps: a cause that stays does not use up standbys."""


def present(state: State) -> dict[int, Straggler]:
    """Return logical rank -> its worker, for the stragglers that still have their seats."""
    return {rank: slow for rank, slow in state.stragglers.items() if state.seats.get(rank) == slow.worker}


def pace_judged(state: State, now: float, report: m.PaceJudged, out: Decisions) -> None:
    """Name a straggler, or take its name back; replace it if the run asks for that."""
    worker = state.workers.get(report.worker)
    if worker is None or worker.rank != report.rank or report.epoch != state.epoch or state.phase != RUNNING:
        out.add(f"ignored: the pace of {report.worker} in epoch {report.epoch}, which is over or is not running")
        return
    who, known = f"{worker.name} (logical rank {worker.rank})", present(state).get(report.rank)
    if not report.is_late:
        state.stragglers.pop(report.rank, None)
        out.add(f"{who} is as fast as the others again")
        if known is not None:
            out.note(events.STRAGGLER_GONE, **_place(state, worker, report), ratio=report.ratio)
        return
    state.stragglers[report.rank] = Straggler(worker.name, report.step, report.ratio, report.cause)
    out.add(f"{who} is slow: its own work takes {report.ratio:.3f} times as long as that of the others")
    if known is None:
        detail = {"own_s": report.own_s, "usual_s": report.usual_s, "cause": report.cause, "steps": report.steps}
        out.note(events.STRAGGLER_FOUND, **_place(state, worker, report), ratio=report.ratio, **detail)
    _evict(state, now, worker, report, out)


def wants_news(state: State, rank: int, ratio: float, step: int) -> bool:
    """Return whether a straggler that is known already would be replaced now; then its pace is to be reported again.

    Args:
        state: state of the control plane.
        rank: logical rank of the straggler.
        ratio: time of its own work divided by the others'.
        step: the last step that was compared.
    """
    worker = state.workers.get(state.seats.get(rank, ""))
    return worker is not None and not _why_not(state, worker, ratio, step)


def _evict(state: State, now: float, worker: Worker, report: m.PaceJudged, out: Decisions) -> None:
    why_not = _why_not(state, worker, report.ratio, report.step)
    if why_not:
        out.add(f"{worker.name} keeps its seat: {why_not}")
        return
    state.evicted_at = report.step
    has_device = state.agents[worker.node].devices > 0
    found = verdict.of_straggler(report.ratio, state.evict_factor, report.cause, has_device)
    react(state, now, [Fault(worker, found)], out)


def _why_not(state: State, worker: Worker, ratio: float, step: int) -> str:
    """Return why the straggler is not replaced, or "" if it is."""
    if state.evict_factor is None or not state.options.hot_swap:
        return "stragglers are not replaced in this run (--ft-evict-stragglers)"
    if ratio < state.evict_factor:
        return f"it is slower by a factor of {ratio:.3f}, and stragglers are replaced from {state.evict_factor:g} on"
    if state.phase != RUNNING or state.recovery is not None:
        return "a recovery is under way"
    if state.evicted_at is not None and step - state.evicted_at < PAUSE_STEPS:
        return f"the last straggler was replaced after step {state.evicted_at}, less than {PAUSE_STEPS} steps ago"
    if not any(_can_replace(state, standby, worker) for standby in state.standbys()):
        return "no standby with another device is ready"
    return ""


def _can_replace(state: State, standby: Worker, worker: Worker) -> bool:
    """Return whether the standby's node has a free device that is not the straggler's own."""
    agent = state.agents[standby.node]
    if agent.gone or agent.suspect:
        return False
    taken = {(seated.node, seated.local_rank) for seated in state.seated()}
    return devices.choose(agent, Vacancy(worker.name, worker.node, worker.local_rank), taken) is not None


def _place(state: State, worker: Worker, report: m.PaceJudged) -> dict[str, str | int]:
    return {
        "epoch": state.epoch,
        "node": worker.node,
        "worker": worker.name,
        "rank": report.rank,
        "step": report.step,
    }
