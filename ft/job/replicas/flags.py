"""Command-line flags of ``ft run`` for replicas (FT-HSDP and SPARe), with their checks."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ft.base.errors import Problem, Problems, UserError
from ft.base.quantities import argument, count, duration, size
from ft.job.quorum.limits import Limits
from ft.job.replicas.deadlines import LONGEST_S

LR_SCALING = ("none", "linear", "sqrt")
_DEFAULT_LR_SCALING = "sqrt"
_LOST_S = 0.4
"""Seconds that the others wait for a replica whose leader was lost, if it has standbys: another rank of it has to learn
of the loss first, and to tell the quorum server that the leader is being replaced."""
_MOST_STREAMS, _MOST_CHUNKS, _MOST_CHUNK_BYTES = 16, 1024, 1 << 30


SAVE_INTERVAL = "FT_SPARE_SAVE_INTERVAL"
"""Environment variable of a worker: steps between two checkpoints, for ``--save-interval auto``."""


@dataclass(frozen=True)
class ReplicaOptions:
    """Replica options of a run.

    Attributes:
        count: number of replicas of the run.
        only: the one replica that this launcher starts; None: all replicas that belong to this node.
        min_count: smallest number of replicas with which training continues.
        wait_s: seconds that a step waits for a replica that is about to join or is fetching state; None: the defaults
            of the components that wait.
        lr_scaling: how the learning rate is scaled by the ratio of healthy replicas to all replicas.
        redundancy: number of shard types (parts of the global batch) that each replica hosts as a stack, so that it can
            train the part of a lost replica (SPARe); None: without SPARe.
        save_interval: steps between two checkpoints by SPARe's plan, for a trainer that asks for it; None: no plan.
        streams: number of connections between two neighbouring ranks in a gradient ring.
        chunk_bytes: size of the chunks in which a gradient ring sends; None: the default of the platform.
        chunks: chunks per rank and partition of a gradient ring.
    """

    count: int
    only: int | None = None
    min_count: int = 1
    wait_s: float | None = None
    lr_scaling: str = _DEFAULT_LR_SCALING
    redundancy: int | None = None
    save_interval: int | None = None
    streams: int = 1
    chunk_bytes: int | None = None
    chunks: int = 2

    def environment(self) -> dict[str, str]:
        """Return the environment variables for agents and workers of every replica."""
        return {
            "FT_HSDP_REPLICAS": str(self.count),
            "FT_HSDP_LR_SCALING": self.lr_scaling,
            "FT_HSDP_STREAMS": str(self.streams),
            "FT_HSDP_CHUNKS": str(self.chunks),
            **({} if self.chunk_bytes is None else {"FT_HSDP_CHUNK": str(self.chunk_bytes)}),
            **({} if self.wait_s is None else {"FT_HSDP_WAIT": f"{self.wait_s:g}"}),
            **({} if self.redundancy is None else {"FT_SPARE_REDUNDANCY": str(self.redundancy)}),
            **({} if self.save_interval is None else {SAVE_INTERVAL: str(self.save_interval)}),
        }

    def server_options(self, host: str, has_standbys: bool = False) -> dict[str, Any]:
        """Return the value of the quorum server's ``--options``.

        Args:
            host: address on which the server listens.
            has_standbys: whether standbys replace lost workers of replicas.
        """
        limits = {} if self.wait_s is None else {"wait_s": self.wait_s, "arrive_s": self.wait_s}
        limits |= {"lost_s": _LOST_S} if has_standbys else {}
        values = {"replicas": self.count, "min_replicas": self.min_count, "limits": limits}
        return {**values, "where": f"tcp://{host}:0"}


def add_flags(flag: Callable[..., None]) -> None:
    """Add the flags by calls of ``flag(name, **settings)``. The value of a flag that is not given is None."""
    flag("ft-hsdp-replicas", type=count(), metavar="R", help="replicas of the model, each on 1/R of the workers")
    flag(
        "ft-hsdp-replica",
        type=int,
        metavar="K",
        help="bring replica K alone, new or come back: --nnodes, --node-rank and --nproc-per-node are those of K",
    )
    flag("ft-hsdp-min-replicas", type=count(), metavar="M", help="with fewer than M nobody trains (default: 1)")
    flag(
        "ft-hsdp-wait",
        type=duration(0.0),
        metavar="TIME",
        help="a step waits so long for a replica that comes back: while its processes start (default: 0), until it "
        "reports (default: 0.1), and before the optimizer step while it fetches state (default: 1). A fetch that is "
        "not done by then is cut off and tried again in the next step, which waits twice as long, "
        f"{LONGEST_S:g} s at most, or TIME if that is more. 0: nobody waits, and a replica whose fetch takes longer "
        "than a step does not come back",
    )
    flag(
        "ft-hsdp-lr-scaling",
        choices=LR_SCALING,
        help=f"of the learning rate, over healthy / all replicas (default: {_DEFAULT_LR_SCALING})",
    )
    flag(
        "ft-hsdp-streams",
        type=count(1, _MOST_STREAMS),
        metavar="N",
        help="connections between neighbours in a ring of gradients, where one cannot fill the network (default: 1)",
    )
    flag(
        "ft-hsdp-chunk",
        type=argument(size),
        metavar="SIZE",
        help="bytes that a ring of gradients sends, receives and adds at once (default: 8MiB on GPUs, 1MiB on CPUs)",
    )
    flag(
        "ft-hsdp-chunks",
        type=count(1, _MOST_CHUNKS),
        metavar="N",
        help="chunks in flight between neighbours in a ring of gradients: more over long distances (default: 2)",
    )
    flag(
        "ft-spare-redundancy",
        type=int,
        metavar="R",
        help="each replica hosts R types of shards: what a lost one would have trained others do, in the same step",
    )
    flag(
        "ft-spare-plan",
        metavar="FILE",
        help="output of ft plan buy --spare-plan: sets --ft-spare-redundancy, and the steps between checkpoints "
        "for a trainer with --save-interval auto",
    )


def wanted(given: argparse.Namespace) -> bool:
    """Return whether any replica flag was given."""
    return any(value is not None for name, value in vars(given).items() if name.startswith(("ft_hsdp_", "ft_spare_")))


class SparePlan(Protocol):
    """SPARe's plan of a run; the attributes are those of :class:`ReplicaOptions`."""

    redundancy: int
    save_interval: int


