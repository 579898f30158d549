"""Large groups, whose pairs are not all connected: the same answers, releases and rebuilds as in small ones.

The functions of the ranks are those of the tests of small groups; here every group counts as a large one.
"""

import signal
from datetime import timedelta

import groups_worker
import pytest
import test_groups
import torch
import torch.distributed as dist
from groups_worker import Worker
from test_groups import RELEASE_LIMIT_S
from test_groups_tree import sockets

from ft.net.store import StoreServer
from ft.state.groups import registry
from ft.state.groups.backends import MOST_IN_MESH, connections, neighbours


@pytest.fixture
def address():
    """host:port of a store that outlives every rank."""
    server = StoreServer("127.0.0.1", 0, groups_worker.TOKEN)
    yield server.address
    server.close()


@pytest.fixture
def control(address):
    """The test's own view of the store."""
    return groups_worker.connect(address)


def sparsely(name, *args):
    """Run a function of ``test_groups`` with groups of which each counts as large."""
    registry.MOST_IN_MESH = 1
    return getattr(test_groups, name)(*args)


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


def test_every_operation_answers_as_gloo_itself(ranks, address):
    counts = ranks(sparsely, 3, "compare_with_gloo", address, init=False)
    assert all(count >= 37 + 2 * is_there for count, is_there in counts)


def test_close_releases_whatever_is_blocked(ranks, address):
    assert max(ranks(sparsely, 3, "released_from_everything", address, init=False)) < RELEASE_LIMIT_S


def test_close_releases_operations_that_are_half_done(ranks, address):
    for released, destroyed in ranks(sparsely, 2, "released_in_the_middle", address, 7, init=False):
        assert max(released, destroyed) < RELEASE_LIMIT_S


def test_a_killed_neighbour_is_reported_and_its_epoch_ends(ranks, address, control):
    handle = ranks.start(sparsely, 3, "survives_a_killed_neighbour", address, init=False)
    control.wait(["suspects/0"], timedelta(seconds=20))
    control.set("close/0", "rank 1 died")
    outcomes = handle.wait(timeout=180)
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert [outcomes[0].error, outcomes[2].error] == [None, None]


def test_a_new_process_takes_the_dead_ones_place_twice_in_a_row(ranks, address, control):
    old = ranks.start(sparsely, 4, "survivor", address, init=False)
    new = []
    for epoch, dead in ((0, 2), (1, 0)):
        old.wait_for_output(dead, f"epoch {epoch}")
        old.kill(dead)
        control.wait([f"suspects/{epoch}"], timedelta(seconds=20))
        control.set(f"close/{epoch}", f"rank {dead} died")
        new.append(ranks.start(sparsely, 1, "joiner", address, dead, epoch + 1, epoch == 1, init=False))
    outcomes = [*old.wait(timeout=180), *(handle.wait(timeout=180)[0] for handle in new)]
    assert not [outcome.error for outcome in outcomes if outcome.error]
    assert len([outcome for outcome in outcomes if outcome.exitcode == 0]) == 4


def test_close_ends_a_rebuild_in_which_a_member_is_missing(ranks, address):
    assert max(ranks(sparsely, 3, "closed_while_rebuilding", address, init=False)) < RELEASE_LIMIT_S


def test_nothing_leaks_over_twenty_epochs(ranks, address):
    for counts in ranks(sparsely, 2, "many_epochs", address, init=False):
        files, threads = zip(*counts, strict=True)
        assert files[-1] <= files[2] + 2, files
        assert threads[-1] <= threads[2] + 3, threads
