"""Process groups that follow the epochs: same answers as gloo's own, released when closed, rebuilt in place."""

import os
import random
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import groups_worker
import pytest
import torch
import torch.distributed as dist
from groups_worker import Worker

from ft.base.errors import EpochClosed, RecoverableError, UserError
from ft.state.groups import Group, registry
from ft.state.groups import work as group_work
from ft.state.groups.backends import MOST_IN_MESH
from ft.state.groups.local import Local
from ft.state.groups.registry import check_torch
from ft.state.groups.state import EpochState

RELEASE_LIMIT_S = 45.0


def connected(most_in_mesh, function, *args):
    """Call a function with groups of which those with more members than that count as large: few pairs are joined."""
    registry.MOST_IN_MESH = most_in_mesh
    return function(*args)


@pytest.fixture(params=[MOST_IN_MESH, 1], ids=["all pairs", "few neighbours"])
def both(request, ranks):
    """Call, or start, functions of this module on ranks: with small groups, and as if all of them were large."""

    def of(begin):
        return lambda function, size, *args: begin(connected, size, request.param, function, *args, init=False)

    return SimpleNamespace(call=of(ranks), start=of(ranks.start))


# --- every operation --------------------------------------------------------------------------------------------------


def own(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape) * (rank + 1)


def collectives(group, rank: int, size: int, asynchronous: bool) -> dict[str, list[torch.Tensor]]:
    """The result of every collective operation there is."""
    answers: dict[str, list[torch.Tensor]] = {}

    def does(name, outputs, work):
        if asynchronous:
            work.wait()
        answers[name] = [output.clone() for output in outputs]

    how = {"group": group, "async_op": asynchronous}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        x = own(rank, 3, 2)
        does(f"all_reduce {op}", [x], dist.all_reduce(x, op, **how))
    xs = [own(rank, 3), own(rank, 2)]
    does("all_reduce_coalesced", xs, dist.all_reduce_coalesced(xs, **how))
    x = own(rank, 4)
    does("broadcast", [x], dist.broadcast(x, group_src=size - 1, **how))
    x = own(rank, 4)
    work = dist.reduce(x, group_dst=1, **how)
    does("reduce", [x] if rank == 1 else [], work)
    xs = [torch.zeros(3) for _ in range(size)]
    does("all_gather", xs, dist.all_gather(xs, own(rank, 3), **how))
    x = torch.zeros(3 * size)
    does("all_gather_into_tensor", [x], dist.all_gather_into_tensor(x, own(rank, 3), **how))
    x = torch.zeros(3)
    does("reduce_scatter", [x], dist.reduce_scatter(x, [own(rank, 3) + i for i in range(size)], **how))
    x = torch.zeros(2)
    does("reduce_scatter_tensor", [x], dist.reduce_scatter_tensor(x, own(rank, 2 * size), **how))
    xs = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
    does("gather", xs or [], dist.gather(own(rank, 2), xs, group_dst=0, **how))
    x = torch.zeros(2)
    parts = [own(i, 2) for i in range(size)] if rank == 1 else None
    does("scatter", [x], dist.scatter(x, parts, group_src=1, **how))
    xs = [torch.zeros(2) for _ in range(size)]
    try:
        work = dist.all_to_all(xs, [own(rank, 2) + i for i in range(size)], **how)
    except RuntimeError as missing:  # gloo of older releases of torch has no such operation
        assert "does not support alltoall" in str(missing)
    else:
        does("all_to_all", xs, work)
    x = torch.zeros(2 * size)
    does("all_to_all_single", [x], dist.all_to_all_single(x, own(rank, 2 * size), **how))
    x = torch.zeros(size * (rank + 1))
    counts = {"output_split_sizes": [rank + 1] * size, "input_split_sizes": [i + 1 for i in range(size)]}
    does("all_to_all uneven", [x], dist.all_to_all_single(x, own(rank, sum(range(size + 1))), **counts, **how))
    does("barrier", [], dist.barrier(group=group, async_op=asynchronous))
    return answers


