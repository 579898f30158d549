"""End of a run, and warm restart: all workers start anew from the last persistent checkpoint."""

from ft.base import events
from ft.base.errors import ENDED_EARLY, NOT_SAVED, code_of_end
from ft.faults.verdict import USER_CODE, signal_name
from ft.job import messages as m
from ft.job.control import recovery
from ft.job.control.membership import place_ranks
from ft.job.control.state import ENDED, EPOCH_OPEN, GATHERING, Agent, ControlState, Decisions, Worker


def finish_if_done(state: ControlState, now: float, out: Decisions) -> None:
    """End the run successfully if an epoch is open and each logical rank's worker is done or has exited with code 0."""
    seated = state.seated()
    if state.phase in EPOCH_OPEN and len(seated) == state.options.world_size and all(w.done or w.left for w in seated):
        _finish(state, now, "all workers are done", out)


def stop(state: ControlState, now: float, code: int, message: str, out: Decisions, why: str = "") -> None:
    """End the run with exit code ``code``; ``message`` is for the user, ``why`` for the journal if it differs."""
    _end(state, now, m.Stop(code, message), why or message, out)
    out.note(events.STOPPED, code=code, message=message)


def restart(state: ControlState, now: float, reason: str, out: Decisions) -> None:
    """Order a warm restart from the last persistent checkpoint, or end the run if no further restart is possible.

    This is the last resort if the run cannot be recovered from the snapshots in memory (the "external fallback" of the
    paper DEADPOOL). ``reason`` is why nothing in memory is used.
    """
    descend(state, now, recovery.decide(recovery.without_memory(state, reason)), out)


def descend(state: ControlState, now: float, found: recovery.Decision, out: Decisions) -> None:
    """Carry out a decision of the ladder that gives up the state in memory: all workers start anew, or the run ends."""
    ranks = place_ranks(state.agents.values(), state.options.world_size)
    if found.lost.ended or ranks is None:
        stop(state, now, 1, found.reason, out)
        return
    allowed, reason = state.options.max_restarts, found.reason
    state.restarts += 1
    out.add(f"warm restart {state.restarts} of at most {allowed}: {reason}", m.Restart(state.restarts, reason, ranks))
    out.note(events.RESTARTED, number=state.restarts, reason=reason, level=found.level)
    state.last_recovery = {"outcome": "restart", "reason": reason, "at": now, "seconds": 0.0}
    for agent in state.agents.values():
        agent.places = len(ranks.get(agent.node, ()))
        # An agent starts workers only after its earlier ones have ended. Devices that are overdue stay out of use.
        agent.held = {worker: hold for worker, hold in agent.held.items() if hold.overdue}
    state.workers, state.seats, state.vacant, state.spawning = {}, {}, {}, {}
    state.dp_peers, state.shards, state.copies, state.complete, state.suspicions = {}, {}, {}, {}, {}
    state.places, state.rebuilt = {}, {}
    state.recovery, state.repair, state.failed_starts, state.step, state.returns = None, None, 0, 0, []
    state.enter(GATHERING, now)


def agent_left(state: ControlState, now: float, agent: Agent, signum: int, out: Decisions) -> None:
    """Handle an agent that received a termination signal: its workers end on purpose, and the run ends with them."""
    agent.gone = f"ended by {signal_name(signum)}"
    message = f"the agent of {state.named(agent)} was told to end by {signal_name(signum)}"
    seated = state.seated()
    if seated and all(w.done or w.left for w in seated):
        _finish_as(state, now, f"{message}, all workers are done", out)
        return
    stop(state, now, 128 + signum, message, out)


def told_to_end(state: ControlState, now: float, report: m.EndWanted, out: Decisions) -> None:
    """Record that an agent was told to end the run: its workers save and end, as long as they get anywhere."""
    out.add(f"the agent of {report.node} was told to end the run by {signal_name(report.signum)}")
    if state.told_at is None:
        state.told_at, state.told_by = now, (report.node, report.signum)


