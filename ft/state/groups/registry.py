"""``Groups``: all process groups of one worker, with the operations that a recovery needs: close, rebuild, reopen; and
how ``torch.distributed`` is made to create its process groups through it.

After a failure, a recovery closes the epoch, which aborts all collectives, rebuilds the affected groups and opens the
next epoch (DEADPOOL, section VI-D).

The default group of torch is of the backend ``ft``, which ``take_over`` registers. torch hands some later groups to a
method of the default group, but only from release 2.13 on, and there without the backend that the program asked for. So
``take_over`` wraps the function through which every release creates every group, ``_new_process_group_helper``: if the
default group has a ``maker`` (:class:`Groups`), the maker creates the later groups too, and torch keeps its own records
of them. It wraps ``batch_isend_irecv`` too. Before release 2.14, torch launches messages together only in a group whose
type is exactly its own; from then on it asks the group for its backend, which a group without connections lacks.
"""

import functools
import gc
import hashlib
import inspect
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ft.base.errors import EpochClosed, FtError, UserError
from ft.faults.hang.inspection import Departure, Operation, operation_name
from ft.job.control.timeouts import Timeouts
from ft.job.parts import GroupReport
from ft.net.codec import Numbers
from ft.net.store import StoreConnection
from ft.state import device
from ft.state.groups.backends import (
    MOST_IN_MESH,
    GlooConnection,
    GlooConnector,
    NcclConnector,
    SparseGlooConnector,
    interrupt_together,
    prepare_nccl,
)
from ft.state.groups.builder import BuildCancelled, Builder, ConnectionJob, Rendezvous
from ft.state.groups.device import DEVICE
from ft.state.groups.group import Group
from ft.state.groups.history import History, StartedOperation
from ft.state.groups.state import EpochState
from ft.state.groups.work import GroupWork, Opaque, SentMessage

_DEFAULT_TIMEOUT_S = 1800.0
_SETTLE_S = 1.0


@dataclass(frozen=True)
class GroupsInspection:
    """What is known of the operations of training at one moment.

    Attributes:
        members: name of a group -> logical ranks of its members.
        counts: number of operations that this worker has started, by channel (``ft.faults.hang.inspection.channel``).
        operations: those that have not ended, and the last one of each channel; and collectives in which other threads
            are blocked.
        departure: how the present step differs from the one before.
        blocked: whether the training thread waits in an operation, for the connection of a group, or for a thread that
            does.
    """

    members: Mapping[str, Numbers]
    counts: Mapping[str, int]
    operations: tuple[Operation, ...]
    departure: Departure | None
    blocked: bool