def coalesced(group, rank: int, size: int) -> dict[str, list[torch.Tensor]]:
    """As megatron-core's gradient buffers do it."""
    manager = dist.distributed_c10d._coalescing_manager
    sums = [own(rank, 3), own(rank, 5)]
    with manager(group, async_ops=True) as work:
        for x in sums:
            dist.all_reduce(x, group=group)
    work.wait()
    gathered, scattered = [torch.zeros(2 * size), torch.zeros(3 * size)], [torch.zeros(2), torch.zeros(1)]
    with manager(group, async_ops=False):
        for output, count in zip(gathered, (2, 3), strict=True):
            dist.all_gather_into_tensor(output, own(rank, count), group=group)
    with manager(group, async_ops=True) as work:
        for output, count in zip(scattered, (2, 1), strict=True):
            dist.reduce_scatter_tensor(output, own(rank, count * size), group=group)
    work.wait()
    return {"coalesced all_reduce": sums, "coalesced all_gather": gathered, "coalesced reduce_scatter": scattered}


def messages(group, rank: int, size: int) -> dict[str, list[torch.Tensor]]:
    """Round the ring, in every way there is; and from whoever sends."""
    before, after = (rank - 1) % size, (rank + 1) % size
    answers = {}
    x = torch.zeros(3)
    works = [dist.isend(own(rank, 3), group=group, group_dst=after), dist.irecv(x, group=group, group_src=before)]
    for work in works:
        work.wait()
    answers["isend, irecv"] = [x.clone()]
    ops = [
        dist.P2POp(dist.isend, own(rank, 3), group=group, group_peer=before),
        dist.P2POp(dist.irecv, x, group=group, group_peer=after),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    answers["batch"] = [x.clone()]
    if rank == 0:
        total = torch.zeros(3)
        sources = set()
        for _ in range(size - 1):
            sources.add(dist.recv(x, group=group, tag=5))
            total += x
        assert sources == set(range(1, size))
        answers["recv from anyone"] = [total]
    else:
        dist.send(own(rank, 3), group=group, group_dst=0, tag=5)
    named: list = [None] * size
    dist.all_gather_object(named, {"rank": rank}, group=group)
    assert named == [{"rank": i} for i in range(size)]
    box = [rank]
    dist.broadcast_object_list(box, group_src=1, group=group)
    assert box == [1]
    return answers


def all_answers(group) -> dict[str, list[torch.Tensor]]:
    rank, size = group.rank(), group.size()
    later = {f"async {name}": xs for name, xs in collectives(group, rank, size, True).items()}
    rest = {**coalesced(group, rank, size), **messages(group, rank, size)}
    return {**collectives(group, rank, size, False), **later, **rest}


def compare_with_gloo(address):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore("plain", groups_worker.connect(address))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    expected = all_answers(dist.group.WORLD)
    dist.destroy_process_group()
    worker = Worker(address)
    part = dist.new_group(list(range(size)), backend="gloo", timeout=timedelta(seconds=50))
    assert isinstance(dist.group.WORLD, Group) and isinstance(part, Group)
    for group in (dist.group.WORLD, part):
        got = all_answers(group)
        assert got.keys() == expected.keys()
        for name, tensors in expected.items():
            assert len(tensors) == len(got[name]), name
            assert all(torch.equal(a, b) for a, b in zip(tensors, got[name], strict=True)), name
    assert dist.get_backend() == dist.get_backend(part) == "gloo"
    assert dist.get_process_group_ranks(part) == list(range(size))
    assert (part.rank(), part.size(), dist.get_rank(part)) == (rank, size, rank)
    assert part.group_name and part.group_name != dist.group.WORLD.group_name
    dist.monitored_barrier(part)
    assert not any(report.in_flight for report in worker.groups.reports())
    assert all(report.used and report.collectives for report in worker.groups.reports())
    dist.destroy_process_group(part)
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    return len(expected), "all_to_all" in expected


def test_every_operation_answers_as_gloo_itself(both, address):
    counts = both.call(compare_with_gloo, 3, address)
    assert all(count >= 37 + 2 * is_there for count, is_there in counts)


@pytest.mark.on_ranks(2, init=False)
def test_a_member_of_one_has_no_sockets_and_answers_itself(address):
    worker = Worker(address)
    worker.meet("before")
    before = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    mine = [dist.new_group([rank]) for rank in (0, 1)][worker.rank]
    assert (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))) == before
    x = torch.tensor([3.0])
    dist.all_reduce(x, group=mine)
    out = torch.zeros(2)
    dist.all_gather_into_tensor(out, torch.tensor([1.0, 2.0]), group=mine)
    assert x.item() == 3 and out.tolist() == [1, 2]
    worker.meet("close")
    if worker.rank == 0:
        worker.close_all()
    worker.wait_closed()
    with pytest.raises(EpochClosed):
        dist.all_reduce(x, group=mine)
    worker.renew()
    dist.all_reduce(x, group=mine)


