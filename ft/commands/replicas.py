"""Implement ``ft run --ft-hsdp-replicas R``: read the command line and run the launcher of FT-HSDP replicas on a node.

The launcher is the process that ``ft run`` starts on each node; it runs the agents of all replicas on the node.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from ft import faults as inject
from ft.base.errors import Problems, UserError
from ft.base.files import needs_run_dir
from ft.commands import checkouts, protection
from ft.commands.protection import LaunchLine, RunProtection
from ft.job.agent import options
from ft.job.agent.agent import make_run_dir, networks
from ft.job.agent.membership import claim_name
from ft.job.agent.options import Cluster, RunOptions
from ft.job.quorum.values import parse_where
from ft.job.replicas import flags, places
from ft.job.replicas.flags import ReplicaOptions, wanted
from ft.job.replicas.host import FOLDER, QuorumHost
from ft.job.replicas.launcher import Launcher, MergedConsole
from ft.job.replicas.member import ReplicaMember
from ft.job.replicas.places import LauncherPart, devices_of, parts_of
from ft.job.replicas.stand_in import LauncherPlace, Lookout
from ft.platform import election, network, slurm
from ft.platform.election import QUORUM
from ft.platform.slurm import JobPlace
from ft.platform.supervisor import Supervisor
from ft.systems.spare import placement
from ft.systems.spare.ruler import ruler

__all__ = ["main", "wanted"]

_RESTARTS = 1000
"""Default number of warm restarts of each replica: a long run has many, and none delays the other replicas."""


def main(given: argparse.Namespace, job: JobPlace | None) -> NoReturn:
    """Run the launcher of this node, and end the process with the run's exit code.

    Exit codes: 0 if the run has finished, 2 for bad input, 76 if it has finished, but --inject-strict asks for faults
    that were not injected, 128+N after signal N, others as the failure that ended the last replica.

    Args:
        job: the Slurm or MPI job that this node is part of; None: read from the environment.

    Raises:
        UserError: the flags cannot work; nothing has been started.
    """
    if given.max_restarts is None:
        given.max_restarts = _RESTARTS
    asked, whole, parts, planned, protected = prepare(given, job)
    make_run_dir(whole, True, [_folder(part, whole) for part in parts], FOLDER)
    supervisor = Supervisor()

    def members_of(parts: list[LauncherPart], is_late: bool) -> list[ReplicaMember]:
        return [_member(part, whole, asked, planned.get(part.replica, []), supervisor, is_late) for part in parts]

    members = members_of(parts, asked.only is not None)
    if asked.only is None:
        with needs_run_dir(whole.run_dir):
            claim_name(whole.run_dir, whole.cluster.node_rank, whole.joins)

    console = MergedConsole(whole.quiet, {member.replica: (member.out, member.err) for member in members})
    console.say(_announcement(whole, asked, parts))
    console.say(protection.announcement(protected, whole.cluster.nnodes))
    for line in networks(whole, _host(whole), whole.cluster.nnodes == 1 and asked.only is None):
        console.say(line)
    name, turn = _name(asked, whole)
    server = asked.server_options(_host(whole), whole.has_standbys)
    host = QuorumHost(supervisor, whole.run_dir, name, turn, server, console.complain, whole.timeouts)
    place = _place(name, whole, asked, parts)
    if place is not None:
        place.begin()

    def members_at(number: int) -> list[ReplicaMember]:
        return members_of(_parts_at(number, whole, asked), True)

    least = asked.min_count
    code = Launcher(supervisor, whole.run_dir, members, host, console, asked.count, least, place, members_at).run()
    own = whole.run_dir if asked.only is None else members[0].folder
    code = protection.judge_faults(code, own, given.inject_strict, console.say)
    is_first_lost = asked.only is None and host.first_is_lost()
    slurm.end_orphaned_job(os.environ, is_first_lost, console.complain)
    console.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def prepare(
    given: argparse.Namespace, job: JobPlace | None
) -> tuple[ReplicaOptions, RunOptions, list[LauncherPart], dict[int, list[inject.Fault]], RunProtection]:
    """Return the replica settings, the run's options, this node's parts, the faults by replica, and the protection.

    A part is the share of this node in one replica: how many of the node's workers belong to that replica.

    Raises:
        UserError: lists every problem with the flags of ``ft run`` and, for this project's trainer, of the trainer.
    """
    problems, asked, whole, parts, specs, seed = Problems(), None, None, [], [], 0
    planned, protected = {}, RunProtection(protection.REPLICAS)
    with problems:
        asked = flags.read(given, ruler, placement.read)
    with problems:
        whole = options.resolve(given, os.environ, job, lease=FOLDER)
    with problems:
        specs, seed = inject.read_specs(given.inject, given.scenario, given.seed)
    if whole is not None and whole.left_out.node:
        # its place in the run would be taken for that of a node that can replace others
        problems.add([(f"{whole.left_out.node}; it cannot be a standby node of replicas", "use another host")])
    if asked is not None and whole is not None:
        with problems:
            whole = reachable(whole, asked)
            parts = parts_here(whole, asked)
            planned = places.plan_faults(specs, asked.count, parts[0], seed)
    if given.script is not None:
        shape = LaunchLine(parts[0].world_size, whole.standby_flags, asked.count) if parts else None
        with problems:
            every = [fault for of_one in planned.values() for fault in of_one]
            protected, found = protection.examine(options.script_of(given), shape, every)
            problems.add(found)
    problems.refuse()
    if checkouts.is_checkout(whole.script):
        whole = replace(whole, script=checkouts.adapted(whole.script, asked.count))
    return asked, whole, parts, planned, protected


def reachable(whole: RunOptions, asked: ReplicaOptions) -> RunOptions:
    """Return the options with the local address through which this node reaches the quorum server.

    The local address is set only for a replica that is started alone, and only if the user has not given an address.
    """
    served = election.read(whole.run_dir, QUORUM) if asked.only is not None else None
    if served is None or whole.local_addr is not None:
        return whole
    host, port = parse_where(served.where)
    return replace(whole, local_addr=network.own_address(host, port, is_host=False))


def parts_here(whole: RunOptions, asked: ReplicaOptions) -> list[LauncherPart]:
    """Return the parts of replicas that this node runs.

    Raises:
        UserError: the workers cannot be divided among the replicas.
    """
    cluster = whole.cluster
    if asked.only is not None:
        return [
            LauncherPart(
                asked.only, cluster.nnodes, cluster.node_rank, whole.nproc, standby_nodes=cluster.standby_nodes
            )
        ]
    return _parts_at(cluster.node_rank, whole, asked)


def replica_options(part: LauncherPart, whole: RunOptions, asked: ReplicaOptions) -> RunOptions:
    """Return the options of the agent of ``part``; each replica is a run of its own with a folder of its own."""
    host, port = _host(whole), 0
    if part.node_rank:  # the replica's control plane is on another node; its address is in the replica's folder
        host, port = whole.cluster.host, whole.cluster.port
    folder = _folder(part, whole)
    return replace(
        whole,
        cluster=Cluster(part.nodes, part.node_rank, part.standby_nodes, host, port, in_folder=True),
        nproc=part.nproc,
        run_dir=folder,
        run_id=f"{whole.run_id}-{folder.name}",
        local_addr=_host(whole),
        control=None,  # the run's folder says where the shared state of its replicas is
        hot_swap=whole.has_standbys,
        replicas=asked.count,
        reorders=asked.redundancy is not None,
    )


def _folder(part: LauncherPart, whole: RunOptions) -> Path:
    return whole.run_dir / f"replica-{part.replica}"


def _host(whole: RunOptions) -> str:
    """Return the address at which other nodes reach this one."""
    cluster = whole.cluster
    return whole.local_addr or network.own_address(cluster.host, cluster.port, cluster.node_rank == 0)


def _name(asked: ReplicaOptions, whole: RunOptions) -> tuple[str, int]:
    """Return (name, turn) of this launcher; the launcher with the lowest ``turn`` hosts the quorum server first."""
    cluster = whole.cluster
    if asked.only is None:
        return f"n{cluster.node_rank}", cluster.node_rank
    return f"r{asked.only}n{cluster.node_rank}", asked.only * cluster.nnodes + cluster.node_rank


def _place(name: str, whole: RunOptions, asked: ReplicaOptions, parts: list[LauncherPart]) -> LauncherPlace | None:
    """Return the object that holds the lease of this node's place, None in runs without standby nodes."""
    cluster, lookout = whole.cluster, None
    if not cluster.standby_nodes or asked.only is not None:
        return None
    if parts[0].is_standby:
        others = [place for place in range(cluster.nnodes) if place != cluster.node_rank]
        replicas_of = {place: [part.replica for part in _parts_at(place, whole, asked)] for place in others}
        lookout = Lookout(whole.run_dir, parts, cluster.node_rank, replicas_of)
    return LauncherPlace(whole.run_dir, name, cluster.node_rank, lookout)