def read(
    given: argparse.Namespace, place_stacks: Callable[[int, int], object], read_plan: Callable[[str, int], SparePlan]
) -> ReplicaOptions:
    """Check the parsed flags and fill in defaults.

    Args:
        place_stacks: called with the number of replicas and the redundancy if SPARe is enabled; raises UserError if the
            shard types cannot be placed on the replicas.
        read_plan: called with the file of ``--ft-spare-plan`` and the number of replicas; returns the plan, and raises
            UserError if there is none.

    Raises:
        UserError: the flags contradict each other or are out of range.
    """
    replicas, only = given.ft_hsdp_replicas, given.ft_hsdp_replica
    least = 1 if given.ft_hsdp_min_replicas is None else given.ft_hsdp_min_replicas
    streams = 1 if given.ft_hsdp_streams is None else given.ft_hsdp_streams
    chunk = None if given.ft_hsdp_chunk is None else int(given.ft_hsdp_chunk)
    chunks = 2 if given.ft_hsdp_chunks is None else given.ft_hsdp_chunks
    wait_s, problems = given.ft_hsdp_wait, Problems()
    problems.add(_numbers(replicas, only, least, wait_s, chunk))
    problems.add(_contradictions(given))
    redundancy, interval = given.ft_spare_redundancy, None
    if replicas is not None:
        if given.ft_spare_plan is not None:
            with problems:
                plan = read_plan(given.ft_spare_plan, replicas)
                problems.add(_other_redundancy(redundancy, plan.redundancy))
                redundancy, interval = plan.redundancy, plan.save_interval
        if redundancy is not None:
            with problems:
                place_stacks(replicas, redundancy)
    problems.refuse()
    scaling = given.ft_hsdp_lr_scaling or _DEFAULT_LR_SCALING
    return ReplicaOptions(replicas, only, least, wait_s, scaling, redundancy, interval, streams, chunk, chunks)


def _other_redundancy(given: int | None, planned: int) -> Iterator[Problem]:
    if given is not None and given != planned:
        yield f"--ft-spare-redundancy {given}, and --ft-spare-plan recommends {planned}", "drop one of the two"


def _numbers(
    replicas: int | None, only: int | None, least: int, wait_s: float | None, chunk: int | None
) -> Iterator[Problem]:
    if replicas is None:
        yield "flags of FT-HSDP or SPARe are given, but no number of replicas", "add --ft-hsdp-replicas R"
    elif only is not None and not 0 <= only < replicas:
        problem = f"--ft-hsdp-replica {only} is not between 0 and {replicas - 1} (--ft-hsdp-replicas {replicas})"
        yield problem, "number from 0"
    if replicas is not None and least > replicas:
        problem = f"--ft-hsdp-min-replicas {least} is not between 1 and the {replicas} of --ft-hsdp-replicas"
        yield problem, "give fewer"
    most_s = Limits().start_s
    if wait_s is not None and wait_s >= most_s:
        yield f"--ft-hsdp-wait {wait_s:g}s is not below the {most_s:g} s of a start", "give less"
    if chunk is not None and (not 8 <= chunk <= _MOST_CHUNK_BYTES or chunk % 8):
        yield f"--ft-hsdp-chunk {chunk} is not a multiple of 8 between 8 and {_MOST_CHUNK_BYTES}", "such as 8MiB"


def _contradictions(given: argparse.Namespace) -> Iterator[Problem]:
    """Yield the problems of flags that cannot be combined with replicas."""
    is_spare = given.ft_spare_redundancy is not None or given.ft_spare_plan is not None
    if is_spare and given.ft_hsdp_lr_scaling not in (None, "none"):
        yield (
            f"SPARe and --ft-hsdp-lr-scaling {given.ft_hsdp_lr_scaling}: every step trains the whole "
            "batch, so the learning rate stays as it is",
            "drop --ft-hsdp-lr-scaling",
        )
    if given.ft_transport == "mpi" and given.ft_hsdp_replica is not None:
        yield (
            "--ft-transport mpi and --ft-hsdp-replica: one MPI job carries all replicas from its start to its end",
            "start all replicas in one job, or drop --ft-transport",
        )


def save_interval(environment: Mapping[str, str]) -> int:
    """Return the steps between two checkpoints for ``--save-interval auto``.

    Raises:
        UserError: the run has no plan.
    """
    if SAVE_INTERVAL not in environment:
        raise UserError(
            "--save-interval auto, and the run has no plan that says how often to save",
            "give a number of steps, or give ft run --ft-spare-plan FILE, from ft plan buy --spare-plan",
        )
    return int(environment[SAVE_INTERVAL])