@pytest.mark.on_ranks(2, init=False)
def test_a_mistake_of_the_caller_is_no_failure_of_the_group(address):
    worker = Worker(address)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        dist.group.WORLD.allreduce([])
    assert not isinstance(caught.value, RecoverableError)
    assert worker.failures == []
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2


@pytest.mark.on_ranks(2, init=False)
def test_a_limit_of_zero_is_none(address):
    """Rank 0 waits with a limit of zero for operations that rank 1 begins many slices of a wait later."""
    worker = Worker(address)
    x, out = torch.ones(4), torch.zeros(2)
    functional = dist._functional_collectives
    operations = {
        "all_reduce": lambda: dist.all_reduce(x, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, torch.ones(4), async_op=True),
        "message": lambda: dist.irecv(x, src=1) if worker.rank == 0 else dist.isend(x, dst=0),
    }
    for name, begin in operations.items():
        _let_rank_0_wait(worker, name)
        assert begin().wait(timedelta(0)), name
    _let_rank_0_wait(worker, "from C++")
    assert functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).tolist() == [2]
    assert worker.failures == []


def _let_rank_0_wait(worker, name):
    worker.meet(name)
    if worker.rank == 1:
        time.sleep(10 * group_work._SLICE.total_seconds())


# --- interruption -----------------------------------------------------------------------------------------------------


def neighbour(rank: int) -> int:
    """``rank``, for rank 2 itself another one."""
    return rank if dist.get_rank() != rank else 0


def wait_for_rank_2():
    dist.recv(torch.ones(4), src=neighbour(2))


def leaves_a_block() -> None:
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(torch.ones(4))
        wait_for_rank_2()


BLOCKING = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "large all_reduce": lambda: dist.all_reduce(torch.ones(3_000_000)),
    "async all_reduce": lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
    "broadcast": lambda: dist.broadcast(torch.ones(4), src=2),
    "reduce": lambda: dist.reduce(torch.ones(4), dst=0) if dist.get_rank() == 0 else wait_for_rank_2(),
    "all_gather": lambda: dist.all_gather([torch.ones(4)] * 3, torch.ones(4)),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(12), torch.ones(4)),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(12)),
    "gather": lambda: dist.gather(torch.ones(4), [torch.ones(4)] * 3) if dist.get_rank() == 0 else wait_for_rank_2(),
    "scatter": lambda: dist.scatter(torch.ones(4), [torch.ones(4)] * 3 if dist.get_rank() == 2 else None, src=2),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(12), torch.ones(12)),
    "barrier": dist.barrier,
    "large send": lambda: dist.send(torch.ones(20_000_000), dst=neighbour(2)),
    "recv": wait_for_rank_2,
    "recv from anyone": lambda: dist.recv(torch.ones(4)),
    "several irecv": lambda: [w.wait() for w in [dist.irecv(torch.ones(4), src=neighbour(2)) for _ in range(3)]],
    "coalesced": lambda: coalesced(dist.group.WORLD, dist.get_rank(), 3),
    "a coalesced block": leaves_a_block,
}


def released_from_everything(address):
    """Ranks 0 and 1 block in one operation after the other, which rank 2 does not take part in."""
    worker = Worker(address)
    slowest = 0.0
    for name, operation in BLOCKING.items():
        worker.meet(name)
        if worker.rank == 2:
            time.sleep(0.03)
            worker.close_all(name)
            worker.wait_closed()
        else:
            with pytest.raises(EpochClosed, match=name):
                operation()
            slowest = max(slowest, time.monotonic() - worker.closed_at)
        with pytest.raises(EpochClosed):
            operation()
        worker.renew()
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [3, 3], name
    return slowest


