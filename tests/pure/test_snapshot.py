"""Layout, buffers and peers of snapshots, without processes."""

import os
import random
import resource
import struct

import pytest
import torch

from ft.base.errors import FallbackError
from ft.job.parts import Holdings
from ft.net.framed import checksum
from ft.state.layout import ALIGNMENT, CHUNK, Table
from ft.state.placement.assign import ring_of
from ft.state.snapshot.buffers import PingPong, Status, read_label
from ft.state.snapshot.copier import Copier, CopyPlan, tables_of, write_back
from ft.state.snapshot.state import pack_meta, unpack_meta
from ft.state.snapshot.store import TakeStats, slowness
from ft.state.snapshot.transport import CopyStore


def sections(owned: int = 3 * CHUNK // 4 + 5, seed: int = 0) -> dict:
    """About 3 MiB of tensors of several types and shapes."""
    generator = torch.Generator().manual_seed(seed)
    big = torch.randn(owned, generator=generator)
    return {
        "owned": {
            "step": torch.tensor(float(seed)),
            "big": big,
            "half": big[: 2 * 3 * 5].to(torch.bfloat16).view(2, 3, 5),
            "across": torch.randn(400, 300, generator=generator).t(),
            "empty": torch.empty(0, 4),
            "mask": big[:7] > 0,
        },
        "replicated": {"count": torch.arange(5) + seed},
    }


def test_a_table_survives_the_wire_and_its_tensors_do_not_overlap():
    table = Table.of(sections()["owned"])
    assert Table.decode(table.encoded) == table
    end = 0
    for entry in table.entries:
        assert entry.offset % ALIGNMENT == 0
        assert entry.offset >= end
        end = entry.offset + entry.nbytes
    assert end <= table.nbytes


def test_the_first_difference_of_two_tables_is_told():
    one, other = (
        Table.of({"a": torch.zeros(2), "b": torch.zeros(3)}),
        Table.of({"a": torch.zeros(2), "b": torch.zeros(4)}),
    )
    assert one.difference(one) == ""
    assert one.difference(other) == "b float32[3] against b float32[4]"
    assert one.encoded != other.encoded


def test_envelope_and_blobs_survive_the_wire():
    envelope, blobs = {"lr": 0.1 + 0.2, "inf": float("inf"), "none": None}, {"a": b"\x00\xff", "b": b"", "c": b"xyz"}
    found = unpack_meta(pack_meta(envelope, blobs))
    assert (found.envelope, found.blobs) == (envelope, blobs)
    for wrong in (b"", b"\x00", struct.pack("<I", 10**9), pack_meta(envelope, blobs)[:-1], pack_meta({}, {}) + b"x"):
        with pytest.raises(FallbackError):
            unpack_meta(wrong)


def test_every_rank_holds_as_many_copies_as_it_has():
    for size, k in ((2, 1), (4, 1), (4, 2), (8, 3)):
        ring = list(range(0, 2 * size, 2))
        held = [peer for rank in ring for peer in ring_of(rank, ring, k, 2 * size)]
        assert sorted(held) == sorted(ring * k)
        assert all(rank not in ring_of(rank, ring, k, 2 * size) for rank in ring)


def filled(copier: Copier, held: PingPong, step: int, epoch: int, state: dict):
    slot = held.begin(step, epoch, tables_of(state))
    slot.set_meta(b"%d" % step)
    progress = copier.start(
        CopyPlan(slot, state), lambda error: held.commit(slot) if error is None else held.drop(slot)
    )
    progress.wait()
    assert progress.error is None
    return slot


@pytest.fixture
def copier():
    made = Copier()
    yield made
    made.close()


def test_what_was_copied_comes_back_bit_for_bit(copier):
    state, held = sections(), PingPong()
    slot = filled(copier, held, 1, 0, state)
    assert slot.damage() is None
    before = {name: {key: t.clone() for key, t in tensors.items()} for name, tensors in state.items()}
    for tensors in state.values():
        for tensor in tensors.values():
            tensor.zero_()
    write_back(slot, state)
    for name, tensors in state.items():
        for key, tensor in tensors.items():
            assert torch.equal(tensor, before[name][key]), key


def test_one_flipped_bit_anywhere_is_found(copier, seed):
    slot = filled(copier, PingPong(), 1, 0, sections())
    rng = random.Random(seed)
    for _ in range(20):
        part = slot.parts[rng.choice(["owned", "replicated"])]
        byte, bit = rng.randrange(part.buffer.nbytes), 1 << rng.randrange(8)
        part.buffer.view[byte] ^= bit
        assert f"chunk {byte // CHUNK} " in slot.damage()
        part.buffer.view[byte] ^= bit
    assert slot.damage() is None


@pytest.mark.parametrize("size", [0, 1, 7, 8191, 8192, 8200, 30001, CHUNK])
def test_a_checksum_tells_every_flipped_bit_and_every_stale_piece(size, seed):
    rng = random.Random(seed)
    data = bytearray(rng.randbytes(size))
    expected, sums = checksum(data), set()
    assert checksum(bytes(data)) == checksum(memoryview(data)) == expected
    for _ in range(50 if size else 0):
        bit = rng.randrange(8 * size)
        data[bit // 8] ^= 1 << bit % 8
        sums.add(checksum(data))
        data[bit // 8] ^= 1 << bit % 8
    assert expected not in sums
    constant, mixed = bytes(size), bytearray(size)
    mixed[: size // 2] = b"\x01" * (size // 2)
    assert size < 2 or checksum(constant) != checksum(mixed)
    assert checksum(data) == expected


def test_two_slots_take_turns_and_a_failure_loses_only_what_is_staged():
    held, tables = PingPong(), tables_of({"owned": {"a": torch.zeros(3)}})
    for step in range(5):
        held.commit(held.begin(step, 0, tables))
    assert held.steps() == [3, 4]
    staged = held.begin(5, 0, tables)
    assert held.steps() == [4]
    held.drop(staged)
    assert held.steps() == [4]
    held.commit(held.begin(5, 0, tables))
    assert held.steps() == [4, 5]


def test_after_a_recovery_the_undone_future_is_overwritten_first():
    held, tables = PingPong(), tables_of({"owned": {"a": torch.zeros(3)}})
    for step in (4, 5):
        held.commit(held.begin(step, 0, tables))
    staged = held.begin(4, 1, tables)
    assert held.steps() == [4]
    held.commit(staged)
    assert held.find(4).epoch == 1
    held.commit(held.begin(5, 1, tables))
    assert held.steps() == [4, 5]
    assert {held.find(4).epoch, held.find(5).epoch} == {1}
    held.drop_after(4)
    assert held.steps() == [4]


def test_the_own_step_that_is_taken_once_more_leaves_the_one_before():
    """After a recovery peers may hold only that one of it yet."""
    held, tables = PingPong(), tables_of({"owned": {"a": torch.zeros(3)}})
    for step in (4, 5):
        held.commit(held.begin(step, 0, tables, own=True))
    again = held.begin(5, 1, tables, own=True)
    assert held.steps() == [4]
    held.commit(again)
    assert held.steps() == [4, 5] and held.find(5).epoch == 1
    held.commit(held.begin(6, 1, tables, own=True))
    assert held.steps() == [5, 6]


def test_a_random_history_always_leaves_a_complete_snapshot(seed):
    rng, held, tables = random.Random(seed), PingPong(), tables_of({"owned": {"a": torch.zeros(3)}})
    step, epoch, newest = 0, 0, None
    for _ in range(500):
        slot = held.begin(step, epoch, tables)
        assert newest is None or held.find(newest) is not None
        if rng.random() < 0.3:  # a failure: back to what is complete, in a new epoch
            held.drop(slot)
            epoch += 1
            step = 0 if newest is None else newest
            held.drop_after(step)
            continue
        held.commit(slot)
        newest, step = step, step + 1
        assert slot.status is Status.COMPLETE


def files(snapshots: PingPong) -> list[int]:
    """Return new descriptors of the memory of both slots, as another process would have them."""
    return [os.dup(slot.file.fd) for slot in snapshots._slots if slot.file is not None]


def test_who_has_the_files_of_the_slots_has_the_complete_snapshots(copier):
    first, state = CopyStore(), sections()
    for held, step in ((first.own, 5), (first.own, 6), (first.copies(3), 6)):
        filled(copier, held, step, 0, state)
    opened = [*files(first.own), *files(first.copies(3))]
    del first

    heir = CopyStore()
    neighbour = CopyStore()
    filled(copier, neighbour.copies(9), 6, 0, {"owned": state["owned"]})
    neighbour.inherit(map(os.dup, opened), 9, False)
    assert neighbour.holdings() == Holdings([], {3: [6], 9: [5, 6]}, whole={3: [6], 9: [5, 6]})
    second = CopyStore()  # who inherits from the neighbour does not take the others' snapshots for its own
    second.inherit([*files(neighbour.copies(9)), *files(neighbour.copies(3))], 2, True)
    assert second.holdings() == neighbour.holdings()
    heir.inherit(opened, 9, True)
    assert heir.holdings() == Holdings([5, 6], {3: [6]}, whole={3: [6]})
    slot = heir.own.find(6)
    assert slot.damage() is None and slot.meta == b"6"
    for name, part in slot.parts.items():
        assert all(torch.equal(a, b) for a, b in zip(part.tensors(), state[name].values(), strict=True))
    heir.rank = 1
    assert heir.find(3).parts["replicated"].table.nbytes  # a copy of another rank has what its owner has
    filled(copier, heir.own, 7, 0, state)  # the heir goes on in the memory that it has inherited
    assert heir.own.steps() == [6, 7]


def test_a_snapshot_that_is_being_written_or_was_undone_is_not_inherited(copier):
    snapshots = PingPong()
    for step in (5, 6):
        filled(copier, snapshots, step, 0, sections())
    snapshots.begin(7, 0, tables_of(sections()))
    heir = CopyStore()
    heir.inherit(files(snapshots), 0, True)
    assert heir.holdings().own == [6]
    snapshots.drop_after(5)
    heir = CopyStore()
    heir.inherit(files(snapshots), 0, True)
    assert heir.holdings().own == []


def test_a_damaged_or_foreign_file_is_not_inherited_and_a_flipped_bit_of_a_tensor_is_found(copier):
    snapshots = PingPong()
    filled(copier, snapshots, 5, 0, sections())
    (fd,) = files(snapshots)
    for at in (0, 9, 20, snapshots._slots[0].file.end + 3):
        byte = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte[0] ^ 4]), at)
        assert read_label(fd) is None
        os.pwrite(fd, byte, at)
    assert read_label(fd).step == 5
    os.pwrite(fd, bytes([os.pread(fd, 1, 2 << 20)[0] ^ 4]), 2 << 20)
    heir = CopyStore()
    heir.inherit([fd, os.memfd_create("other"), os.open(os.devnull, os.O_RDWR)], 0, True)
    assert heir.own.find(5).damage() == "chunk 0 of 4 of its owned tensors"


def test_a_limit_on_the_size_of_files_costs_the_inheritance_and_no_snapshot(copier):
    """The injected full disk is such a limit; memory files count as files."""
    inherited, late = PingPong(), PingPong()
    filled(copier, inherited, 5, 0, sections())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        filled(copier, late, 5, 0, sections())
        for step in (6, 7):
            filled(copier, inherited, step, 0, sections())
        assert (inherited.steps(), late.steps()) == ([6, 7], [5])
        assert late.find(5).damage() is None and files(late) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    heir = CopyStore()
    heir.inherit(files(inherited), 0, True)
    assert heir.holdings().own == []
    for step in (8, 9):  # 8 is in the slot whose memory was made under the limit
        filled(copier, inherited, step, 0, sections())
    heir.inherit(files(inherited), 0, True)
    assert heir.holdings().own == [9]


def test_what_an_heir_has_already_is_not_taken_over_again(copier):
    snapshots, heir = PingPong(), CopyStore()
    filled(copier, snapshots, 5, 0, sections())
    for _ in range(2):
        heir.inherit(files(snapshots), 0, True)
    assert [slot.step for slot in heir.own._slots] == [5, -1]


def test_a_snapshot_that_is_not_sent_within_a_step_is_told_with_bytes_rate_and_seconds():
    stats = TakeStats(7, bytes_d2h=0, bytes_h2h=12_000_000_000, take_s=0.0, transfer_s=96.0)
    assert "12.00 GB at 0.12 GB/s take 96.00 s, a step takes 5.00 s" in slowness(stats, 5.0)
    assert (
        slowness(stats, 97.0)
        == slowness(TakeStats(7, 0, 5, 0.0), 1.0)
        == slowness(TakeStats(7, 0, 0, 0.0, 0, 9), 1.0)
        == ""
    )
