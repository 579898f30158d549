"""Checks of process groups: made, aborted, made again; messages that meet; released from a killed rank, also while
groups are made; hung groups aborted together.

The check ``ring`` is that of the all-reduce between replicas (FT-HSDP, section 4.2): the same bits everywhere, and
those of the CPU.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ft.base import bounded_json
from ft.base.errors import EpochClosed, FtError
from ft.job.control.timeouts import Timeouts
from ft.lab.selftest.ranks import TOKEN, CheckRank, Crew, TestRank, devices
from ft.lab.selftest.table import Context, Failed, Measured
from ft.show.text import seconds
from ft.state.groups.backends import NcclConnector, interrupt_together, wrap
from ft.systems.hsdp.ring import Ring, RingOptions
from megatron import patches

_TIMEOUT_S = 300.0
"""Timeout of the groups in seconds: longer than a check, so that nothing here ends by it."""
_RELEASE_S = 10.0
"""Seconds within which ranks have to be released."""
_CYCLES = 2
"""How often groups are aborted and made again."""
_LARGE_MESSAGE, _MESSAGE_ON_CPU = 64 << 20, 4 << 20
"""Bytes of a message between two ranks: more than NCCL's buffers take."""
_CREW_S, _PLANTED_S = 60.0, 20.0
"""Seconds after which a check ends its ranks: if no fault is planted for the self-test to find, and if one is."""
_SLOW = (
    "ranks that are released so late delay every recovery: look for other load on this node, and try another "
    "release of NCCL and of the driver"
)


def one_rank(context: Context) -> tuple[str, Measured]:
    """Check a group of one rank; with a GPU, also an NCCL communicator of one rank."""
    with_nccl = devices(context) > 0
    found = Crew(context, 1, _alone).wait(_limit(context))[0]
    said = f"made in {seconds(found['made_s'])}, again in {seconds(found['again_s'])}"
    return f"{said}; {'NCCL' if with_nccl else 'no GPU: without a communicator'}", found


def _alone(rank: CheckRank) -> Measured:
    measured = _cycles(rank)
    if rank.gpus:
        measured.update(_nccl_alone(rank, rank.device()))
    return measured


def _nccl_alone(rank: CheckRank, device: torch.device) -> Measured:
    """Use an NCCL communicator of one rank, which groups of one rank avoid; abort it twice, and make it again."""
    times = []
    for number in range(_CYCLES):
        began = time.monotonic()
        connector = NcclConnector(0, 1, timedelta(seconds=_TIMEOUT_S), Timeouts().abort_s)
        connection = connector.connect(dist.PrefixStore(f"alone/{number}", rank.store), None, lambda: False)
        group, x = wrap([connection], 0, 1), torch.ones(1 << 16, device=device)
        group.allreduce([x]).wait()
        work = group.allreduce([x])
        work.wait()
        if x.sum().item() != x.numel():
            raise FtError("an all-reduce over one rank changed its tensor")
        times.append(time.monotonic() - began)
        interrupt_together([connection])
        interrupt_together([connection])
        del work, group
        connection.drop()
    return {"nccl_made_s": times[0], "nccl_again_s": times[-1]}


def several_ranks(context: Context) -> tuple[str, Measured]:
    """Check groups of several ranks: aborted in the middle of an all-reduce and made again, several times."""
    found = Crew(context, _size(context), _cycles).wait(_limit(context))
    measured = {name: max(one[name] for one in found.values()) for name in found[0]}
    measured["ranks"] = len(found)
    if measured["release_s"] > _RELEASE_S:
        raise Failed(f"ranks were released only after {seconds(measured['release_s'])}", _SLOW, measured)
    said = f"made in {seconds(measured['made_s'])}, released in {seconds(measured['release_s'])}"
    return f"{len(found)} ranks ({_how(context)}): {said}, again in {seconds(measured['again_s'])}", measured