class Groups:
    """All process groups of this worker. Create it with ``start``.

    Any thread may call ``close``, ``waiting`` and ``oldest_unfinished``. Only the training thread may call the other
    methods.

    Attributes:
        store: torch's store of the default group.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        device_backend: str,
        state: EpochState,
        connection: StoreConnection,
        store: c10d.Store,
        limits: Timeouts,
    ):
        self._rendezvous, self._device_backend, self._state = rendezvous, device_backend, state
        self._limits = limits
        self._groups: dict[str, Group] = {}
        self._created: list[tuple[str, list[int]]] = []
        self._pending: dict[tuple[str, str], ConnectionJob] = {}
        self._lock = threading.Lock()
        self._builder: Builder | None = None
        self._connection, self.store = connection, store
        self._ending: list[threading.Thread] = []

    @classmethod
    def start(
        cls,
        *,
        rendezvous: Rendezvous,
        prefix: str,
        rank: int,
        world_size: int,
        device_backend: str,
        alone: bool,
        on_failure: Callable[[str, BaseException], None],
        epoch: int = 0,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
        limits: Timeouts | None = None,
    ) -> "Groups":
        """Create torch.distributed's default process group such that it and all later groups can be rebuilt.

        Args:
            rendezvous: store in which members rendezvous.
            prefix: prefix of the keys in that store; it must never have been used before.
            rank: logical rank of this worker.
            world_size: number of logical ranks.
            device_backend: "gloo", or "nccl" (gloo is then connected as well when a tensor in host memory is used).
            alone: whether this worker joins a running job. Then no group is connected before ``rebuild``, and until
                then operations complete locally (``ft.state.groups.group``).
            on_failure: function (group name, error), called in the thread of an operation that failed in an open epoch.
                It reports the failure, and returns when the epoch is closed or after a timeout.
            epoch: number of the present epoch.
            timeout_s: timeout in seconds for groups that specify none.
            limits: the run's timeouts, of which NCCL needs ``launch_s`` and ``abort_s``; None: the defaults.

        Raises:
            UserError: this release of torch creates process groups in an unknown way.
            EpochClosed: the epoch was closed before all workers had connected.
        """
        take_over()
        # gloo looks up all members with one store request instead of one request per member
        os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
        limits = limits or Timeouts()
        if rank == 0 and not alone and os.environ.get("FT_HSDP_REPLICA", "0") == "0":  # of all replicas the first one
            _say(f"process groups of torch {torch.__version__} over {device_backend}, connected anew after a fault")
        if device_backend == "nccl":
            prepare_nccl(limits.launch_s, _say if rank == 0 else lambda message: None)
        own, default = rendezvous.connect(), rendezvous.connect()
        default_store = c10d.PrefixStore(f"{prefix}/default", default)
        groups = cls(rendezvous, device_backend, EpochState(epoch, alone, on_failure), own, default_store, limits)
        if not alone:
            groups._builder = Builder(prefix, groups._connection)
        dist.init_process_group(
            BACKEND,
            store=groups.store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            pg_options=groups.make_default,
        )
        world = dist.distributed_c10d._world
        # Programs query the default group's backend and pass its name to ``new_group``: report the device's backend.
        if (default_group := world.default_pg) is not None:
            world.pg_map[default_group] = (dist.Backend(device_backend), world.pg_map[default_group][1])
        return groups

    # --- making groups, called by torch -------------------------------------------------------------------------------

    def new_group(
        self,
        ranks: Iterable[int],
        timeout: timedelta | None,
        name: str,
        desc: str | None = None,
        backend: str | None = None,
        options: Any = None,
    ) -> Group | None:
        """Create a group over these logical ranks. Return None if this worker is not a member.

        The group is connected at once, unless this worker joins a running job (``alone``). With NCCL its communicator
        is made in the background, in the order of creation, and its first operation waits for it.

        Args:
            ranks: logical ranks of the members.
            timeout: longest duration of an operation; None: ``_DEFAULT_TIMEOUT_S`` seconds.
            name: unique name of the group.
            desc: torch's description of the group.
            backend: "gloo" to connect over gloo only; otherwise the backends are those of the default group.
            options: the program's ``ProcessGroupNCCL.Options``, such as the priority of the stream; None: the defaults.
        """
        ranks = list(ranks)
        self._created.append((name, ranks))
        own = dist.get_rank() if dist.is_initialized() else self._default_rank
        if own not in ranks:
            return None
        group = Group(name, desc or "undefined", ranks, ranks.index(own), self._state, self)
        place = ranks.index(own), len(ranks), timeout or timedelta(seconds=_DEFAULT_TIMEOUT_S)
        if "gloo" not in (backend, self._device_backend):
            group.connectors["cuda"] = NcclConnector(*place, self._limits.abort_s, (name, ranks), options)
        group.connectors["cpu"] = (SparseGlooConnector if len(ranks) > MOST_IN_MESH else GlooConnector)(*place)
        self._groups[name] = group
        if len(ranks) > 1 and not self._state.alone:
            self._submit(group)
            if "cuda" not in group.connectors:  # communicators are made while the program builds its model
                self.await_connection(group, "cpu")
        return group

    def make_default(self, options: Any) -> Group | None:
        """Create the default group. ``options``: torch's description of it (size, rank, timeout and name)."""
        self._default_rank = options.group_rank
        return self.new_group(range(options.group_size), options.timeout, options.group_id, "default_pg")

    def forget(self, group: Group) -> None:
        """Remove a group that is being destroyed. With the last group, cancel the builder."""
        self._groups.pop(group.group_name, None)
        if not self._groups and self._builder is not None:
            self._builder.cancel()

    def ends_later(self, remover: threading.Thread) -> None:
        """Keep track of ``remover``, a thread that may wait inside torch for the end of an abandoned connection."""
        self._ending = [*(thread for thread in self._ending if thread.is_alive()), remover]

    def settle(self) -> None:
        """After the last group was destroyed, wait for the threads that still close or establish connections.

        A thread that is inside torch while the interpreter is finalised would abort the process. The wait is limited to
        ``_SETTLE_S`` seconds, because such a thread may never return.
        """
        if self._groups:
            return
        deadline = time.monotonic() + _SETTLE_S
        DEVICE.stop(_SETTLE_S)
        for thread in [*self._ending, *([self._builder.thread] if self._builder is not None else [])]:
            thread.join(max(0.0, deadline - time.monotonic()))

    def await_connection(self, group: Group, device_type: str) -> None:
        """Block until ``group`` is connected for tensors on this type of device.

        Raises:
            EpochClosed: the epoch was closed first.
            RecoverableError: a member could not be reached.
        """
        job = self._pending.get((group.group_name, device_type))
        if job is None:
            if not group.connections():
                raise FtError(f"{group} was not rebuilt for epoch {self._state.epoch}: no plan named it")
            job = self._submit(group, device_type)
        self._wait(job)

    def _submit(self, group: Group, device_type: str | None = None) -> ConnectionJob:
        device_type = device_type or next(iter(group.connectors))
        job = ConnectionJob(group, device_type)
        self._pending[group.group_name, device_type] = job
        return self._building.submit(job)

    @property
    def _building(self) -> Builder:
        if self._builder is None:
            raise FtError("no group is connected before the first rebuild")
        return self._builder

    def _wait(self, job: ConnectionJob) -> None:
        group = job.group
        self._state.begins_to_wait(group.group_name)
        try:
            self._building.wait(job)
        except BuildCancelled:
            raise EpochClosed(*(self._state.closed or (self._state.epoch, "the groups were destroyed"))) from None
        except RuntimeError as error:
            self._state.has_waited()
            raise self._state.error_of(group.group_name, group.ranks, error) from error
        finally:
            self._state.has_waited()

    # --- the end of an epoch ------------------------------------------------------------------------------------------

    def close(self, epoch: int, reason: str) -> None:
        """Close ``epoch``: blocked operations raise ``EpochClosed`` soon, later operations at once.

        Over gloo this takes milliseconds. Over NCCL it takes as long as the abort of the communicators.

        Safe from any thread. ``reason`` becomes part of the exceptions.
        """
        state = self._state
        with self._lock:
            if epoch < state.epoch or (state.closed is not None and epoch <= state.closed[0]):
                return
            state.closed = (epoch, reason)
            builder = self._builder
        for wake in list(state.wake):
            wake()
        if builder is not None:
            builder.cancel()
        device.enter_process()
        # The training thread waits for the end of aborts (``drop``); this thread has further orders to receive.
        for one in [one for group in list(self._groups.values()) for one in group.to_interrupt()]:
            one.interrupt()

    def reports(self) -> list[GroupReport]:
        """Return the reports of all groups of this worker, in the order of creation."""
        return [group.report() for group in self._groups.values()]

    def break_connection(self, choice: random.Random) -> None:
        """Break one TCP connection of a gloo group in use, for fault injection. NCCL's sockets are not known."""
        used = [one for group in self._groups.values() if group.report().used for one in group.connections()]
        breakable = [one for one in used if isinstance(one, GlooConnection)]
        if breakable:
            choice.choice(breakable).break_one(choice)

    def drop(self) -> None:
        """Release the connections of interrupted groups: afterwards no earlier operation can write into a buffer.

        Raises:
            AbortError: a communicator was not aborted, so that this worker has to be replaced.
        """
        for group in self._groups.values():
            group.forget_block()
        self._state.settle()
        interrupted = [group for group in self._groups.values() if group.interrupted]
        interrupt_together([one for group in interrupted for one in group.connections()])
        for group in interrupted:
            group.drop()

    # --- the start of the next epoch ----------------------------------------------------------------------------------

    def rebuild(
        self, names: Iterable[str], defer: Iterable[str], prefix: str, epoch: int, rendezvous: Rendezvous | None = None
    ) -> float:
        """Connect groups anew for ``epoch``. All other groups keep their connections.

        Args:
            names: names of groups to connect before this method returns. Groups without this worker are ignored.
            defer: names of groups to connect afterwards in the background. The first operation of such a group waits
                until it is connected.
            prefix: prefix of all keys in the store; it must never have been used before.
            epoch: number of the new epoch.
            rendezvous: store in which members rendezvous; None: the same as before.

        Returns:
            duration in seconds.

        Raises:
            AbortError: a communicator was not aborted, so that this worker has to be replaced.
            EpochClosed: ``epoch`` was closed meanwhile. Over gloo this is raised within milliseconds of the closing.
            RecoverableError: a member could not be reached, and the control plane did not close the epoch because of
                it.
        """
        began, state = time.monotonic(), self._state
        names, defer = set(names), set(defer)
        wanted = [g for name, g in self._groups.items() if name in names and len(g.ranks) > 1]
        later = [g for name, g in self._groups.items() if name in defer and len(g.ranks) > 1]
        self._disconnect([*wanted, *later, *(g for g in self._groups.values() if g.is_alone)])
        if self._device_backend == "nccl":
            gc.collect()  # what an interrupted step has left in cycles of references
            torch.cuda.empty_cache()  # NCCL allocates beside torch, whose cache may hold all of the device's memory
        with self._lock:
            if state.closed is not None and state.closed[0] >= epoch:
                raise EpochClosed(*state.closed)
            if self._builder is not None:
                self._builder.cancel()
                self.ends_later(self._builder.thread)
            state.epoch, state.alone = epoch, False
            moved, self._rendezvous = rendezvous not in (None, self._rendezvous), rendezvous or self._rendezvous
            if self._connection.is_broken or moved:
                self._connection.close()
                self._connection = self._rendezvous.connect()
            self._builder = Builder(prefix, self._connection)
        self._pending.clear()
        state.history.clears()
        jobs = [self._submit(group) for group in (*wanted, *later)]
        for job in jobs[: len(wanted)]:
            self._wait(job)
        return time.monotonic() - began

    def _disconnect(self, groups: list[Group]) -> None:
        self._state.settle()
        # All connections are interrupted before the first group is dropped: gloo's threads then handle the broken
        # connections meanwhile, so that no drop has to wait for them.
        interrupt_together([one for group in groups for one in group.connections()])
        for group in groups:
            group.prepare_rebuild()

    def reopen(self, epoch: int) -> None:
        """Open ``epoch``: allow operations again.

        Raises:
            EpochClosed: ``epoch`` was closed already.
        """
        with self._lock:
            closed = self._state.closed
            if closed is not None and closed[0] >= epoch:
                raise EpochClosed(*closed)
            self._state.epoch, self._state.closed = epoch, None

    # --- queries ------------------------------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """Return the record of training's operations, which is told when a step begins."""
        return self._state.history

    def inspect(self, threads: Collection[str] = ()) -> GroupsInspection:
        """Return what is known of the operations of training. Safe from any thread.

        ``threads``: names of other threads that the training thread waits for.
        """
        groups, state = list(self._groups.values()), self._state
        counts: dict[str, int] = {}
        for group in groups:
            counts |= group.counts()
        labels = {group.group_name: group.label for group in groups}
        marked = {(labels.get(name, name), began) for name, began in DEVICE.marked()}
        waiting = state.waiting
        awaited = {*threads, *(() if waiting is None else (f"ft-tree-{waiting[0]}",))}
        besides = dict(state.besides)
        works = [state.awaited, *(work for name, work in besides.items() if name in awaited)]

        def status(entry: StartedOperation) -> tuple[bool, bool]:
            work = entry.work()
            if work is None:  # nobody keeps it; an operation without a work is known by its mark
                done = (entry.group, entry.began) not in marked
                return done, not done
            # gloo tells only the thread that waits for a message when it has ended.
            done = work.ended if work.on_host and isinstance(work, Opaque) else not work.keeps_training()
            return done, not done and (any(work is one for one in works) or not work.on_host)

        members = {group.label: Numbers(group.ranks) for group in groups}
        others = [
            _beside(work, name in awaited)
            for name, work in besides.items()
            if work.sequence and not isinstance(work, SentMessage)
        ]
        operations = (*state.history.operations(status), *others)
        blocked = waiting is not None or bool(threads)
        return GroupsInspection(members, counts, operations, state.history.departure(), blocked)

    def topology(self) -> str:
        """Return a digest of the names and members of all groups ever created.

        It must be equal on all workers (DEADPOOL, section V-C, invariant I1).
        """
        return hashlib.sha256(json.dumps(self._created).encode()).hexdigest()[:16]

    def waiting(self) -> tuple[str, float] | None:
        """Return (name of the group whose operation blocks the training thread, start in monotonic time), or None."""
        return self._state.waiting

    def label(self, name: str) -> str:
        """Return a word for group ``name`` that people understand, such as "tensor model parallel group"."""
        group = self._groups.get(name)
        described = "" if group is None else group.group_desc
        return name if described in ("", "undefined") else described.lower().replace("_", " ")

    def oldest_unfinished(self) -> tuple[str, str, float] | None:
        """Return (name of its group, name, age in seconds) of the oldest operation of training that has not ended.

        Return None if there is none, and while the epoch is closed. Safe from any thread.

        The wait for an operation on a device returns at once, so ``waiting`` shows nothing there. The age counts from
        the start of the operation by the program, which may be ahead of the device. Messages in host memory are left
        out: gloo reports their end only to the thread that waits for them, which ``waiting`` shows.
        """
        if self._state.closed is not None:
            return None
        found = [
            (began, group.group_name, operation)
            for group in list(self._groups.values())
            if (oldest := group.oldest_unfinished()) is not None
            for operation, began in [oldest]
        ]
        if (mark := DEVICE.oldest_marked()) is not None:
            found.append((mark.began, mark.group, mark.operation))
        if not found:
            return None
        began, name, operation = min(found)
        return name, operation.strip("_"), time.monotonic() - began


