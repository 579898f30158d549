"""The memory and the device that a standby keeps ready: what is touched and used, and when it is refused."""

import json
import os
import time
import weakref
from dataclasses import replace

import pytest
import torch
from control_world import World, only
from pythons import python

from ft.base.errors import DeviceUnusable, UserError
from ft.job import messages as m
from ft.state.layout import Table
from ft.state.snapshot.buffers import PingPong, Slot, Spare, Status
from ft.worker import warm_device
from ft.worker.session import ReadyMemory
from ft.worker.warm_device import WarmDevice

MIB = 1 << 20
TABLES = {"owned": Table.of({"a": torch.zeros(3 * MIB)}), "replicated": Table.of({"b": torch.zeros(MIB)})}
HEAP, SNAPSHOT = 200 * MIB, 40 * MIB

FAULTS = """
import json, resource, sys
import torch
from ft.job.messages import Reserve
from ft.worker.session import ReadyMemory, private_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def build():
    before = faults()
    made = [torch.zeros(12 << 20) for _ in range(4)]  # 48 MiB each
    return faults() - before, made

memory, found = ReadyMemory(lambda: 1 << 40), {}
if sys.argv[1] != "cold":
    before = private_memory()
    memory.want(Reserve(200 << 20, 0))
    pieces = 0
    while memory.is_wanted and not (sys.argv[1] == "interrupted" and pieces == 6):
        memory.touch()
        pieces += 1
    found["touched"] = private_memory() - before
    memory.take()
found["faults"], made = build()
memory.end()
del made
found["later"] = build()[0]
found["kept"] = private_memory()
print(json.dumps(found))
"""


def built(how: str) -> dict:
    done = python("-c", FAULTS, how, limit_s=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_built_afterwards_touches_no_new_pages():
    cold, warm, part = built("cold"), built("warm"), built("interrupted")
    pages = 192 * MIB // os.sysconf("SC_PAGE_SIZE")
    assert cold["faults"] > 0.8 * pages, cold
    assert warm["touched"] > 0.98 * HEAP and warm["faults"] < 0.02 * pages, warm
    # The allocator works as usual again. Where memory is free, the kernel may give it four pages at a time.
    assert warm["later"] > 0.2 * pages, warm
    assert part["touched"] < HEAP and part["faults"] < 0.6 * pages, part


def touched(memory: ReadyMemory) -> Spare:
    """Touch all that is wanted; return what a snapshot may have."""
    while memory.is_wanted:
        memory.touch()
    return memory.take()


def test_touching_ends_when_others_have_taken_the_memory():
    left = [8 * SNAPSHOT, 8 * SNAPSHOT, 8 * SNAPSHOT, MIB]
    memory = ReadyMemory(lambda: left.pop(0))
    memory.want(m.Reserve(0, SNAPSHOT))
    spare = touched(memory)
    assert not left and spare.touched == 32 * MIB < spare.nbytes


def test_a_second_order_and_one_of_nothing_change_nothing():
    memory = ReadyMemory(lambda: 1 << 40)
    assert memory.want(m.Reserve(0, 0)) == "" and not memory.is_wanted and memory.take() is None
    assert memory.want(m.Reserve(0, SNAPSHOT))
    assert memory.want(m.Reserve(0, 2 * SNAPSHOT)) == ""
    spare = touched(memory)
    assert spare.touched == spare.nbytes < 2 * SNAPSHOT and memory.take() is None


def fill(slot: Slot) -> None:
    for number, part in enumerate(slot.parts.values()):
        for tensor in part.tensors():
            tensor.fill_(number + 1)
        for index in range(len(part.checksums)):
            part.seal(index)


@pytest.mark.parametrize("nbytes", [16 * MIB, 8 * MIB])
def test_a_snapshot_is_received_into_the_memory_if_it_is_large_enough_and_can_be_inherited(nbytes):
    own = PingPong()
    spare = own.spare = Spare(nbytes)
    while spare.touched < spare.nbytes:
        spare.touch(MIB)
    slot = own.begin(5, 0, TABLES)
    assert own.spare is None and (slot.file.spare is spare) is (nbytes == 16 * MIB)
    fill(slot)
    slot.set_meta(b"meta")
    own.commit(slot)
    other = own.begin(6, 0, TABLES)
    assert other is not slot and other.file.spare is None, "it serves one slot"
    found = Slot.inherited(os.dup(slot.file.fd))
    assert found.status is Status.COMPLETE and found.step == 5 and found.damage() is None
    assert [float(part.tensors()[0][-1]) for part in found.parts.values()] == [1.0, 2.0]


def test_the_memory_is_freed_with_the_slots():
    own, spare = PingPong(), Spare(16 * MIB)
    kept = weakref.ref(spare)
    own.spare = spare
    del spare
    own.close()
    assert kept() is None


def test_the_ranks_whose_models_are_as_they_were_are_named_in_the_repair():
    world = World(world_size=4).run()
    world.kill(1)
    live = {rank: replace(world.holdings(rank), live=5) for rank in (0, 2)}
    made = world.release(holdings=live) + world.arrive()
    assert only(made, m.Repair).live == [0, 2]


def test_a_piece_takes_little_time():
    memory = ReadyMemory(lambda: 1 << 40)
    memory.want(m.Reserve(0, SNAPSHOT))
    took = []
    while memory.is_wanted:
        began = time.thread_time()
        memory.touch()
        took.append(time.thread_time() - began)
    assert len(took) > 1 and min(took) < 0.5, took


def prepared(device: WarmDevice) -> list[str]:
    said = []
    while device.is_wanted:
        said.append(device.go_on())
    return [text for text in said if text]


def test_a_device_is_made_ready_piece_by_piece():
    chosen: list[int] = []
    device = WarmDevice(chosen.append)
    device.want(None)
    assert not device.is_wanted
    for index in (2, 5):
        device.want(index)
    (said,) = prepared(device)
    assert chosen == [2] and said.startswith("device 2 is ready: context ") and "layer (bfloat16)" in said


def test_without_a_way_to_select_a_device_none_is_made_ready():
    device = WarmDevice()
    device.want(0)
    assert not device.is_wanted


def test_a_device_that_cannot_be_selected_or_computes_wrongly_is_unusable(monkeypatch):
    def missing(index: int) -> None:
        raise UserError("local rank 2 has no GPU: this node has 2", "give fewer workers")

    monkeypatch.setattr(warm_device, "_multiply", lambda device: missing(2))
    for select in (missing, lambda index: None):
        device = WarmDevice(select)
        device.want(2)
        with pytest.raises(DeviceUnusable, match="local rank 2 has no GPU"):
            prepared(device)


def test_a_kernel_that_is_missing_on_a_sound_device_ends_the_preparation(monkeypatch):
    def no_kernel(device, dtype):
        raise TypeError("no kernel for this GPU")

    monkeypatch.setattr(warm_device, "_train_layer", no_kernel)
    device = WarmDevice(lambda index: None)
    device.want(2)
    assert prepared(device) == ["device 2 is prepared in part: no kernel for this GPU"]