def test_close_releases_whatever_is_blocked(both, address):
    assert max(both.call(released_from_everything, 3, address)) < RELEASE_LIMIT_S


def released_in_the_middle(address, seed):
    """Large and small operations follow each other without a pause; the end of the epoch falls anywhere."""
    worker = Worker(address)
    choice = random.Random(seed)
    big, small = torch.ones(4_000_000), torch.ones(8)
    other = 1 - worker.rank

    def all_reduce(x):
        dist.all_reduce(x)

    def exchange(x):
        works = [dist.isend(x, dst=other), dist.irecv(torch.empty_like(x), src=other)]
        for work in works:
            work.wait()

    def one_way(x):
        if worker.rank == 0:
            dist.send(x, dst=1)
        else:
            dist.recv(torch.empty_like(x), src=0)

    slowest = 0.0
    for epoch in range(24):
        operation, x = choice.choice([all_reduce, exchange, one_way]), choice.choice([big, small])
        delay = choice.uniform(0, 0.03)
        worker.meet(f"epoch {epoch}")
        if worker.rank == 0:
            threading.Timer(delay, worker.close_all).start()
        with pytest.raises(EpochClosed):
            while True:
                operation(x)
        worker.wait_closed()
        slowest = max(slowest, time.monotonic() - worker.closed_at)
        worker.renew()
        y = torch.ones(3)
        dist.all_reduce(y)
        assert y.tolist() == [2, 2, 2]
    began = time.monotonic()
    dist.destroy_process_group()
    return slowest, time.monotonic() - began


def test_close_releases_operations_that_are_half_done(both, address, seed):
    for released, destroyed in both.call(released_in_the_middle, 2, address, seed):
        assert max(released, destroyed) < RELEASE_LIMIT_S


def survives_a_killed_neighbour(address):
    worker = Worker(address)
    worker.meet("start")
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(EpochClosed, match="rank 1 died"):
        dist.all_reduce(torch.ones(4))
    assert [report.in_flight for report in worker.groups.reports()] == [True]
    began = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - began < RELEASE_LIMIT_S
    return worker.failures


def test_a_killed_neighbour_is_reported_and_its_epoch_ends(both, address, control):
    handle = both.start(survives_a_killed_neighbour, 3, address)
    control.wait(["suspects/0"])
    control.set("close/0", "rank 1 died")
    outcomes = handle.wait(timeout=180)
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert [outcomes[0].error, outcomes[2].error] == [None, None]
    failures = outcomes[0].value + outcomes[2].value
    assert failures and all("Connection" in text or "closed" in text for _, text in failures)


@pytest.mark.on_ranks(2, init=False)
def test_no_thread_is_inside_torch_once_the_groups_are_destroyed(address):
    worker = Worker(address)
    x = torch.ones(1)
    if worker.rank == 0:
        done = dist.all_reduce(x, async_op=True)
        done.get_future().then(lambda _: time.sleep(0.5))  # in gloo's thread, which the end of the connection waits for
        worker.meet("attached")
    else:
        worker.meet("attached")
        dist.all_reduce(x)
    worker.meet("reduced")
    dist.destroy_process_group()
    left = [thread.name for thread in threading.enumerate() if thread.name in ("ft-drop", "ft-groups")]
    assert not left, left


def fails_without_a_verdict(address):
    worker = Worker(address, patience=0.1)
    worker.meet("start")
    if worker.rank == 1:
        os._exit(0)
    with pytest.raises(RecoverableError, match=r"logical ranks \[0, 1\] failed") as caught:
        dist.recv(torch.ones(1), src=1)
    return isinstance(caught.value, EpochClosed), len(worker.failures)


def test_a_failure_that_nobody_closes_the_epoch_for_names_the_group(ranks, address):
    outcomes = ranks.start(fails_without_a_verdict, 2, address, init=False).wait(timeout=180)
    assert outcomes[0].value == (False, 1)