def give_up(state: ControlState, now: float, quiet_s: float, out: Decisions) -> None:
    """End a run that was told to end and stands still; ``quiet_s``: since when, in seconds."""
    node, signum = state.told_by
    told = f"{signal_name(signum)} has told {node} to end the run, and it stands still"
    message = (
        f"{told}: no worker has gotten anywhere for {quiet_s:.0f} s, so all are killed. Nothing more could be saved. "
        f"The last committed step is {state.newest_step()}; complete checkpoints stay"
    )
    out.add(message, m.Notice(message))
    stop(state, now, 128 + signum, told, out)


def plain_exit(state: ControlState, now: float, worker: Worker, code: int, out: Decisions) -> None:
    """Handle the exit of a worker whose script takes no part in recoveries: the run follows torchrun's rules."""
    if code in (ENDED_EARLY, NOT_SAVED):
        early = "a signal" if code == ENDED_EARLY else ""
        unsaved = "" if early else f"{worker.name} exited with code {code}"
        worker.end = m.WorkerDone(worker.name, state.epoch, 0, early, unsaved=unsaved)
    elif code:
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        message = f"{worker.name} (logical rank {worker.started_for}) {how}"
        stop(state, now, code if code > 0 else 128 - code, message, out, f"{message}, and never attached to the run")
        return
    worker.left = True
    out.add(f"{worker.name} has ended with code {code} and never attached")
    finish_if_all_left(state, now, out)


def finish_if_all_left(state: ControlState, now: float, out: Decisions) -> None:
    """End the run as its workers say if, before the first epoch has opened, those of all logical ranks have exited with
    the code of a planned end.
    """
    of_run = {w.started_for for w in state.workers.values() if w.started_for is not None and w.left}
    if len(of_run) == state.options.world_size:
        _finish(state, now, "all workers have ended as planned", out)


def _finish(state: ControlState, now: float, reason: str, out: Decisions) -> None:
    """End the run successfully.

    A run with planned faults fails instead if it was never protected, because then no fault could be injected.
    """
    if state.options.faults and not state.protected and not state.restarts:
        message = (
            f"no worker has ever joined the run (ft.attach, ft.protect): nothing protected it, and none of the "
            f"{state.options.faults} planned fault(s) could act\n"
            "  fix: drop --inject and --scenario, or have the script join the run, as examples/own_trainer.py does"
        )
        stop(state, now, USER_CODE, message, out, f"{reason}, and none has ever joined the run")
        return
    _finish_as(state, now, reason, out)


def _finish_as(state: ControlState, now: float, reason: str, out: Decisions) -> None:
    """End the run as its workers say that it has ended: finished, ended early by a signal, or not saved."""
    said = [worker.end for worker in state.workers.values() if worker.end is not None]
    early, unsaved = (next(filter(None, (getattr(end, name) for end in said)), "") for name in ("early", "unsaved"))
    detail: dict[str, str | int] = {"unsaved": unsaved} if unsaved else {}
    if early:
        detail |= {"early": early, "steps": max(end.steps for end in said)}
    _end(state, now, m.Finish(code_of_end(early, unsaved)), reason, out)
    out.note(events.FINISHED, step=state.newest_step(), **detail)


def finish_unsaved(state: ControlState, now: float, reason: str, out: Decisions) -> None:
    """End the run, whose last checkpoint a worker cannot save. The others may wait for that worker, so all are killed.

    ``reason`` is why it cannot be saved.
    """
    _end(state, now, m.Stop(NOT_SAVED, reason), reason, out)
    out.note(events.FINISHED, step=state.newest_step(), unsaved=reason)


def _end(state: ControlState, now: float, order: m.Finish | m.Stop, reason: str, out: Decisions) -> None:
    state.step = state.newest_step()
    out.add(reason, order)
    state.enter(ENDED, now)
