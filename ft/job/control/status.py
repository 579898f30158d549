"""The file ``status.json``: a summary of the control plane's state for people who watch a run."""

import time
from dataclasses import asdict
from typing import Any

from ft.job.control import eviction
from ft.job.control.state import State, Worker


def values(state: State) -> dict[str, Any]:
    """Return the status as JSON values.

    Keys that need an explanation: ``seats``: logical rank -> the worker that holds it, with its last heartbeat.
    ``standbys``: the ready workers without a logical rank. ``lag``: number of steps between the newest snapshot that
    all peers hold and the committed step, of the worker for which it is largest; None without snapshots. ``protected``:
    whether any worker has ever trained under hot-swap protection. ``limits``: the timeouts that are not the defaults.
    ``look``: [number of the last look at all workers, why it was taken], the latter "" if somebody has asked for it.
    ``stragglers``: logical rank -> its worker, for those that are persistently slower than others with the same work.
    """
    seated = state.seated()
    lags = [beat.lag for worker in seated if (beat := state.beat(worker))]
    return {
        "updated": time.time(),
        "phase": state.phase,
        "epoch": state.epoch,
        "step": state.newest_step(),
        "lag": max(lags, default=0) if state.protected and state.options.hot_swap else None,
        "protected": state.protected,
        "hot_swap": state.options.hot_swap,
        "limits": state.options.timeouts.changed(),
        "restarts": state.restarts,
        "seats": {str(worker.rank): _member(state, worker) for worker in seated},
        "vacant": sorted(state.vacant),
        "standbys": [_member(state, worker) for worker in state.standbys()],
        "nodes": {
            agent.node: agent.gone or (f"suspect: {agent.suspect}" if agent.suspect else "up")
            for agent in sorted(state.agents.values(), key=lambda a: a.node_rank)
        },
        "look": [state.looks, state.look_why],
        "last_recovery": dict(state.last_recovery) or None,
        "stragglers": {str(rank): asdict(slow) for rank, slow in sorted(eviction.present(state).items())},
    }


def _member(state: State, worker: Worker) -> dict[str, Any]:
    beat = state.beat(worker)
    found = {"worker": worker.name, "node": worker.node, "pid": worker.pid}
    return {**found, "beat": asdict(beat)} if beat is not None else found
