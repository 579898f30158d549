"""Who takes an empty seat."""

from dataclasses import dataclass, field

from ft.control.state import State


@dataclass
class Filling:
    """How the seats can be filled.

    Attributes:
        seats: logical rank -> worker, None while a seat cannot be filled yet.
        moves: logical rank -> (new worker, local rank). spawn: node -> workers to start there first.
        impossible: why it can never be done, "" if it can.
    """

    seats: dict[int, str] | None = None
    moves: dict[int, tuple[str, int]] = field(default_factory=dict)
    spawn: dict[str, int] = field(default_factory=dict)
    impossible: str = ""


def fill_seats(state: State) -> Filling:
    """Empty seats go to ready standbys, of the same node first; where there are too few, workers are started."""
    empty = {rank: name for rank, name in state.seats.items() if not state.workers[name].lives}
    ready = [w for w in state.standbys() if not _suspect(state, w.node)]
    moves = {}
    for rank, lost in sorted(empty.items()):
        node = state.workers[lost].node
        chosen = next((w for w in ready if w.node == node), ready[0] if ready else None)
        if chosen is None:
            continue
        ready.remove(chosen)
        moves[rank] = (chosen.name, _local_rank(state, rank, chosen.node, moves))
    lacking = [rank for rank in sorted(empty) if rank not in moves]
    if lacking:
        return _wait_for_more(state, lacking)
    seats = {rank: moves[rank][0] if rank in moves else name for rank, name in state.seats.items()}
    return Filling(seats, moves)


def _wait_for_more(state: State, lacking: list[int]) -> Filling:
    coming = [
        w for w in state.workers.values() if w.rank is None and w.lives and not w.ready and not _suspect(state, w.node)
    ]
    need = len(lacking) - len(coming) - state.spawning
    if need <= 0:
        return Filling()
    spawn: dict[str, int] = {}
    for rank in lacking[-need:]:
        node = state.workers[state.seats[rank]].node
        if _suspect(state, node) or node not in state.agents:
            node = next((a.node for a in state.agents.values() if not a.suspect), "")
        if not node:
            return Filling(impossible="no node is left that could start a worker for the empty seats")
        spawn[node] = spawn.get(node, 0) + 1
    return Filling(spawn=spawn)


def _local_rank(state: State, rank: int, node: str, moves: dict[int, tuple[str, int]]) -> int:
    lost = state.workers[state.seats[rank]]
    if lost.node == node:
        return lost.local_rank
    taken = {w.local_rank for name in state.seats.values() if (w := state.workers[name]).lives and w.node == node}
    taken |= {local for name, local in moves.values() if state.workers[name].node == node}
    return next(i for i in range(len(taken) + 1) if i not in taken)


def _suspect(state: State, node: str) -> bool:
    agent = state.agents.get(node)
    return agent is None or agent.suspect