def _say(message: str) -> None:
    print(f"ft: {message}", file=sys.stderr, flush=True)


def _beside(work: GroupWork, is_awaited: bool) -> Operation:
    """Return the operation, a collective, in which a thread beside training is blocked."""
    age_s = round(time.monotonic() - work.began, 3)
    name, group = operation_name(work.operation), work.group.label
    return Operation(group, name, work.sequence, awaited=is_awaited, age_s=age_s)


# --- the default group of torch ---------------------------------------------------------------------------------------


BACKEND = "ft"
_HELPER = "_new_process_group_helper"
_NEEDED = ("global_ranks_in_group", "backend", "group_name", "backend_options", "timeout", "group_desc")


def take_over() -> None:
    """Register the backend ``ft``, and wrap torch's function for process groups. Further calls do nothing.

    ``pg_options`` of ``init_process_group`` is then a function that creates the default group from torch's description
    of it (size, rank, timeout and name).

    Raises:
        UserError: this release of torch creates process groups in another way.
    """
    check_torch()
    if BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(
        BACKEND, lambda options, make: make(options), extended_api=True, devices=["cpu", "cuda"]
    )
    # torch's flight recorder (2.15) must leave the recording to the gloo and NCCL backends below a group: it would
    # attach itself to the group, and ask for the name of a backend that is registered on the group; none is.
    recorded = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recorded is not None:
        recorded.add(BACKEND)
    setattr(dist.distributed_c10d, _HELPER, _through_maker(getattr(dist.distributed_c10d, _HELPER)))
    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = together(dist.batch_isend_irecv)


