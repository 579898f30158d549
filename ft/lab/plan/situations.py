"""A job after a fault: the question of ``ft plan policy``, and the situation of each damaged replica.

A situation is what ``ft.job.control.recovery.decide`` gets: it chooses the level of the recovery ladder from it.
"""

import argparse
import re
from dataclasses import dataclass, field
from typing import Any

from ft.base.quantities import whole
from ft.base.scenario import Key, Keys
from ft.job.control.recovery import MIDDLE, PLUS, HostMemory, Others, Restarts, Seats, Situation, Stages
from ft.job.control.state import GridPosition
from ft.job.parts import Holdings

HOT_SWAP, CHECKFREE, CHECKFREE_PLUS = "hot-swap", "checkfree", "checkfree-plus"
PROTECTIONS = (HOT_SWAP, CHECKFREE, CHECKFREE_PLUS)
NONE = "none"
_MOST_RANKS, _MOST_REPLICAS = 4096, 1024

Lost = dict[int, frozenset[int]]
"""Number of a replica -> logical ranks."""


@dataclass(frozen=True)
class JobAfterFault:
    """A job after a fault; :data:`KEYS` says what each attribute is.

    Every worker holds snapshots and peer copies of ``step``, the newest committed step, and of the one before. A lost
    worker takes all that it held in memory with it.
    """

    tp: int = 1
    dp: int = 2
    pp: int = 4
    blocks: tuple[int, ...] = ()
    peers: int = 1
    replicas: int = 1
    spare_redundancy: int = 0
    protect: tuple[str, ...] = (HOT_SWAP,)
    step: int = 100
    checkpoint: int | None = None
    restarts_left: int = 3
    lost: Lost = field(default_factory=dict)
    unverified: frozenset[tuple[int, int, int]] = frozenset()
    standbys: int = 0
    room: int | None = None

    @property
    def world(self) -> int:
        """Return the number of logical ranks of a replica."""
        return self.tp * self.dp * self.pp

    @property
    def checkfree(self) -> str:
        """Return the stages that CheckFree may rebuild: MIDDLE, PLUS or "" for none."""
        return PLUS if CHECKFREE_PLUS in self.protect else MIDDLE if CHECKFREE in self.protect else ""


def _lost(given: Any) -> Lost:
    found: dict[int, set[int]] = {}
    for text in _texts(given):
        match = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*)", text.replace(" ", ""))
        if match is None:
            raise ValueError(f"{text!r} names no logical ranks")
        for part in match[2].split(","):
            first, _, last = part.partition("-")
            if last and int(last) < int(first):
                raise ValueError(f"{part} goes backwards")
            found.setdefault(int(match[1] or 0), set()).update(range(int(first), int(last or first) + 1))
    return {replica: frozenset(ranks) for replica, ranks in found.items()}


def _unverified(given: Any) -> frozenset[tuple[int, int, int]]:
    matches = [re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6})@(\d{1,9})", text.replace(" ", "")) for text in _texts(given)]
    if None in matches:
        raise ValueError("not a logical rank and a step, such as 3@100 or 1:3@100")
    return frozenset((int(match[1] or 0), int(match[2]), int(match[3])) for match in matches if match)


def _texts(given: Any) -> list[str]:
    if isinstance(given, list) and all(isinstance(text, str) for text in given):
        return given
    raise ValueError("not a list of texts")


def _names(given: Any) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list) or any(name not in (*PROTECTIONS, NONE) for name in names):
        raise ValueError("an unknown protection")
    return tuple(name for name in names if name != NONE)


def _blocks(given: Any) -> tuple[int, ...]:
    parts = given.split(",") if isinstance(given, str) else given
    return tuple(map(whole(1), parts if isinstance(parts, list) else [parts]))


def _checkpoint(given: Any) -> int | None:
    return None if given in (NONE, None) else whole(0)(given)


_SIZE, _REPLICAS, _COUNT, _JOB = whole(1, _MOST_RANKS), whole(1, _MOST_REPLICAS), whole(0), JobAfterFault()
KEYS = Keys({
    "tp": Key(_SIZE, "T", "tensor-parallel size", _JOB.tp),
    "dp": Key(_SIZE, "D", "data-parallel size of a replica", _JOB.dp),
    "pp": Key(_SIZE, "P", "number of pipeline stages", _JOB.pp),
    "blocks": Key(_blocks, "N,N,...", "transformer layers of each stage; default: all the same", ()),
    "peers": Key(_COUNT, "K", "peer copies of each snapshot; 0: none", _JOB.peers),
    "replicas": Key(_REPLICAS, "N", "replicas of the model (FT-HSDP)", _JOB.replicas),
    "spare_redundancy": Key(_COUNT, "R", "shard types that a group hosts (SPARe); 0: off", _JOB.spare_redundancy),
    "protect": Key(_names, "NAME,...", f"of {', '.join(PROTECTIONS)}, or {NONE}", _JOB.protect),
    "step": Key(_COUNT, "S", "newest committed step; snapshots are of this step and the one before", _JOB.step),
    "checkpoint": Key(_checkpoint, "S", f"step of the newest verified checkpoint, or {NONE}"),
    "restarts_left": Key(_COUNT, "N", "warm restarts that are still allowed", _JOB.restarts_left),
    "lost": Key(_lost, "[REPLICA:]RANK,...", "logical ranks whose workers are lost, such as 3 or 1:4-7", repeats=True),
    "unverified": Key(_unverified, "[REPLICA:]RANK@STEP", "a state that is unusable wherever it lies", repeats=True),
    "standbys": Key(_COUNT, "N", "ready standbys of each replica", _JOB.standbys),
    "room": Key(_COUNT, "N", "further workers that a replica has devices for; default: as many as it has lost"),
})  # fmt: skip


