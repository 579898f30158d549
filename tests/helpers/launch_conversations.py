"""Conversations about the start of a run: what follows from the flags of ``ft run``, and who runs where."""

import argparse
import contextlib
import io
import json
import re
from unittest import mock

import small_runs
from conversations import Player, changed, shown

from ft import faults as inject
from ft.base.checkout import CHECKOUT
from ft.base.flags import Parser
from ft.commands import arguments, protection
from ft.commands.run import plan_faults
from ft.job.agent.agent import first_ranks
from ft.job.agent.options import Script, resolve
from ft.job.control.timeouts import BEHIND_ETCD, timeouts_of
from ft.job.quorum.server import parse_options
from ft.job.replicas import flags, places
from ft.job.replicas.places import LauncherPart, devices_of, parts_of
from ft.job.replicas.policy import ReplicaView, after_exit, judge
from ft.platform import network, slurm
from ft.systems.hsdp.place import ReplicaContext
from ft.systems.spare import placement
from ft.systems.spare.ruler import ruler


class Launch(Player):
    """Flags of ``ft run`` and variables of a job, and the options that follow from them.

    The current folder has the script ``train.py``.
    """

    def __init__(self, folder):
        super().__init__(folder)
        (folder / "train.py").write_text("import json\n")
        self.environment, self.interfaces = {}, {"lo": "127.0.0.1"}

    def do_job(self, **environment):
        """From now on these variables are set, and no others."""
        self.environment = {name: str(value) for name, value in environment.items()}

    def do_interfaces(self, **addresses):
        """The network interfaces of this node, with their addresses."""
        self.interfaces = {"lo": "127.0.0.1", **addresses}

    def line_run(self, text):
        """Show the options of ``ft run`` with these flags, and the faults that are planned."""
        words = text.split()
        parser = Parser(prog="ft run", allow_abbrev=False, is_launcher=True)
        arguments.add_flags(parser)
        given = parser.parse_args(words)
        with contextlib.chdir(self.folder), mock.patch.object(network, "interfaces", lambda: self.interfaces):
            options = resolve(given, self.environment)
            faults = plan_faults(options, given)
        ranks = f"logical ranks {first_ranks(options)} of {options.world_size}, standbys {options.standbys_here}"
        told = " ".join(f"{name}={value}" for name, value in changed(options) if name not in ("script", "cluster"))
        script, cluster = shown(options.script), shown(options.cluster)
        return [
            *(script, cluster, told),
            ranks,
            *map(shown, faults),
        ]

    def line_flags(self, text):
        """Show what is made of flags that the parser of the launcher reads, with the flags of the trainer beside."""
        parser = Parser(prog="ft run", is_launcher=True, scripts_flags=protection.trainers_flags)
        arguments.add_flags(parser)
        given = parser.parse_args(text.split())
        problems = [f"{problem}: {fix}" for problem, fix in given.problems]
        return [*problems, f"{given.script} {given.script_args}, workers {given.nproc_per_node}"]

    def line_protects(self, text):
        """Show what is refused, and how a run is protected.

        ``SIZE[/REPLICAS] [FLAGS OF ft run] SCRIPT [FLAGS OF THE TRAINER]``; ``SCRIPT``: ``pretrain_gpt.py``,
        a ``copy.py`` of it, or ``train.py``.
        """
        size, asked, script, flags = re.fullmatch(r"(\S+) (.*?) ?(\S+\.py) ?(.*)", text).groups()
        world, _, replicas = size.partition("/")
        (self.folder / "copy.py").write_bytes((CHECKOUT / "pretrain_gpt.py").read_bytes())
        path = (CHECKOUT if script == "pretrain_gpt.py" else self.folder) / script
        line = protection.LaunchLine(int(world), asked.split(", ") if asked else [], int(replicas or 0))
        specs = [word.removeprefix("--inject ") for word in line.flags if word.startswith("--inject ")]
        faults = inject.schedule(inject.parse(" ".join(specs)), line.world_size, ["n0"], 0) if specs else []
        words = f"{small_runs.BASE} --mock-data {flags}".split()
        found, problems = protection.examine(Script(str(path), False, words), line, faults)
        return [*(f"{problem}; fix: {fix}" for problem, fix in problems), shown(found)]

    def do_announced(self, by, copies=0, nodes=1):
        """Show what is said of a protection at the start; ``joined``: of a script that has asked for it."""
        if by == "joined":
            return [protection.has_joined(nodes)]
        return [protection.announcement(protection.RunProtection(by, copies), nodes)]

    def line_hosts(self, text):
        """Show the nodes of a list of Slurm."""
        return [" ".join(slurm.hosts(text))]

    def do_topology(self, name, agent, *hosts):
        """Show where a file of the topology has the first of these hosts that it knows, or else the agent."""
        host, domains = slurm.read_topology(self.folder / name).find(list(hosts), agent)
        return [f"{host}: {domains}"]

    def do_limits(self, *words):
        """Show the timeouts that a file changes, with the control plane in ``etcd`` or not."""
        paths = [word.replace("RUN", str(self.folder)) for word in words if word != "etcd"]
        found = timeouts_of(paths[0] if paths else None, BEHIND_ETCD if "etcd" in words else {})
        return [f"changed: {found.changed()}"]


