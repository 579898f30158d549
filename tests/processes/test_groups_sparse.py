"""Large groups, whose pairs are not all connected: how many are. All else that they do is tested with small ones."""

import pytest
import torch
import torch.distributed as dist
from groups_worker import Worker
from test_groups_tree import sockets

from ft.state.groups.backends import MOST_IN_MESH, connections, neighbours


@pytest.mark.parametrize("size", [2, 3, 33, 34, 64, 4096, 98304])
def test_a_member_has_few_neighbours_and_is_a_neighbour_of_theirs(size):
    for rank in (0, 1, size // 2, size - 1):
        near = neighbours(rank, size)
        assert rank not in near and {(rank + 1) % size, (rank - 1) % size} - {rank} <= set(near)
        assert all(rank in neighbours(other, size) for other in near)
    assert connections(size) == (size - 1 if size <= MOST_IN_MESH else len(neighbours(0, size)))
    assert connections(size) <= max(MOST_IN_MESH - 1, 2 * (size - 1).bit_length())


def sockets_of_a_group(address):
    worker = Worker(address)
    worker.meet("before")
    before = sockets()
    group = dist.new_group(backend="gloo")
    made = sockets() - before
    for _ in range(2):
        x = torch.ones(1000)
        dist.all_reduce(x, group=group)
        assert x[0] == worker.size
        dist.barrier(group)
        dist.broadcast(x, group=group, group_src=5)
        dist.all_gather([torch.ones(3) for _ in range(worker.size)], torch.ones(3), group=group)
    used = sockets() - before
    worker.meet("after")
    return made, used


def test_a_large_group_has_few_sockets_before_and_after_its_operations(ranks, address):
    size, listeners = MOST_IN_MESH + 3, 1
    for made, used in ranks(sockets_of_a_group, size, address, init=False):
        assert made <= used <= connections(size) + listeners < size - 1
