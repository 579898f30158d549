"""The fault-tolerant all-reduce over MPI: the same streams, carried by the relays of three nodes."""

import signal

import pytest
import torch
from networks import Relays
from rings import gather

from ft.systems.hsdp.ring import Ring, RingOptions

OPTIONS = RingOptions(chunk_bytes=65536, chunks=4, streams=2, limit_s=40)


@pytest.fixture
def relays():
    made = Relays(3)
    yield made
    made.close()


def reduce(rings: list[Ring], number: int, dtype: torch.dtype) -> list:
    """The outcomes of an all-reduce in a new quorum; the sum is checked where they are good."""
    gather(rings, number)
    tensors = [torch.full((300_001,), float(me + 1), dtype=dtype) for me in range(len(rings))]
    outcomes = [each.wait() for each in [r.all_reduce(t, 0.5) for r, t in zip(rings, tensors, strict=True)]]
    for outcome, tensor in zip(outcomes, tensors, strict=True):
        if outcome.ok:
            assert torch.equal(tensor, torch.full_like(tensor, len(rings) * (len(rings) + 1) / 4))
    return outcomes


def test_a_ring_over_mpi_loses_a_member_with_its_node_and_goes_on_without(relays):
    rings = [Ring(relays.network(node), "secret", OPTIONS) for node in range(3)]
    try:
        assert all(ring.address.startswith("mpi:") for ring in rings)
        for number, dtype in ((1, torch.float32), (2, torch.bfloat16)):
            assert all(outcome.ok for outcome in reduce(rings, number, dtype))
        waiting = [rings[0].all_reduce(torch.zeros(300_001)), rings[2].all_reduce(torch.zeros(300_001))]
        relays.signal(1, signal.SIGKILL)
        # Relays drop all streams when one of them dies: whom a member blames is a matter of which it hears of first.
        assert not any(each.wait().ok for each in waiting)
        assert all(outcome.ok for outcome in reduce([rings[0], rings[2]], 3, torch.float32))
    finally:
        for ring in rings:
            ring.close()
