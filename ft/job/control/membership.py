"""Assignment of workers to logical ranks: standbys for empty seats, new workers for nodes, ranks for a warm restart."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ft.job.control import devices
from ft.job.control.state import Agent, ControlState, Vacancy, Worker


@dataclass
class Filling:
    """How the empty seats can be filled.

    Attributes:
        moves: logical rank -> (name of the standby that takes it, its local rank), as far as standbys are ready.
        lacking: logical ranks for which no standby is ready.
        spawn: node -> number of workers to start there for these ranks.
        reasons: the reason for each assignment and each start, for people.
        impossible: why the seats can never be filled, or "".
    """

    moves: dict[int, tuple[str, int]] = field(default_factory=dict)
    lacking: list[int] = field(default_factory=list)
    spawn: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    impossible: str = ""


def fill(state: ControlState) -> Filling:
    """Assign the empty seats to ready standbys.

    Only standbys come into question whose node has a free device. The order of preference is: standbys on nodes that
    are not suspected; among these, standbys on the lost worker's node; then standbys on the node with the fewest seated
    workers. Workers are spread over nodes because the failure of a node with many workers loses many copies of states
    at once.
    """
    filling, ready = Filling(), list(state.standbys())
    taken, kept = {(w.node, w.local_rank) for w in state.seated()}, devices.kept(state)
    for rank, vacancy in sorted(state.vacant.items()):
        free = {}
        for w in ready:
            own = w.local_rank if w.keeps_device else None
            device = devices.choose(state.agents[w.node], vacancy, taken, kept, own)
            if device is not None:
                free[w.name] = device
        able = [w for w in ready if w.name in free]
        if not able:
            filling.lacking.append(rank)
            continue
        crowd = Counter(node for node, _ in taken)
        chosen = min(able, key=lambda w: (*_distance(state, w, vacancy), crowd[w.node]))
        ready.remove(chosen)
        local_rank = free[chosen.name]
        taken.add((chosen.node, local_rank))
        filling.moves[rank] = (chosen.name, local_rank)
        filling.reasons.append(f"{chosen.name} takes logical rank {rank} ({_why(state, chosen, vacancy)})")
    if filling.lacking:
        _spawn_for(state, filling, ready, Counter(node for node, _ in taken))
    return filling


def replenish(state: ControlState) -> dict[str, int]:
    """Return node -> number of standbys to start there, in place of those that were used or have died.

    Nodes that are lost or suspected to be faulty get none.
    """
    wanted = {}
    for agent in usable(state.agents.values()):
        here = [w for w in state.workers.values() if w.node == agent.node and w.rank is None and not w.left]
        lacking = agent.joined.standbys - len(here) - len(state.spawning.get(agent.node, ()))
        if lacking > 0:
            wanted[agent.node] = lacking
    return wanted


def usable(agents: Iterable[Agent]) -> list[Agent]:
    """Return the agents on whose nodes workers can be started, ordered by node rank."""
    return sorted((a for a in agents if not a.gone and not a.suspect), key=lambda a: a.joined.node_rank)


def place_ranks(agents: Collection[Agent], world_size: int) -> dict[str, list[int]] | None:
    """Return node -> logical ranks for a fresh start, or None if there is too little room.

    Each node gets as many ranks as it has seats, and no more than it has usable devices; standby nodes replace lost
    nodes. If that is not enough, suspected nodes are used, then the room that was meant for standbys.
    """

    def order(agent: Agent) -> tuple[bool, bool, int]:
        return bool(agent.suspect), agent.joined.seats == 0, agent.joined.node_rank

    here = sorted((a for a in agents if not a.gone), key=order)
    room = {a.node: min(a.joined.seats or a.joined.standbys, devices.room(a)) for a in here}
    if sum(room.values()) < world_size:
        room = {a.node: min(a.joined.seats + a.joined.standbys, devices.room(a)) for a in here}
    taken, left = {}, world_size
    for agent in here:
        taken[agent.node] = min(room[agent.node], left)
        left -= taken[agent.node]
    if left:
        return None
    ranks, following = {}, 0
    for agent in sorted(here, key=lambda a: a.joined.node_rank):
        if count := taken[agent.node]:
            ranks[agent.node] = list(range(following, following + count))
            following += count
    return ranks


def _distance(state: ControlState, worker: Worker, vacancy: Vacancy) -> tuple[bool, bool]:
    agent = state.agents[worker.node]
    return bool(agent.suspect), worker.node != vacancy.node


def _why(state: ControlState, worker: Worker, vacancy: Vacancy) -> str:
    suspect = state.agents[worker.node].suspect
    if suspect:
        return f"its node is suspect, but no other has a standby: {suspect}"
    if worker.node == vacancy.node:
        return "same node"
    why = state.agents[vacancy.node].suspect
    return f"another node, because {why}" if why else "another node, no standby is ready on that of the lost worker"


def _spawn_for(state: ControlState, filling: Filling, ready: list[Worker], used: Counter[str]) -> None:
    """Order the workers that are missing for the empty seats, in addition to those that are there or are starting.

    Nodes without a suspicion are preferred. A worker counts only if its node has a device for it, or is about to have.
    ``ready``: standbys whose nodes have no free device; ``used``: node -> number of its devices that are in use.
    """
    coming = Counter(w.node for w in ready)
    coming.update(
        w.node
        for w in state.workers.values()
        if w.rank is None and w.started_for is None and not w.ready and not w.left
    )
    coming.update({node: len(times) for node, times in state.spawning.items()})
    here = {a.node: a for a in state.agents.values() if not a.gone}
    room = {node: devices.room(agent, used[node]) for node, agent in here.items()}
    able = {node: min(coming[node], room[node]) for node in here}
    need = len(filling.lacking) - sum(able.values())
    if need <= 0:
        filling.reasons.append(f"{sum(coming.values())} worker(s) for the empty seats are starting or await a device")
        return
    sound = [a.node for a in usable(state.agents.values())]
    for rank in filling.lacking[-need:]:
        free = {node for node in here if able[node] + filling.spawn.get(node, 0) < room[node]}
        node = state.vacant[rank].node
        if node not in sound or node not in free:
            others = [n for n in sound if n in free] or [n for n in here if n in free]
            if not others:
                what = "has a device for" if here else "is left that could start"
                filling.impossible = f"no node {what} a worker for the empty seats"
                return
            node = min(others, key=lambda name: filling.spawn.get(name, 0))
        filling.spawn[node] = filling.spawn.get(node, 0) + 1
        filling.reasons.append(f"no standby is ready for logical rank {rank}: one is started on {node}")