def keeps_what_was_idle(address):
    """The epoch ends while ranks 0 and 1 are in an operation of one group; the others need nothing."""
    worker = Worker(address)
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    idle, never = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])
    pair = pairs[worker.rank // 2]
    dist.all_reduce(torch.ones(1), group=idle)
    dist.all_reduce(torch.ones(1), group=pair)
    connections = idle.connections(), never.connections()
    worker.meet("close")
    if worker.rank == 0:
        work, _ = dist.all_reduce(torch.ones(1), group=pair, async_op=True), worker.close_all()
        with pytest.raises(EpochClosed):
            work.wait()
    plan = worker.renew()
    assert plan.rebuild == [pairs[0].group_name] if worker.rank < 2 else True
    assert (idle.connections(), never.connections()) == connections
    x = torch.ones(1)
    for group in (idle, never, dist.group.WORLD):
        dist.all_reduce(x, group=group)
    assert x.item() == 4**3
    dist.all_reduce(x, group=pair)
    assert x.item() == 2 * 4**3
    return [worker.groups.topology(), len(plan.keep)]


def test_groups_that_were_idle_are_kept(ranks, address):
    values = ranks(keeps_what_was_idle, 4, address, init=False)
    assert len({value[0] for value in values}) == 1
    assert values[0][1] == 4


@pytest.mark.on_ranks(2, init=False)
def test_a_message_that_was_never_received_is_not_taken_for_a_later_one(address):
    worker = Worker(address)
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
    if worker.rank == 0:
        left_over = dist.isend(torch.full((1,), 13.0), dst=1, group=group)
    worker.meet("sent")
    if worker.rank == 0:
        worker.close_all()
    plan = worker.renew()
    assert plan.reasons[group.group_name] == "in an operation: rank 0"
    x = torch.zeros(1)
    if worker.rank == 0:
        with pytest.raises(EpochClosed):
            left_over.wait()
        dist.send(torch.full((1,), 7.0), dst=1, group=group)
    else:
        dist.recv(x, src=0, group=group)
        assert x.item() == 7


# --- replacement ------------------------------------------------------------------------------------------------------


def layout():
    """Groups as a run has them: all, pairs in two directions, one that nobody uses, single ones."""
    made = [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
    unused = dist.new_group([0, 1, 2, 3])
    single = [dist.new_group([rank]) for rank in range(4)]
    rank = dist.get_rank()
    return made[rank // 2], made[2 + rank % 2], unused, single[rank]


def compute(groups) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x, group=groups[0])
    dist.all_reduce(x, group=groups[1])
    y = torch.zeros(3)
    works = [dist.isend(x * (rank + 1), dst=(rank + 1) % size), dist.irecv(y, src=(rank - 1) % size)]
    for work in works:
        work.wait()
    dist.all_reduce(y)
    return y.tolist()


EXPECTED = [100.0] * 3


def survivor(address):
    worker = Worker(address)
    groups = layout()
    ids = [id(group) for group in (*groups, dist.group.WORLD)]
    assert compute(groups) == EXPECTED
    for dead in (2, 0):
        worker.meet(f"before {worker.epoch}")
        print(f"epoch {worker.epoch}", flush=True)
        if worker.rank == dead:
            time.sleep(60)
        with pytest.raises(EpochClosed):
            while True:
                compute(groups)
        plan = worker.renew(replaced=[dead])
        assert "0" in plan.rebuild and groups[3].group_name in plan.keep
        assert compute(groups) == EXPECTED
        assert all(r.collectives <= 3 for r in worker.groups.reports() if r.name in plan.rebuild)
    x = torch.ones(1)
    dist.all_reduce(x, group=groups[2])
    assert ids == [id(group) for group in (*groups, dist.group.WORLD)]
    return x.item(), worker.groups.topology()


def joiner(address, rank, epoch, last):
    """Takes ``rank``'s place in ``epoch``: assembles alone, then all are connected with it."""
    worker = Worker(address, rank=rank, size=4, epoch=epoch, alone=True)
    groups = layout()
    dist.barrier()
    counts = torch.tensor([5])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    assert counts.item() == 5 and not any(report.used for report in worker.groups.reports())
    worker.epoch = epoch - 1
    worker.enter(worker.plan([rank]), epoch)
    assert compute(groups) == EXPECTED
    if not last:
        worker.meet(f"before {epoch}")
        with pytest.raises(EpochClosed):
            while True:
                compute(groups)
        worker.renew(replaced=[0])
        assert compute(groups) == EXPECTED
    x = torch.ones(1)
    dist.all_reduce(x, group=groups[2])
    return x.item(), worker.groups.topology()


def test_a_new_process_takes_the_dead_ones_place_twice_in_a_row(both, address, control):
    old = both.start(survivor, 4, address)
    new = []
    for epoch, dead in ((0, 2), (1, 0)):
        old.wait_for_output(dead, f"epoch {epoch}")
        old.kill(dead)
        control.wait([f"suspects/{epoch}"])
        control.set(f"close/{epoch}", f"rank {dead} died")
        new.append(both.start(joiner, 1, address, dead, epoch + 1, epoch == 1))
    outcomes = [*old.wait(timeout=180), *(handle.wait(timeout=180)[0] for handle in new)]
    errors = [outcome.error for outcome in outcomes if outcome.error]
    assert not errors, errors[0]
    values = [outcome.value for outcome in outcomes if outcome.exitcode == 0]
    assert len(values) == 4
    assert {value[0] for value in values} == {4.0}
    assert len({value[1] for value in values}) == 1


def closed_while_rebuilding(address):
    """Rank 2 does not come to the rebuild; the epoch that was to be opened is closed, and all go on in the next."""
    worker = Worker(address)
    dist.barrier()
    for _ in range(2):
        worker.meet(f"close {worker.epoch}")
        if worker.rank == 0:
            worker.close_all()
        worker.leave()
        everything = worker.plan(replaced=[2])
        if worker.rank == 2:
            worker.epoch += 1
            time.sleep(0.1)
            worker.close_all("rank 2 did not come")
        else:
            with pytest.raises(EpochClosed, match="rank 2 did not come"):
                worker.enter(everything)
        worker.wait_closed()
        late = time.monotonic() - worker.closed_at
        with pytest.raises(EpochClosed):
            worker.groups.reopen(worker.epoch)
        with pytest.raises(EpochClosed):
            worker.groups.rebuild(everything.rebuild, [], "never", worker.epoch)
        assert worker.renew().rebuild == ["0"]
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 3
    return late


def test_close_ends_a_rebuild_in_which_a_member_is_missing(both, address):
    assert max(both.call(closed_while_rebuilding, 3, address)) < RELEASE_LIMIT_S


def opened_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def many_epochs(address):
    worker = Worker(address)
    groups = [dist.new_group([0, 1]) for _ in range(5)]
    counts = []
    for epoch in range(20):
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
        worker.meet(f"epoch {epoch}")
        if worker.rank == 0:
            worker.close_all()
            with pytest.raises(EpochClosed):
                dist.recv(torch.ones(1), src=1, group=groups[epoch % 5])
        worker.renew()
        worker.meet(f"renewed {epoch}")
        counts.append(opened_files())
    return counts


def test_nothing_leaks_over_twenty_epochs(both, address):
    for counts in both.call(many_epochs, 2, address):
        files, threads = zip(*counts, strict=True)
        # Threads of the past epoch may still be on their way out.
        assert min(files[-5:]) <= files[2] + 2, files
        assert min(threads[-5:]) <= threads[2] + 3, threads


# --- alone, and other small things ------------------------------------------------------------------------------------


def test_alone_the_others_are_taken_to_say_the_same():
    local, mine = Local(1, 3), torch.tensor([1.0, 2.0])
    local.allreduce([mine], dist.AllreduceOptions()).wait()
    assert mine.tolist() == [1, 2]
    outs = [torch.zeros(2) for _ in range(3)]
    local.allgather([outs], [mine])
    assert all(torch.equal(out, mine) for out in outs)
    whole = torch.zeros(6)
    whole[2:4] = mine
    local.all_gather_single(whole, whole[2:4])
    assert whole.tolist() == [1, 2] * 3
    part = torch.zeros(2)
    local.reduce_scatter_single(part, torch.arange(6.0))
    assert part.tolist() == [2, 3]
    swapped = torch.zeros(3)
    local.all_to_all_single(swapped, torch.tensor([4.0, 5.0, 6.0]), [], [])
    assert swapped.tolist() == [5, 5, 5]
    uneven = torch.zeros(4)
    local.all_to_all_single(uneven, torch.tensor([4.0, 5.0, 6.0]), [1, 2, 1], [1, 1, 1])
    assert uneven.tolist() == [5, 0, 0, 5]
    received = torch.tensor([9.0])
    local.recv([received], 0, 0).wait()
    local.scatter([received], [], dist.ScatterOptions())
    assert received.item() == 9
    assert local.barrier().is_completed()


@pytest.mark.parametrize("without", ["backend_options", None])
def test_a_torch_that_creates_groups_in_another_way_is_refused(monkeypatch, without):
    def helper(global_ranks_in_group, backend, group_name, timeout, group_desc):
        """As torch's, without the parameter for a backend's options."""

    if without is None:
        monkeypatch.delattr(dist.distributed_c10d, "_new_process_group_helper")
    else:
        monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", helper)
    with pytest.raises(UserError, match=without or "_new_process_group_helper") as refused:
        check_torch()
    assert "torch 2.8" in refused.value.fix


def groups_beside_nccl(address):
    """``alone``, so that nothing is connected, and no GPU is needed."""
    worker = Worker(address, alone=True, device_backend="nccl")
    made = [dist.new_group([0, 1]), dist.new_group([0, 1], backend="gloo"), dist.new_group([1], backend="gloo")]
    found = [(list(group.connectors), dist.get_backend(group)) for group in made if isinstance(group, Group)]
    assert found[:2] == [(["cuda", "cpu"], "nccl"), (["cpu"], "gloo")]
    assert len(found) == 2 + (worker.rank == 1)
    return worker.groups.topology()


def test_a_gloo_group_stays_one_beside_nccl_and_all_ranks_know_the_same_groups(ranks, address):
    assert len(set(ranks(groups_beside_nccl, 2, address, init=False))) == 1


# --- megatron-core ----------------------------------------------------------------------------------------------------


def test_what_other_threads_wait_for_does_not_hide_that_the_training_thread_waits():
    state = EpochState(0, False, lambda group, error: None)
    state.begins_to_wait("dp")
    other = threading.Thread(target=lambda: (state.begins_to_wait("agreement"), state.has_waited()))
    other.start()
    other.join()
    assert state.waiting[0] == "dp"
    state.has_waited()
    assert state.waiting is None


# --- the oldest unfinished operation ----------------------------------------------------------------------------------


@pytest.mark.on_ranks(2, init=False)
def test_the_oldest_unfinished_operation_is_known_without_a_wait(address):
    """Rank 1 starts its part of each operation late. Rank 0 looks at the ages from another thread meanwhile."""
    worker = Worker(address)
    part = dist.new_group([0, 1], group_desc="part")
    ages = worker.groups.oldest_unfinished
    dist.barrier()
    assert ages() is None
    worker.meet("async")
    if worker.rank == 0:
        work = dist.all_reduce(torch.ones(4), group=part, async_op=True)
        time.sleep(0.3)
        name, operation, age = ages()
        assert (name, operation) == (part.group_name, "allreduce") and 0.25 < age < 60
        worker.meet("now")
        limit = time.monotonic() + 10
        while ages() is not None:  # ended, although nobody has waited for it
            assert time.monotonic() < limit
            time.sleep(0.01)
        work.wait()
    else:
        worker.meet("now")
        dist.all_reduce(torch.ones(4), group=part)
    worker.meet("other thread")
    if worker.rank == 0:
        # As a data-loading or checkpointing thread does: its waits show nothing about training.
        aside = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1), group=part))
        aside.start()
        time.sleep(0.2)
        assert ages() is None
    worker.meet("its turn")
    if worker.rank == 1:
        dist.all_reduce(torch.ones(1), group=part)
    else:
        aside.join()
    worker.meet("hang")
    if worker.rank == 0:
        work = dist.all_reduce(torch.ones(1), group=part, async_op=True)
        assert ages() is not None
        worker.close_all()
    worker.wait_closed()
    assert ages() is None
