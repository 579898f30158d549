"""Read the question of ``ft plan policy``: the layout of a job, its protections, and what a fault took.

Each key is a flag of the command and a key of its JSON file; a flag overrides the file.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ft.base import files
from ft.base.errors import Problems, UserError
from ft.base.quantities import whole
from ft.job.control.recovery import MIDDLE, PLUS

HOT_SWAP, CHECKFREE, CHECKFREE_PLUS = "hot-swap", "checkfree", "checkfree-plus"
PROTECTIONS = (HOT_SWAP, CHECKFREE, CHECKFREE_PLUS)
NONE = "none"
_MOST_RANKS, _MOST_REPLICAS = 4096, 1024

Lost = dict[int, frozenset[int]]
"""Number of a replica -> logical ranks."""


@dataclass(frozen=True)
class Scenario:
    """A job after a fault; :data:`FLAGS` says what each attribute is.

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


_SIZE, _REPLICAS, _COUNT = whole(1, _MOST_RANKS), whole(1, _MOST_REPLICAS), whole(0)
FLAGS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "tp": ("T", "tensor-parallel size", _SIZE),
    "dp": ("D", "data-parallel size of a replica", _SIZE),
    "pp": ("P", "number of pipeline stages", _SIZE),
    "blocks": ("N,N,...", "transformer layers of each stage; default: all the same", _blocks),
    "peers": ("K", "peer copies of each snapshot; 0: none", _COUNT),
    "replicas": ("N", "replicas of the model (FT-HSDP)", _REPLICAS),
    "spare_redundancy": ("R", "shard types that a group hosts (SPARe); 0: off", _COUNT),
    "protect": ("NAME,...", f"of {', '.join(PROTECTIONS)}, or {NONE}", _names),
    "step": ("S", "newest committed step; snapshots are of this step and the one before", _COUNT),
    "checkpoint": ("S", f"step of the newest verified checkpoint, or {NONE}", _checkpoint),
    "restarts_left": ("N", "warm restarts that are still allowed", _COUNT),
    "lost": ("[REPLICA:]RANK,...", "logical ranks whose workers are lost, such as 3 or 1:4-7; may be repeated", _lost),
    "unverified": ("[REPLICA:]RANK@STEP", "a state that is unusable wherever it lies; may be repeated", _unverified),
    "standbys": ("N", "ready standbys of each replica", _COUNT),
    "room": ("N", "further workers that a replica has devices for; default: as many as it has lost", _COUNT),
}
"""Key -> metavar and help of its flag, and the reader of its value, which raises ValueError."""
REPEATED = ("lost", "unverified")


def read(flags: Mapping[str, Any], path: str | None) -> Scenario:
    """Return the scenario of a file, if there is one, and of the flags that are given.

    Args:
        flags: key -> text, or list of texts for keys of ``REPEATED``; None: not given.
        path: a JSON file of the same keys, or None.

    Raises:
        UserError: a value is wrong; the message names all of them.
    """
    given = {} if path is None else files.read_structured(path, "the file of the situation")
    if not isinstance(given, dict):
        raise UserError(f"{path} holds no mapping", "give an object with keys such as pp and lost")
    given = given | {key: value for key, value in flags.items() if value is not None}
    problems = Problems()
    if unknown := sorted(map(str, given.keys() - FLAGS.keys())):
        problems.add([(f"unknown key(s) {', '.join(unknown)}", f"the keys are {', '.join(FLAGS)}")])
    values: dict[str, Any] = {}
    for key, (metavar, about, reader) in FLAGS.items():
        if key in given:
            try:
                values[key] = reader(given[key])
            except ValueError as error:
                problems.add([(f"{key} {given[key]!r}: {error}", f"give {metavar}: {about}")])
    problems.refuse()
    found = Scenario(**values)
    problems.add(_problems(found))
    problems.refuse()
    return found


def _problems(given: Scenario) -> list[tuple[str, str]]:
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