def read(given: argparse.Namespace) -> tuple[JobAfterFault, bool]:
    """Return the scenario of a file, if there is one, and of the flags that are given, and whether it has a fault.

    Raises:
        UserError: a value is wrong; the message names all of them.
    """
    values, _, _, problems = KEYS.read(given)
    problems.refuse()
    has_fault = any(values[key] is not None for key in ("lost", "unverified"))
    found = JobAfterFault(**{key: value for key, value in values.items() if value is not None})
    problems.add(_problems(found))
    problems.refuse()
    return found, has_fault


def _problems(given: JobAfterFault) -> list[tuple[str, str]]:
    found = []
    if given.world > _MOST_RANKS:
        found.append((f"a replica of {given.world} ranks", f"give tp x dp x pp of at most {_MOST_RANKS}"))
    if given.blocks and len(given.blocks) != given.pp:
        found.append((f"{len(given.blocks)} numbers of blocks for {given.pp} stages", "give one for each stage"))
    if given.checkfree and HOT_SWAP not in given.protect:
        found.append(("CheckFree without hot-swap", f"add {HOT_SWAP} to --protect: it works under hot-swap"))
    if given.spare_redundancy and not 2 <= given.spare_redundancy <= given.replicas:
        fix = "give a redundancy from 2 to the number of replicas"
        found.append((f"redundancy {given.spare_redundancy} with {given.replicas} replicas", fix))
    if given.checkpoint is not None and given.checkpoint > given.step:
        found.append((f"a checkpoint of step {given.checkpoint}, after step {given.step}", "lower --checkpoint"))
    places = [("lost", replica, rank) for replica, ranks in given.lost.items() for rank in ranks]
    places += [("unverified", replica, rank) for replica, rank, _ in given.unverified]
    for key, replica, rank in sorted(places):
        if replica >= given.replicas or rank >= given.world:
            fix = f"replicas are 0 to {given.replicas - 1}, logical ranks 0 to {given.world - 1}"
            found.append((f"{key}: rank {rank} of replica {replica} does not exist", fix))
            break
    return found


def situations(scenario: JobAfterFault) -> dict[int, Situation]:
    """Return the situation of each replica that has lost workers or states; that of replica 0 if none has.

    Logical ranks are numbered as in Megatron: tensor parallel first, then data parallel, then the pipeline stages. A
    rank's peer copies lie with the next ranks of its data-parallel group, as hot-swap places them on nodes that are all
    alike.
    """
    damaged = sorted({*scenario.lost, *(replica for replica, _, _ in scenario.unverified)}) or [0]
    return {replica: _situation(scenario, replica) for replica in damaged}


def _situation(scenario: JobAfterFault, replica: int) -> Situation:
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


def _steps(scenario: JobAfterFault) -> list[int]:
    """Return the steps whose snapshots are in memory, the newest first."""
    return [step for step in (scenario.step, scenario.step - 1) if step >= 0]


def _memory(scenario: JobAfterFault, replica: int) -> HostMemory:
    """Return what the live workers of a replica hold.

    Workers are taken to be lost before the update of a step, so the models still have the weights of the step before.
    """
    from ft.state.placement.assign import ring_of  # with SciPy, which wrong input need not wait for

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


def _peers(scenario: JobAfterFault, rank: int) -> list[int]:
    """Return the ranks that hold the same part of the model."""
    tp, stage = rank % scenario.tp, rank // (scenario.tp * scenario.dp)
    first = stage * scenario.tp * scenario.dp + tp
    return list(range(first, first + scenario.tp * scenario.dp, scenario.tp))


def _place(scenario: JobAfterFault, rank: int) -> GridPosition:
    stage = rank // (scenario.tp * scenario.dp)
    blocks = scenario.blocks[stage] if scenario.blocks else 1
    return GridPosition(stage, rank % scenario.tp, rank // scenario.tp % scenario.dp, 0, blocks, lends=True)
