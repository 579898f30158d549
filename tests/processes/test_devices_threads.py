"""Every thread selects its device before it calls CUDA: otherwise each process has a second context, on GPU 0."""

import threading
import time

import pytest
import torch
from cuda_model import Cuda
from fetch_sources import LINEAGE, STEP, TOKEN
from networks import Networks
from snapshot_crew import Crew, set_to

from ft.job.parts import Source
from ft.state import device, fetch
from ft.state.groups.device import DEVICE
from ft.state.groups.group import Group
from ft.state.groups.registry import Groups
from ft.state.groups.state import EpochState
from ft.systems.hsdp.ring import Ring, RingOptions


@pytest.fixture
def cuda():
    with Cuda(0, is_eager=True) as model:
        yield model
        assert not model.foreign, model.foreign


def test_the_model_sees_a_thread_that_has_not_selected_its_device():
    with Cuda(0, is_eager=True) as cuda:
        thread = threading.Thread(target=torch.cuda.Event, name="careless")
        thread.start()
        thread.join()
        assert cuda.foreign == ["careless: Event"]


@pytest.mark.parametrize("size", [0, 5, 5000])
def test_the_rings_thread(cuda, size):
    rings = [Ring("127.0.0.1", "secret", RingOptions(4096, 2, limit_s=30)) for _ in range(3)]
    try:
        for me, ring in enumerate(rings):
            ring.reconfigure(1, [each.address for each in rings], me)
        tensors = [cuda.tensor(torch.full((size,), float(2**me))) for me in range(3)]
        pending = [ring.all_reduce(tensor, 0.5) for ring, tensor in zip(rings, tensors, strict=True)]
        assert all(each.wait().ok for each in pending)
        assert all((cuda.values(tensor) == 3.5).all() for tensor in tensors)
        rings[0].reconfigure(2, [rings[0].address], 0)
        assert rings[0].all_reduce(tensors[0], 2.0).wait().ok
        assert (cuda.values(tensors[0]) == 7).all()
    finally:
        for ring in rings:
            ring.close()


def test_the_threads_of_snapshots_which_are_pinned(cuda):
    crew = Crew(Networks(), 2)
    try:
        for live in crew.live:
            live.owned = {name: cuda.tensor(tensor) for name, tensor in live.owned.items()}
            live.replicated = {name: cuda.tensor(tensor) for name, tensor in live.replicated.items()}
        for step in (1, 2, 3):
            crew.step(step)
        assert not cuda.blocked["copy to memory that is not pinned"]
        snaps, live = crew.snaps[0], crew.live[0]
        set_to(live, 9)
        assert snaps.restore(live, 3, Source(owned=0, replicated=0), epoch=1)["owned"] == "own"
        assert all((cuda.values(tensor) == 3).all() for tensor in live.owned.values())
    finally:
        crew.close()


def test_the_threads_of_a_fetch(cuda):
    values = {"a": torch.arange(9.0), "b": torch.arange(300_000.0)}
    live = {name: cuda.tensor(tensor) for name, tensor in values.items()}
    into = {name: cuda.tensor(torch.zeros_like(tensor)) for name, tensor in values.items()}
    server = fetch.StateServer("127.0.0.1", TOKEN)
    try:
        server.offer(STEP, LINEAGE, live, {})
        fetch.fetch([server.address], TOKEN, STEP, LINEAGE, into, 30.0)
    finally:
        server.close()
    assert all(torch.equal(cuda.values(into[name]), values[name]) for name in values)


def test_the_thread_that_closes_an_epoch(cuda, monkeypatch):
    monkeypatch.setattr(device, "_of_process", None)
    device.select(1)
    state = EpochState(0, False, None)
    group = Group("all", "", [0, 1], 0, state, None)
    DEVICE.mark(group._name, "broadcast", time.monotonic())
    groups = Groups.__new__(Groups)
    groups._state, groups._lock, groups._builder, groups._groups = state, threading.Lock(), None, {"all": group}
    closer = threading.Thread(target=groups.close, args=(0, "a worker was lost"))
    closer.start()
    closer.join()
    assert state.closed == (0, "a worker was lost")
