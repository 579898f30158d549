"""Build the situation of each damaged replica of a scenario, as its control plane would see it.

A situation is what ``ft.job.control.recovery.decide`` gets: it chooses the rung of the recovery ladder from it.
"""

from ft.job.control.recovery import HostMemory, Others, Restarts, Seats, Situation, Stages
from ft.job.control.state import GridPosition
from ft.job.messages import Holdings
from ft.lab.plan.policy.scenario import HOT_SWAP, Scenario
from ft.state.placement.assign import ring_of


def situations(scenario: Scenario) -> dict[int, Situation]:
    """Return the situation of each replica that has lost workers or states; that of replica 0 if none has.

    Logical ranks are numbered as in Megatron: tensor parallel first, then data parallel, then the pipeline stages. A
    rank's peer copies lie with the next ranks of its data-parallel group, as hot-swap places them on nodes that are all
    alike.
    """
    damaged = sorted({*scenario.lost, *(replica for replica, _, _ in scenario.unverified)}) or [0]
    return {replica: _situation(scenario, replica) for replica in damaged}


def _situation(scenario: Scenario, replica: int) -> Situation:
    lost = scenario.lost.get(replica, frozenset())
    room = len(lost) if scenario.room is None else scenario.room
    return Situation(
        scenario.step,
        _memory(scenario, replica),
        Stages(scenario.checkfree, {rank: _place(scenario, rank) for rank in range(scenario.world)}),
        Seats(sorted(lost), scenario.standbys, room),
        Others(scenario.replicas, scenario.spare_redundancy > 0),
        Restarts(
            scenario.restarts_left,
            workers=scenario.world,
            has_room=len(lost) <= scenario.standbys + room,
            checkpoints=[] if scenario.checkpoint is None else [scenario.checkpoint],
        ),
        hot_swap=HOT_SWAP in scenario.protect,
    )


def _steps(scenario: Scenario) -> list[int]:
    """Return the steps whose snapshots are in memory, the newest first."""
    return [step for step in (scenario.step, scenario.step - 1) if step >= 0]


def _memory(scenario: Scenario, replica: int) -> HostMemory:
    """Return what the live workers of a replica hold.

    Workers are taken to be lost before the update of a step, so the models still have the weights of the step before.
    """
    ranks, lost = range(scenario.world), scenario.lost.get(replica, frozenset())
    peers = {rank: _peers(scenario, rank) for rank in ranks}
    usable = {
        rank: [step for step in _steps(scenario) if (replica, rank, step) not in scenario.unverified] for rank in ranks
    }
    copies: dict[int, dict[int, list[int]]] = {rank: {} for rank in ranks}
    for rank in ranks:
        for holder in ring_of(rank, peers[rank], scenario.peers, scenario.world) if scenario.peers else ():
            copies[holder][rank] = usable[rank]
    held = {r: Holdings(usable[r], copies[r], max(usable[r], default=None)) for r in ranks if r not in lost}
    return HostMemory(ranks, held, peers)


def _peers(scenario: Scenario, rank: int) -> list[int]:
    """Return the ranks that hold the same part of the model."""
    tp, stage = rank % scenario.tp, rank // (scenario.tp * scenario.dp)
    first = stage * scenario.tp * scenario.dp + tp
    return list(range(first, first + scenario.tp * scenario.dp, scenario.tp))


def _place(scenario: Scenario, rank: int) -> GridPosition:
    stage = rank // (scenario.tp * scenario.dp)
    blocks = scenario.blocks[stage] if scenario.blocks else 1
    return GridPosition(stage, rank % scenario.tp, rank // scenario.tp % scenario.dp, 0, blocks, lends=True)