def _cycles(rank: CheckRank) -> Measured:
    member = TestRank(rank, _TIMEOUT_S)
    part = dist.new_group(list(range(rank.size)))
    last, release, again = rank.size - 1, 0.0, 0.0
    for cycle in range(_CYCLES):
        member.reduce()
        member.reduce(part)
        rank.meet(f"cycle {cycle}")
        if rank.number == last:  # does not take part in the all-reduce, and ends the epoch
            if rank.planted and last:
                threading.Event().wait()
            time.sleep(0.3)
            rank.store.set(f"close/{cycle}", "")
            member.wait_closed()
        else:
            release = max(release, _blocked(member, part))
        again = max(again, member.renew())
    member.reduce(error=float(rank.planted))
    member.reduce(part)
    return {"made_s": member.made_s, "release_s": release, "again_s": again}


def _blocked(member: TestRank, group=None) -> float:
    """Wait in an all-reduce until the epoch is closed; return the seconds from the closing to the release."""
    try:
        while True:
            member.reduce(group)
    except EpochClosed:
        released = time.monotonic()
    return max(0.0, released - member.wait_closed())


def both_send(context: Context) -> tuple[str, Measured]:
    """Let two ranks send large messages to each other, each before it receives, as the stages of a pipeline do.

    If the messages of a rank are not started together, each rank waits until the other one receives.
    """
    found = Crew(context, 2, _both_send).wait(_limit(context))
    measured = {"message_bytes": found[0]["bytes"], "exchange_s": max(one["seconds"] for one in found.values())}
    size = f"{measured['message_bytes'] >> 20} MiB"
    return f"{size} each way in {seconds(measured['exchange_s'])} ({_how(context)})", measured