VIEWS = {
    "up": ReplicaView(up=True),
    "waiting": ReplicaView(up=False),
    "finished": ReplicaView(up=False, code=0),
    "early": ReplicaView(up=False, code=75),
    "unsaved": ReplicaView(up=False, code=74),
    "failed": ReplicaView(up=False, code=3, given_up=True),
    "bad-input": ReplicaView(up=False, code=2, given_up=True),
}
"""A replica as the launcher sees it; others are given as JSON."""


class Replicas(Player):
    """What the launcher of replicas decides: who runs where, who is started again, when it is over."""

    def do_parts(self, nodes, workers, replicas, standby_nodes=0):
        """Show what each node of a run has of replicas."""
        return [
            f"node {rank}: {shown(part)}{' standby' * part.is_standby}, world of {part.world_size}"
            for rank in range(nodes)
            for part in parts_of(rank, nodes, workers, replicas, standby_nodes)
        ]

    def do_devices(self, count, visible=None, **part):
        """Show the devices of the workers of a part, on a node with so many."""
        return [str(devices_of(LauncherPart(**part), visible, count))]

    def line_asked(self, text):
        """Show what flags ask for: options, variables of workers, and options of the quorum server."""
        parser = argparse.ArgumentParser(prog="ft run", allow_abbrev=False)
        arguments.add_flags(parser)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                given = parser.parse_args([*text.split(), "script.py", "--lr", "1"])
        except SystemExit:
            return [said.getvalue().splitlines()[-1]]
        if not flags.wanted(given):
            return ["no replicas"]
        found = flags.read(given, ruler, placement.read)
        options = json.dumps(found.server_options("10.0.0.1"))
        server = parse_options(options).options
        limits = f"limits: wait_s={server.limits.wait_s:g} arrive_s={server.limits.arrive_s:g}"
        variables = found.environment()
        place = {"FT_HSDP_REPLICA": "0", "FT_HSDP_RUN_DIR": "/tmp"}
        worker = ReplicaContext.from_environment({**variables, **place})
        sizes = f"rings: chunk_bytes={worker.chunk_bytes} chunks={worker.chunks} streams={worker.streams}"
        listed = " ".join(f"{name}={value}" for name, value in variables.items())
        return [shown(found), listed, sizes, options, limits]

    def line_faults(self, text):
        """Show the faults of each of three replicas with two workers; ``seed=N`` may stand before them."""
        seed, specs = re.fullmatch(r"(?:seed=(\d+) )?(.*)", text).groups()
        found, number = inject.read_specs(specs.split(), None, int(seed or 1))
        planned = places.plan_faults(found, 3, LauncherPart(0, 1, 0, 2), number)
        return [f"replica {replica}: {shown(fault)}" for replica, faults in planned.items() for fault in faults]

    def do_exit(self, code, *lives):
        """Show what follows from the end of an agent; ``lives``: for how many seconds each one so far has lived."""
        how = f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return [shown(after_exit(code, how, lives))]

    def do_judge(self, *views, finished_s=None, lost=(), least=1, told=(), of=None, first=0):
        """Show what the launcher does; ``views``: those of its replicas, from the number ``first`` on."""
        found = [VIEWS[view] if isinstance(view, str) else ReplicaView(**view) for view in views]
        replicas = dict(enumerate(found, first))
        return [shown(judge(replicas, finished_s, set(lost), of or len(views), least, told))]


PLAYERS = {"launch": Launch, "replicas": Replicas}
