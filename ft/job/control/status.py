"""``status.json``: what the control plane knows, for people who look at a run while it goes."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ft.job.control.state import State, Worker


def values(state: State) -> dict[str, Any]:
    """The status as JSON values.

    ``seats``: logical rank -> who holds it, with its last beat; ``standbys``: who is ready to; ``lag``: steps between
    the committed step and the newest snapshot that all peers hold, of the worker that is furthest behind, None where
    there are no snapshots; ``protected``: a worker has ever trained under a guard.
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
        "restarts": state.restarts,
        "seats": {str(worker.rank): _member(state, worker) for worker in seated},
        "vacant": sorted(state.vacant),
        "standbys": [_member(state, worker) for worker in state.standbys()],
        "nodes": {
            agent.node: agent.gone or (f"suspect: {agent.suspect}" if agent.suspect else "up")
            for agent in sorted(state.agents.values(), key=lambda a: a.node_rank)
        },
        "last_recovery": dict(state.last_recovery) or None,
    }


def replace_file(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON such that readers find the old or the new file, never half of one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def _member(state: State, worker: Worker) -> dict[str, Any]:
    beat = state.beat(worker)
    found = {"worker": worker.name, "node": worker.node, "pid": worker.pid}
    return {**found, "beat": asdict(beat)} if beat is not None else found