def together(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``batch_isend_irecv`` such that a group of this project starts its messages itself."""

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        dist.distributed_c10d._check_p2p_op_list(p2p_op_list)
        group: Any = p2p_op_list[0].group or dist.group.WORLD
        works: list[dist.Work] = (group.exchange if hasattr(group, "maker") else original)(p2p_op_list)
        return works

    return batch_isend_irecv


def check_torch() -> None:
    """Check that this release of torch creates process groups in the way that ``take_over`` changes.

    Raises:
        UserError: it does not.
    """
    helper = getattr(dist.distributed_c10d, _HELPER, None)
    known = inspect.signature(helper).parameters if helper is not None else {}
    missing = [name for name in _NEEDED if name not in known]
    if missing:
        raise UserError(
            f"torch {torch.__version__} has no {_HELPER} with {', '.join(missing)}: hot-swap needs it",
            "install torch 2.8 or newer, or leave --ft-hot-swap out",
        )


def _through_maker(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def helper(*args: Any, **kwargs: Any) -> Any:
        world = dist.distributed_c10d._world
        given = signature.bind(*args, **kwargs).arguments
        maker: Groups | None = getattr(world.default_pg, "maker", None)
        ranks = given["global_ranks_in_group"]
        if maker is None or not ranks:  # torch gives no ranks for the default group
            return original(*args, **kwargs)
        backend = given["backend"]
        about = given.get("timeout"), given["group_name"], given.get("group_desc"), str(backend)
        group = maker.new_group(list(ranks), *about, given.get("backend_options"))
        given["backend"], given["backend_options"] = dist.Backend(BACKEND), lambda options: group
        made, store = original(**given)
        if group is not None:
            # Programs query a group's backend, and pass its name to ``new_group``.
            world.pg_map[made] = (backend, world.pg_map[made][1])
        return made, store

    return helper