def _both_send(rank: CheckRank) -> Measured:
    member, other = TestRank(rank, _TIMEOUT_S), 1 - rank.number
    size = _LARGE_MESSAGE if member.device.type == "cuda" else _MESSAGE_ON_CPU
    mine = torch.full((size // 4,), float(rank.number), device=member.device)
    theirs, took = torch.empty_like(mine), 0.0
    for cycle in range(_CYCLES):  # connections are made for the first messages
        theirs.fill_(-1.0)
        if rank.planted and rank.number == 1:
            threading.Event().wait()
        rank.meet(f"exchange {cycle}")
        began = time.monotonic()
        operations = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        low, high = theirs.min().item(), theirs.max().item()  # waits for the device
        took = time.monotonic() - began
        if not low == high == float(other):
            raise FtError(f"a message of {other:g} arrived as {low:g} to {high:g}")
    return {"bytes": size, "seconds": took}


def killed_rank(context: Context) -> tuple[str, Measured]:
    """Kill a rank that reduces without a pause, and measure how long the others stay in the all-reduce.

    With a GPU for each rank it is done again without direct access to the memory of other GPUs: the death of a rank
    whose memory others have mapped can be an error of their devices.
    """
    size = max(3, _size(context))
    release = _killed(context, size, _survive, "ranks")
    measured = {"ranks": size, "release_s": release}
    said = f"{size} ranks ({_how(context, size)}): all others released in {seconds(release)}"
    if devices(context) >= size:
        measured["without_p2p_release_s"] = _killed(context, size, _survive_without_p2p, "without-p2p")
        said += f", without P2P in {seconds(measured['without_p2p_release_s'])}"
    return said, measured


def killed_while_made(context: Context) -> tuple[str, Measured]:
    """Kill a rank that the others need to make their groups again, and measure how long they wait for it.

    A communicator cannot be aborted while NCCL makes it; in a run, a thread of its own waits for that.
    """
    release = _killed(context, 3, _wait_for_the_last, "ranks", epoch=1)
    measured = {"ranks": 3, "release_s": release}
    return f"3 ranks ({_how(context, 3)}): both others released in {seconds(release)}", measured


def _killed(context: Context, size: int, function: Callable[[CheckRank], Measured], name: str, epoch: int = 0) -> float:
    """Kill the last of ``size`` ranks when all of them have met; return the seconds until all others were released.

    Args:
        epoch: number of the epoch that is then closed.

    Raises:
        Failed: they were released too late.
    """
    crew = Crew(context, size, function, name)
    crew.store.wait([f"meet/kill/{rank}" for rank in range(size)], timedelta(seconds=_CREW_S))
    time.sleep(0.3)
    killed = time.monotonic()
    crew.kill(size - 1)
    if not context.planted:
        crew.store.set(f"close/{epoch}", "")  # in a run, the control plane does it when an agent has seen the death
    found = crew.wait(_limit(context) / 2, set(range(size - 1)))
    release = max(one["released_at"] for one in found.values()) - killed
    if release > _RELEASE_S:
        measured = {"ranks": size, "release_s": release}
        raise Failed(f"the others were released only after {seconds(release)}", _SLOW, measured)
    return release


def _survive(rank: CheckRank) -> Measured:
    member = TestRank(rank, _TIMEOUT_S)
    member.reduce()
    rank.meet("kill")
    _blocked(member)
    return {"released_at": time.monotonic()}


def _survive_without_p2p(rank: CheckRank) -> Measured:
    os.environ["NCCL_P2P_DISABLE"] = "1"
    return _survive(rank)


def _wait_for_the_last(rank: CheckRank) -> Measured:
    """Make all groups again, for which the last rank never comes."""
    member = TestRank(rank, _TIMEOUT_S)
    member.reduce()
    rank.meet("used")
    if rank.number == 0:
        rank.store.set("close/0", "")
    member.wait_closed()
    if rank.number == rank.size - 1:
        rank.store.set(f"meet/dropped 0/{rank.number}", "")
    rank.meet("kill")
    if rank.number == rank.size - 1:
        threading.Event().wait()
    try:
        member.renew()
    except EpochClosed:
        return {"released_at": time.monotonic()}
    raise FtError("groups were made without one of their members")


def hung_groups(context: Context) -> tuple[str, Measured]:
    """Abort two groups that hang at the same time, as a recovery does."""
    took = Crew(context, 2, _hang).wait(_limit(context) / 2)[0]
    measured = {"together_s": took}
    if took > _RELEASE_S:
        raise Failed(f"two hung groups were aborted only after {seconds(took)}", _SLOW, measured)
    return f"together in {seconds(took)} ({_how(context)})", measured


def _hang(rank: CheckRank) -> float:
    """Start an all-reduce in each of two groups on rank 0, which rank 1 does not join, and abort them; return the
    seconds that this took."""
    member = TestRank(rank, _TIMEOUT_S)
    parts = [dist.new_group([0, 1]) for _ in range(2)]
    for part in parts:
        member.reduce(part)
    rank.meet("used")
    took = 0.0
    if rank.number == 0:
        tensors = [torch.ones(1 << 16, device=member.device) for _ in parts]
        streams = [torch.cuda.Stream() for _ in parts] if member.device.type == "cuda" else []
        works = []
        for number, (part, tensor) in enumerate(zip(parts, tensors, strict=True)):
            with torch.cuda.stream(streams[number] if streams else None):
                works.append(dist.all_reduce(tensor, group=part, async_op=True))
        time.sleep(0.5)
        if any(work.is_completed() for work in works):
            raise FtError("an all-reduce ended although a rank did not take part")
        took = _aborted(member, works, rank.planted)
    rank.meet("over")
    return took


def _aborted(member: TestRank, works: list[dist.Work], planted: bool) -> float:
    """Abort all groups, and return the seconds until no operation is under way."""
    began = time.monotonic()
    if planted:
        print("waits for an abort", flush=True)
        member.groups.close = lambda *_: threading.Event().wait()
    member.groups.close(0, "self-test")
    _until_over(works)
    member.groups.drop()
    return time.monotonic() - began


def _until_over(works: list[dist.Work]) -> None:
    for work in works:
        try:
            work.wait()
        except Exception:
            continue  # as it has to be: the operation was aborted
    if patches.platform().name == "cuda":
        torch.cuda.synchronize()


def _limit(context: Context) -> float:
    """Return the seconds that ranks get: less than the check has, so that it can say which rank did not come back."""
    return min(_PLANTED_S if context.planted else _CREW_S, 0.8 * context.limit_s)


def _size(context: Context) -> int:
    return max(2, min(devices(context) or 3, 4))


def _how(context: Context, size: int = 2) -> str:
    gpus = devices(context)
    if not gpus:
        return "gloo"
    return "NCCL" if gpus >= size else "NCCL over sockets, on shared GPUs"


# --- the ring between replicas ---------------------------------------------------------------------------------------

_MEMBERS = 3
_RING_S = 60.0
"""Seconds that the members of the ring have in all; an all-reduce has half of them."""
_ON_CPU, _ON_DEVICE = 1 << 20, 16 << 20
"""Elements of a tensor."""
_WRONG = (
    "replicas would train on different or wrong gradients: run it again with --only ring; if it fails again, look at "
    "memory, network cards and GPUs of this node (dmesg, nvidia-smi -q)"
)


def ring(context: Context) -> tuple[str, Measured]:
    """Reduce tensors over members on this node, and compare results between members and with the CPU's."""
    found = Crew(context, _MEMBERS, _reduce).wait(min(_RING_S, 0.8 * context.limit_s))
    first = found[0]
    for number, one in found.items():
        for name in ("fp32", "bf16"):
            if one[name] != first[name]:
                raise Failed(f"members 0 and {number} have different bits ({name})", _WRONG)
            if one[name] != one[f"{name} on the CPU"]:
                raise Failed(f"member {number}: the bits of the device differ from those of the CPU ({name})", _WRONG)
        if one["wrong"]:
            raise Failed(f"member {number}: {one['wrong']} elements differ from the exact sum", _WRONG)
    rate = min(one["gb_s"] for one in found.values())
    where = "GPU tensors" if devices(context) else "no GPU: CPU tensors"
    return f"{_MEMBERS} members, {where}: equal, {rate:.2f} GB/s", {"members": _MEMBERS, "gb_s": rate}


def _reduce(rank: CheckRank) -> Measured:
    device = rank.device()
    elements = _ON_DEVICE if device.type == "cuda" else _ON_CPU
    own = Ring("127.0.0.1", TOKEN, RingOptions(limit_s=_RING_S / 2))
    rank.store.set(f"ring/{rank.number}", json.dumps(own.address))
    rank.store.wait([f"ring/{number}" for number in range(rank.size)], timedelta(seconds=_RING_S))
    addresses = [bounded_json.loads(rank.store.get(f"ring/{number}")) for number in range(rank.size)]
    own.reconfigure(1, addresses, rank.number)
    measured: Measured = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        values = torch.randn(elements, generator=torch.Generator().manual_seed(rank.number)).to(dtype)
        for where, given in ((name, values.to(device, copy=True)), (f"{name} on the CPU", values.clone())):
            _sum(own, given)
            if rank.planted and rank.number == 1 and where == name:
                given.view(torch.uint8)[777] ^= 1
            measured[where] = hashlib.sha256(given.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    measured["wrong"], measured["gb_s"] = _exact(own, rank, device, elements)
    own.close()
    return measured


def _exact(own: Ring, rank: CheckRank, device: torch.device, elements: int) -> tuple[int, float]:
    """Sum whole numbers, which fp32 adds without rounding in any order; return (wrong elements, GB/s)."""
    given = [_whole_numbers(number, elements) for number in range(rank.size)]
    tensor = given[rank.number].to(device, copy=True)
    began = time.monotonic()
    _sum(own, tensor)
    took = time.monotonic() - began
    return int((tensor.cpu() != sum(given)).sum()), tensor.nbytes / 1e9 / took


def _whole_numbers(seed: int, elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 20), 1 << 20, (elements,), generator=generator).float()


def _sum(own: Ring, tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()  # the tensor was written on another stream than the ring reads it on
    outcome = own.all_reduce(tensor).wait()
    if not outcome.ok:
        raise FtError(f"the all-reduce failed: {outcome.reason}")
    if tensor.is_cuda:
        torch.cuda.synchronize()
