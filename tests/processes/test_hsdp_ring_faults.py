"""The fault-tolerant all-reduce between processes, of which some are killed or stopped in the middle."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from waiting import eventually

from ft.systems.hsdp.ring import Ring, RingOptions

ELEMENTS = 300_000
OPTIONS = RingOptions(chunk_bytes=65536, chunks=4, limit_s=10)
CALM_S = 40.0
PATIENCE_S = 60


def told(folder: Path, name: str) -> str:
    """What is said under this name, once it is."""
    eventually((folder / name).exists, name, PATIENCE_S, 0.002)
    return (folder / name).read_text()


def say(folder: Path, name: str, what: str = "") -> None:
    draft = folder / f".{name}.{os.getpid()}"
    draft.write_text(what)
    draft.rename(folder / name)


class Member:
    """A process's end of a ring; members meet by files."""

    def __init__(self, folder: Path, rank: int, count: int, limit_s: float):
        self.folder, self.rank = folder, rank
        self.ring = Ring("127.0.0.1", "secret", OPTIONS)
        self.ring.expect(limit_s)
        say(folder, f"address{rank}", self.ring.address)
        self.addresses = [told(folder, f"address{each}") for each in range(count)]

    def join(self, number: int, ranks: list[int]) -> None:
        self.ring.reconfigure(number, [self.addresses[rank] for rank in ranks], ranks.index(self.rank))

    def reduce(self, ranks: list[int]):
        """The outcome of three operations: the first that failed, if one did; good ones are checked."""
        tensors = [torch.full((ELEMENTS,), float(self.rank + turn)) for turn in range(3)]
        outcomes = [each.wait() for each in [self.ring.all_reduce(tensor) for tensor in tensors]]
        for turn, (outcome, tensor) in enumerate(zip(outcomes, tensors, strict=True)):
            assert not outcome.ok or torch.equal(tensor, torch.full((ELEMENTS,), float(sum(ranks) + turn * len(ranks))))
        return next((outcome for outcome in outcomes if not outcome.ok), outcomes[0])

    def until_it_fails(self, ranks: list[int]):
        """Reduces on and on; the outcome that ended it and how long it took to come, seconds."""
        for turn in range(1_000_000):
            begun = time.monotonic()
            outcome = self.reduce(ranks)
            if not outcome.ok:
                return outcome, time.monotonic() - begun
            if turn == 5:
                say(self.folder, f"busy{self.rank}")
        raise AssertionError("it never failed")


def struck(folder, count, limit_s, comes_back):
    """Reduces until a member is struck, then with the rest, then, if it comes back, with all again."""
    rank = int(os.environ["RANK"])
    everyone = list(range(count))
    member = Member(folder, rank, count, limit_s)
    member.join(1, everyone)
    outcome, seconds = member.until_it_fails(everyone)
    victim = int(told(folder, "victim"))
    rest = [each for each in everyone if each != victim]
    if rank != victim:
        member.join(2, rest)
        assert member.reduce(rest).ok
        say(folder, f"survived{rank}")
    told(folder, "end of the strike")
    if comes_back:
        member.ring.expect(CALM_S)
        member.join(3, everyone)
        assert member.reduce(everyone).ok
    member.ring.close()
    return outcome.suspect, seconds


def strike(ranks, folder, count, signum, limit_s, comes_back, seed):
    """What the survivors, and who comes back, have returned, by rank."""
    victim = random.Random(seed).randrange(count)
    with ranks.start(struck, count, folder, count, limit_s, comes_back, init=False) as handle:
        for rank in range(count):
            told(folder, f"busy{rank}")
        time.sleep(random.Random(seed + 1).random() * 0.05)
        handle.kill(victim, signum)
        say(folder, "victim", str(victim))
        for rank in range(count):
            if rank != victim:
                told(folder, f"survived{rank}")
        if comes_back:
            handle.kill(victim, signal.SIGCONT)
        say(folder, "end of the strike")
        outcomes = handle.wait(PATIENCE_S)
    for outcome in outcomes:
        assert outcome.exitcode == (0 if outcome.rank != victim or comes_back else -signum), outcome
    return victim, {outcome.rank: outcome.value for outcome in outcomes if outcome.rank != victim}


@pytest.mark.parametrize("count", [2, 4])
def test_a_member_killed_in_the_middle_is_known_to_all_long_before_the_limit(ranks, tmp_path, count, seed):
    victim, survivors = strike(ranks, tmp_path, count, signal.SIGKILL, CALM_S, False, seed)
    assert {suspect for suspect, _ in survivors.values()} == {victim}
    assert all(seconds < CALM_S / 2 for _, seconds in survivors.values())


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_member_stopped_in_the_middle_is_left_out_and_taken_in_again(ranks, tmp_path, count, seed):
    victim, survivors = strike(ranks, tmp_path, count, signal.SIGSTOP, OPTIONS.limit_s, True, seed)
    assert {suspect for suspect, _ in survivors.values()} == {victim}


def grow_and_shrink(folder, turns):
    """Quorums of changing members, by the same processes; nothing is left of those before."""
    rank, number = int(os.environ["RANK"]), 0
    member = Member(folder, rank, 3, CALM_S)
    for turn in range(turns):
        for ranks in ([0, 1, 2], [0, 2], [2, 1, 0], [1]):
            number += 1
            if rank in ranks:
                member.join(number, ranks)
                assert member.reduce(ranks).ok
        if turn == 0:
            before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    after = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    say(folder, f"done{rank}")
    for each in range(3):
        told(folder, f"done{each}")
    member.ring.close()
    return before, after


def test_members_come_and_go_and_leave_no_connection_and_no_thread_behind(ranks, tmp_path):
    for before, after in ranks(grow_and_shrink, 3, tmp_path, 10, init=False, timeout=PATIENCE_S):
        assert after[0] <= before[0] + 6 and after[1] <= before[1] + 1, (before, after)
