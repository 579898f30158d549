"""Snapshots of workers: what is held where, and what a restore makes of it."""

import threading

import pytest
from snapshot_crew import MIB, is_at, set_to, state

from ft.base.errors import FallbackError, RecoverableError
from ft.job.parts import Source
from ft.net.framed import Mark
from ft.state.snapshot import Snapshots, SnapshotServer
from ft.state.snapshot.buffers import SlotPart
from ft.state.snapshot.copier import CopyProgress
from ft.state.snapshot.state import OWNED
from ft.state.transfer import NotHeld

stop = CopyProgress.stop


def test_copies_are_held_by_the_peers_and_two_steps_at_most(crew):
    workers = crew(3, steps=range(4))
    for rank, snaps in enumerate(workers.snaps):
        held = snaps.holdings()
        assert held.own == [2, 3]
        assert held.copies == {(rank - 1) % 3: [2, 3]}
        assert snaps.lag == 0
        stats = snaps.stats
        assert stats.bytes_h2h < stats.bytes_d2h < stats.bytes_h2h + 2000
        assert min(stats.take_s, stats.copy_s, stats.transfer_s, stats.wait_s) >= 0


def test_own_snapshots_bring_back_either_step(crew):
    workers = crew(2, steps=(5, 6))
    snaps, live = workers.snaps[0], workers.live[0]
    set_to(live, 7)
    assert snaps.restore(live, 5, Source(0, 0)) == {"owned": "own", "replicated": "own"}
    assert is_at(live, 5)
    assert snaps.restored_envelope.envelope["extra"] == {"at": 5}
    assert snaps.restored_envelope.envelope["step"] == 5
    assert snaps.restored_envelope.blobs == {"rng": b"5"}
    assert snaps.holdings().own == [5]


@pytest.mark.parametrize("goes_back", [False, True])
def test_leaving_an_epoch_waits_for_no_copy_and_a_restore_completes_or_abandons_it(goes_back, crew, monkeypatch):
    workers, may_copy = crew(2), threading.Event()
    workers.step(5)
    snaps, live = workers.snaps[0], set_to(workers.live[0], 6)
    seal = SlotPart.seal
    monkeypatch.setattr(SlotPart, "seal", lambda part, index: (may_copy.wait(20), seal(part, index)))
    snaps.take(live, 6, 0)
    snaps.settle()
    assert not may_copy.is_set() and snaps.holdings().own == [5, 6]
    asked = threading.Thread(target=may_copy.set)
    if goes_back:
        monkeypatch.setattr(CopyProgress, "stop", lambda progress: (stop(progress), asked.start()), raising=True)
    else:
        with pytest.raises(NotHeld) as refusal:
            workers.servers[0].find(Mark(0, 6, -1), OWNED)
        assert refusal.value.later, "peers ask again"
        asked.start()
    snaps.restore(live, 5 if goes_back else 6, Source(0, 0), epoch=1)
    asked.join()
    assert is_at(live, 5 if goes_back else 6) and snaps.holdings().own == ([5] if goes_back else [5, 6])


def test_going_back_within_an_epoch_leaves_it_open(crew):
    workers = crew(2, steps=(5, 6))
    assert workers.snaps[0].restore(set_to(workers.live[0], 7), 5, Source(0, 0), epoch=0)["owned"] == "own"
    assert workers.snaps[1].restore(set_to(workers.live[1], 7), 5, Source(0, 0), epoch=0)["owned"] == "copy:0"
    assert all(is_at(live, 5) for live in workers.live)
    workers.step(6)
    assert workers.snaps[0].holdings().copies == {1: [5, 6]}


def test_copies_that_go_elsewhere_are_kept_until_the_new_ones_are_safe_and_then_freed(crew):
    workers = crew(3, steps=(5, 6))
    assert workers.snaps[1].holdings().copies == {0: [5, 6]}
    for snaps, live in zip(workers.snaps, workers.live, strict=True):
        snaps.restore(live, 6, Source(snaps.rank, snaps.rank), epoch=1)
        snaps.peers = [(snaps.rank + 2) % 3]
    assert workers.snaps[1].holdings().copies == {0: [5, 6]}
    workers.step(6, epoch=1)
    assert workers.snaps[1].holdings().copies == {0: [5, 6], 2: [6]}
    before = workers.snaps[1].nbytes["copies"]
    assert [snaps.forget_before(1) for snaps in workers.snaps] == [[2], [0], [1]]
    assert workers.snaps[1].holdings().copies == {2: [6]} and workers.snaps[1].nbytes["copies"] < before
    workers.step(7, epoch=1)
    assert workers.snaps[1].holdings().copies == {2: [6, 7]}
    assert workers.snaps[1].forget_before(1) == []


