"""The faults of the simulation: what is made wrong on which rank, and what a right diagnosis names."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from ft.faults.hang.causes import (
    BUSY,
    CYCLE,
    DEAD_RANK,
    MISMATCH,
    MISSING_CALL,
    SLOW_LINK,
    SLOW_RANK,
    STOPPED_RANK,
    UNMATCHED,
)
from ft.faults.hang.graph import EQUAL_SIZES
from ft.faults.hang.inspection import DEAD, STOPPED
from tests.simulation.hangs.machine import Batch, Call, Layout, Programs, Wrong

STEP = 2
"""The step in which something goes wrong; the steps before it show what is usual."""

_PLACES = {
    "user code": ("train.py:88 my_metric", "training/training.py:1490 train_step"),
    "data loader": ("torch/utils/data/dataloader.py:1203 _try_get_data", "pretrain_gpt.py:60 get_batch"),
    "lock": ("threading.py:324 wait", "my_pool.py:31 submit"),
    "storage": ("torch/serialization.py:970 save", "megatron/training/checkpointing.py:600 save_checkpoint"),
    "kernel": ("torch/cuda/streams.py:225 synchronize", "training/training.py:1500 train_step"),
}


@dataclass(frozen=True)
class Injected:
    """One injected fault.

    Attributes:
        wrong: logical rank -> what is wrong there.
        kinds: logical rank -> the kind that a right diagnosis names.
        factor: how many times slower something is; 0 for a hang.
    """

    wrong: dict[int, Wrong]
    kinds: dict[int, str]
    factor: float = 0.0


def _any_batch(programs: Programs, rank: int, rng: random.Random) -> tuple[int, int]:
    return STEP, rng.randrange(len(programs.steps[rank]))


def _rank(programs: Programs, rng: random.Random) -> int:
    return rng.choice(sorted(rank for rank, steps in programs.steps.items() if steps))


def _ended(state: str, kind: str) -> Callable:
    def inject(programs: Programs, rng: random.Random) -> Injected:
        rank = _rank(programs, rng)
        inside = rng.random() < 0.5
        wrong = Wrong(state, _any_batch(programs, rank, rng), inside, answers=False, kernel="T")
        return Injected({rank: wrong}, {rank: kind})

    return inject


def _busy(place: str) -> Callable:
    def inject(programs: Programs, rng: random.Random) -> Injected:
        rank = _rank(programs, rng)
        frames = _PLACES[place]
        return Injected({rank: Wrong(at=_any_batch(programs, rank, rng), frames=frames)}, {rank: BUSY})

    return inject


def _lock_held(programs: Programs, rng: random.Random) -> Injected:
    """The interpreter lock is held, as in a long garbage collection: nothing in the process answers."""
    rank = _rank(programs, rng)
    wrong = Wrong(at=_any_batch(programs, rank, rng), answers=False, kernel="R")
    return Injected({rank: wrong}, {rank: BUSY})


def _changed(programs: Programs, rank: int, batches: list[Batch], kind: str) -> Injected:
    return Injected({rank: Wrong(program=batches)}, {rank: kind})


def _wrong_order(programs: Programs, rng: random.Random) -> Injected | None:
    rank = _rank(programs, rng)
    batches = list(programs.steps[rank])
    at = [
        i
        for i in range(len(batches) - 1)
        if batches[i][0].peer is None and batches[i + 1][0].peer is None and batches[i][0] != batches[i + 1][0]
    ]
    if not at:
        return None
    i = rng.choice(at)
    batches[i], batches[i + 1] = (_elsewhere(batches[i + 1][0]),), (_elsewhere(batches[i][0]),)
    same = batches[i][0].group == batches[i + 1][0].group
    return _changed(programs, rank, batches, MISMATCH if same else CYCLE)


def _elsewhere(call: Call) -> Call:
    """Return the call at another line: in the other branch of a condition."""
    file, _, rest = call.site.partition(":")
    line, _, name = rest.partition(" ")
    return replace(call, site=f"{file}:{int(line) + 5} {name}")


def _wrong_sizes(programs: Programs, rng: random.Random) -> Injected | None:
    return _edit(programs, rng, lambda c: c.name in EQUAL_SIZES, lambda c, rank: (_larger(c),), MISMATCH)


def _larger(call: Call) -> Call:
    ((dtype, shape),) = call.sizes
    return replace(call, sizes=((dtype, (shape[0] + 1, *shape[1:])),))


def _missing_call(programs: Programs, rng: random.Random) -> Injected | None:
    return _edit(programs, rng, lambda c: c.peer is None, lambda c, rank: (), MISSING_CALL)


def _missing_message(programs: Programs, rng: random.Random) -> Injected | None:
    return _edit(programs, rng, lambda c: c.peer is not None, lambda c, rank: (), UNMATCHED, alone=True)


def _wrong_peer(programs: Programs, rng: random.Random) -> Injected | None:
    def other(call: Call, rank: int) -> tuple[Call, ...]:
        ranks = [one for one in programs.groups[call.group] if one not in (rank, call.peer)]
        return (replace(call, peer=rng.choice(ranks)),) if ranks else (call,)

    return _edit(programs, rng, lambda c: c.peer is not None, other, UNMATCHED, alone=True)


def _wrong_message_size(programs: Programs, rng: random.Random) -> Injected | None:
    return _edit(programs, rng, lambda c: c.peer is not None and c.awaited, lambda c, rank: (_larger(c),), MISMATCH)


def _edit(
    programs: Programs, rng: random.Random, fits: Callable, change: Callable, kind: str, alone=False
) -> Injected | None:
    """Return the fault that one rank's program has one call changed; None if there is no such call.

    Args:
        fits: returns whether a call may be changed.
        change: function (call, rank) -> the calls that are made instead; without calls, the batch is left out.
        kind: the kind that a right diagnosis names.
        alone: whether the call has to be the only one of its batch.
    """
    rank = _rank(programs, rng)
    batches = list(programs.steps[rank])
    places = [i for i, batch in enumerate(batches) if fits(batch[0]) and (not alone or len(batch) == 1)]
    if not places:
        return None
    i = rng.choice(places)
    first = batches[i][0]
    calls = change(first, rank)
    if calls == (first,):
        return None
    batches[i : i + 1] = [(*calls, *batches[i][1:])] if calls else []
    return _changed(programs, rank, batches, kind)


def _two_at_once(programs: Programs, rng: random.Random) -> Injected | None:
    single = [_ended(STOPPED, STOPPED_RANK), _ended(DEAD, DEAD_RANK), _busy("user code"), _busy("data loader")]
    one, other = (rng.choice(single)(programs, rng) for _ in range(2))
    if one.wrong.keys() & other.wrong.keys():
        return None
    return Injected({**one.wrong, **other.wrong}, {**one.kinds, **other.kinds})


def _slow(frames: tuple[str, ...], answers: bool = True) -> Callable:
    def inject(programs: Programs, rng: random.Random) -> Injected:
        rank, factor = _rank(programs, rng), rng.uniform(3, 10)
        wrong = Wrong(slower=factor, where=frames, answers=answers)
        return Injected({rank: wrong}, {rank: SLOW_RANK}, factor)

    return inject


def _slow_link(programs: Programs, rng: random.Random) -> Injected:
    rank, factor = _rank(programs, rng), rng.uniform(100, 400)
    return Injected({rank: Wrong(link=factor)}, {rank: SLOW_LINK}, factor)


KINDS: dict[str, Callable[[Programs, random.Random], Injected | None]] = {
    "stopped": _ended(STOPPED, STOPPED_RANK),
    "killed": _ended(DEAD, DEAD_RANK),
    **{f"blocked in {place}": _busy(place) for place in _PLACES},
    "interpreter lock held": _lock_held,
    "wrong order": _wrong_order,
    "wrong sizes": _wrong_sizes,
    "missing call": _missing_call,
    "missing message": _missing_message,
    "wrong peer": _wrong_peer,
    "wrong size of a message": _wrong_message_size,
    "two at once": _two_at_once,
    "slow in computing": _slow(("megatron/core/transformer/mlp.py:120 forward",)),
    "slow on storage": _slow(_PLACES["storage"]),
    "slow in the data loader": _slow(_PLACES["data loader"]),
    "slow in garbage collection": _slow((), answers=False),
    "slow link": _slow_link,
}
"""Name of a fault -> function (programs, random numbers) that injects it; None if the layout has no place for it."""

LAYOUTS = (
    Layout(dp=4),
    Layout(tp=2, dp=2),
    Layout(tp=4, dp=2),
    Layout(pp=2, dp=2),
    Layout(pp=4, dp=2, microbatches=6),
    Layout(tp=2, pp=2, dp=2),
    Layout(cp=2, dp=2),
    Layout(tp=2, cp=2, pp=2, dp=2),
    Layout(dp=4, ep=2, pp=2),
    Layout(tp=2, dp=4, ep=4),
    Layout(pp=2, vpp=2, dp=2),
    Layout(pp=4, vpp=2, dp=2, tp=2),
    Layout(tp=2, pp=4, dp=4, microbatches=8),
    Layout(tp=4, pp=4, dp=4, microbatches=6),
)
"""The layouts of the campaign, of 4 to 64 ranks."""