def _parts_at(place: int, whole: RunOptions, asked: ReplicaOptions) -> list[LauncherPart]:
    cluster = whole.cluster
    return parts_of(place, cluster.nnodes, whole.nproc, asked.count, cluster.standby_nodes)


def _member(
    part: LauncherPart, whole: RunOptions, asked: ReplicaOptions, planned: list, supervisor: Supervisor, is_late: bool
) -> ReplicaMember:
    own = replica_options(part, whole, asked)
    if asked.only is not None and not part.node_rank and election.is_kept(own.run_dir):
        raise UserError(
            f"replica {part.replica} is running already in {own.run_dir}",
            "choose another --run-dir, or end the running replica",
        )
    environment = _environment(part, whole, asked, os.environ)
    return ReplicaMember(part, own, planned, environment, supervisor, is_late)


def _environment(
    part: LauncherPart, whole: RunOptions, asked: ReplicaOptions, present: Mapping[str, str]
) -> dict[str, str]:
    values = {
        **asked.environment(),
        "FT_HSDP_REPLICA": str(part.replica),
        "FT_HSDP_RUN_DIR": str(whole.run_dir),
    }
    if whole.has_standbys:
        values["FT_HSDP_IN_PLACE"] = "1"
    if part.shared:
        visible, count = _sound(whole, present)
        devices = devices_of(part, visible, count)
        values |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    return values


def _sound(whole: RunOptions, present: Mapping[str, str]) -> tuple[str | None, int]:
    """Return (CUDA_VISIBLE_DEVICES, number of devices) without the devices that must not be used (``--suspects``)."""
    visible, count = present.get("CUDA_VISIBLE_DEVICES"), options.count_gpus()
    bad = whole.left_out.seen(count, present)
    if not bad:
        return visible, count
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return ",".join(name for number, name in enumerate(names[:count]) if number not in bad), count - len(bad)


def _announcement(whole: RunOptions, asked: ReplicaOptions, parts: list[LauncherPart]) -> str:
    each = f"{parts[0].world_size} logical ranks on {parts[0].training_nodes} node(s) each"
    numbers = ", ".join(str(part.replica) for part in parts)
    here = f"standbys of {numbers}" if parts[0].is_standby else numbers
    return f"run {whole.run_dir}: {asked.count} replica(s), {each}; here: {here}"