def test_after_an_older_checkpoint_was_loaded_the_snapshots_of_undone_steps_are_dropped(crew):
    workers = crew(2, steps=(5, 6, 3))
    held = workers.snaps[0].holdings()
    assert held.own == [3] and held.copies == {1: [3]}


def test_whoever_held_the_copies_before_is_asked_for_them(crew):
    workers = crew(3, steps=[5])
    workers.snaps[0].settle()
    newcomer = Snapshots(workers.servers[0], rank=0, peers=[2], replicas=[2])
    newcomer.place(workers.addresses)
    workers.servers[0].stock.own.drop_after(-1)
    newcomer.held_by([1])
    assert newcomer.restore(workers.live[0], 5, Source(2, 2), epoch=1) == {"owned": "copy:1", "replicated": "peer:2"}
    newcomer.close()


def test_tensors_that_are_sound_are_left_alone(crew):
    workers = crew(2, steps=[5])
    live = set_to(workers.live[0], 6)
    workers.snaps[0].restore(live, 5, Source(0, 0), keep_tensors=True)
    assert is_at(live, 6)
    assert workers.snaps[0].restored_envelope.envelope["extra"] == {"at": 5}


def test_a_newcomer_gets_everything_from_the_peers_and_replicates_again(crew):
    workers = crew(3, steps=(5, 6))
    workers.snaps[1].close()
    workers.servers[1].close()
    for rank in (0, 2):
        workers.snaps[rank].settle()
    workers.servers[1] = SnapshotServer(workers.networks.of(1))
    workers.snaps[1] = Snapshots(workers.servers[1], rank=1, peers=[2])
    workers.live[1] = state(0)
    workers.addresses[1] = workers.servers[1].address
    workers.place()
    for rank in (0, 2):
        assert workers.snaps[rank].restore(workers.live[rank], 5, Source(rank, rank), epoch=1)["owned"] == "own"
    how = workers.snaps[1].restore(workers.live[1], 5, Source(2, 0), epoch=1)
    assert how == {"owned": "copy:2", "replicated": "peer:0"}
    assert all(is_at(live, 5) for live in workers.live)
    assert workers.snaps[1].restored_envelope.envelope["rank"] == 1
    workers.step(5, epoch=1)
    assert workers.snaps[1].holdings().copies == {0: [5]}
    assert workers.snaps[2].holdings().copies == {1: [5]}
    workers.step(6, epoch=1)
    assert workers.snaps[2].holdings().copies == {1: [5, 6]}


@pytest.mark.parametrize(
    ("holder", "damage", "source", "how"),
    [
        (0, {"byte": MIB + 17}, Source(0, 0), "copy:1"),
        (1, {"owner": 0, "byte": 3}, Source(1, 1), "copy:2"),
    ],
    ids=["the own one", "a peer's"],
)
def test_a_corrupt_snapshot_is_passed_over_for_the_next(crew, holder, damage, source, how):
    workers = crew(3, copies=2, steps=[5])
    assert workers.snaps[holder].corrupt(**damage) == 5
    live = set_to(workers.live[0], 6)
    assert workers.snaps[0].restore(live, 5, source, epoch=1) == {"owned": how, "replicated": "peer:1"}
    assert is_at(live, 5)


def test_the_last_snapshot_undoes_a_step_unless_it_is_damaged(crew):
    workers = crew(2, steps=(5, 6))
    snaps, live = workers.snaps[0], workers.live[0]
    snaps.write_back(set_to(live, 7).sections())
    assert is_at(live, 6) and snaps.holdings().own == [5, 6]
    snaps.corrupt(byte=MIB + 17)
    set_to(live, 7)
    with pytest.raises(RecoverableError, match="the snapshot of step 6 is damaged: chunk 1 of"):
        snaps.write_back(live.sections())
    assert is_at(live, 7)


def test_when_no_copy_is_sound_each_one_is_named_and_nothing_is_written(crew):
    workers = crew(3, copies=2, steps=[5])
    for rank in range(3):
        workers.snaps[rank].corrupt(owner=0, byte=2 * MIB)
    live = set_to(workers.live[0], 6)
    with pytest.raises(FallbackError) as caught:
        workers.snaps[0].restore(live, 5, Source(0, 0), epoch=1)
    for part in ("own snapshot is damaged", "rank 1's copy", "rank 2's copy", "chunk 2"):
        assert part in str(caught.value)
    assert is_at(live, 6)
    with pytest.raises(FallbackError, match="step 9"):
        workers.snaps[1].restore(workers.live[1], 9, Source(1, 1), epoch=1)


def test_a_snapshot_of_other_tensors_is_refused(crew):
    workers = crew(2, steps=[5])
    with pytest.raises(FallbackError, match=r"big float32\[655360\] against big float32\[262144\]"):
        workers.snaps[0].restore(state(0, mib=1), 5, Source(1, 1), epoch=1)
