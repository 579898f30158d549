"""A real Slurm cluster on one machine: every node is a host of its own, made of Linux namespaces.

The hosts are connected by a bridge inside a network namespace that nothing outside can reach. Each has its own name,
processes and address, so Slurm and ``ft run`` are configured as on a cluster: names that resolve, the same port on all.
``slurmd`` is process 1 of its node: killing it kills everything on the node, as a power cut would. Nothing is written
outside the folder, and however the caller ends, even by SIGKILL, no process is left.
"""

import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

LOGIN = "login"
_NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv")
_COMMAND_S = 60.0
_PROCESSES = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={login}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_s}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldTimeout=10
SlurmdTimeout={down_s}
ReturnToService=2
TCPTimeout=1
MessageTimeout=10
KillWait={kill_wait_s}
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
TopologyPlugin=topology/none
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def reason_to_skip() -> str:
    """Return why no cluster can be started here, "" if one can."""
    missing = [name for name in _NEEDED if not shutil.which(name)]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: slurm-wlm munge iproute2 util-linux)"
    if os.geteuid() != 0:
        return "namespaces and several slurmd need root"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "ip", "link", "add", "probe", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no bridge in a namespace here: {probe.stderr.strip()}" if probe.returncode else ""


class Cluster:
    """Nodes n1 to nN and a login host, on which ``slurmctld`` and the user's commands run.

    Args:
        nodes: number of nodes.
        down_s: SlurmdTimeout: seconds after which a silent node counts as down (in fact, 5 to 10 s later).
        kill_wait_s: KillWait: seconds from SIGTERM to SIGKILL.
        requeue_s: seconds that a requeued job waits.

    Attributes:
        folder: configuration, state and logs, shared by the nodes as all of the file system is; removed by ``stop``.
    """

    def __init__(self, nodes: int, *, down_s: int = 3, kill_wait_s: int = 30, requeue_s: int = 5):
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the length of sockets' paths is limited
        self.nodes = [f"n{i + 1}" for i in range(nodes)]
        self._processes: dict[str, subprocess.Popen] = {}
        self._settings = {"down_s": down_s, "kill_wait_s": kill_wait_s, "requeue_s": requeue_s}

    def __enter__(self) -> "Cluster":
        try:
            self._write_files()
            self._start_network()
            self._start_daemons()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    # --- what a user does ---------------------------------------------------------------------------------------------

    def command(self, *words: str, environment: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        """Run a command on the login host and return its output.

        Raises:
            AssertionError: it fails.
            subprocess.TimeoutExpired: it takes longer than 20 s.
        """
        done = subprocess.run(
            [*self._on_login(), *words],
            env=self._environment(environment),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of ``scontrol show job``: JobState, NodeList, ExitCode and so on."""
        words = self.command("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, true: Callable[[], bool], limit_s: float, what: str) -> None:
        """Poll until ``true()``.

        Raises:
            AssertionError: it is still false after ``limit_s`` seconds; the text ends with the daemons' last lines.
        """
        deadline = time.monotonic() + limit_s
        while not true():
            if time.monotonic() > deadline:
                raise AssertionError(f"after {limit_s:g} s still not: {what}\n{self.explain()}")
            time.sleep(0.1)

    def explain(self) -> str:
        """Return the last lines of the daemons' logs."""
        logs = [self.folder / "slurmctld.log", *sorted(self.folder.glob("slurmd.*.log")), self.folder / "daemons.out"]
        return "".join(f"--- {log.name}\n{log.read_text()[-1500:]}\n" for log in logs if log.exists())

    # --- what happens to a cluster ------------------------------------------------------------------------------------

    def cut_power(self, node: str) -> None:
        """Kill ``slurmd`` of a node and everything under it, without any packet that would announce it."""
        self._in_network("ip", "link", "set", f"to-{node}", "down")
        self._kill(node)

    def start_node(self, node: str) -> None:
        """Boot a node; also again after its power was cut."""
        address = _address(self.nodes.index(node) + 2)
        boot = (
            f"hostname {node} && ip link set lo up && mount -t tmpfs shm /dev/shm && "
            "read plugged_in && "  # the parent has to connect the node's network cable first
            f"ip address add {address}/24 dev eth0 && ip link set eth0 up && "
            f"exec slurmd -D -N {node} -f {self.folder}/slurm.conf"
        )
        namespaces = ["--net", "--uts", "--ipc", *_PROCESSES]
        command = [*self._on_login(), "unshare", *namespaces, "sh", "-c", boot]
        process = self._start(node, command, stdin=subprocess.PIPE)
        cable = ["ip", "link", "add", f"to-{node}", "type", "veth", "peer", "name", "eth0"]
        self._in_network(*cable, "netns", str(self._child(process)))
        self._in_network("ip", "link", "set", f"to-{node}", "master", "bridge", "up")
        process.stdin.write(b"yes\n")
        process.stdin.close()

    def processes(self, node: str) -> list[str]:
        """Return the names of a node's living processes but ``slurmd``, which as process 1 inherits zombies."""
        init = self._child(self._processes[node])
        space, found = os.readlink(f"/proc/{init}/ns/pid"), []
        for name in os.listdir("/proc"):
            try:
                if name.isdigit() and int(name) != init and os.readlink(f"/proc/{name}/ns/pid") == space:
                    command, _, rest = Path(f"/proc/{name}/stat").read_text().partition("(")[2].rpartition(") ")
                    found += [command] if rest[0] not in "ZX" else []
            except OSError:
                continue
        return found

    def stop(self) -> None:
        """End everything and remove the folder. Idempotent."""
        for name in reversed(list(self._processes)):
            self._kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- how it is made -----------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        names = {LOGIN: _address(1), **{node: _address(i + 2) for i, node in enumerate(self.nodes)}}
        nodes = "\n".join(f"NodeName={n} NodeAddr={names[n]} CPUs=4 Gres=gpu:8 State=UNKNOWN" for n in self.nodes)
        settings = {"folder": self.folder, "login": LOGIN, "nodes": nodes, **self._settings}
        hosts = {"localhost": "127.0.0.1", **names}
        files = {
            "slurm.conf": _CONFIGURATION.format(**settings),
            "gres.conf": f"Name=gpu File={self.folder}/gpu[0-7]\n",
            "hosts": "".join(f"{address} {name}\n" for name, address in hosts.items()),
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)
        (self.folder / "state").mkdir()
        for i in range(8):  # device files that jobs can request; they lead to /dev/null
            os.mknod(self.folder / f"gpu{i}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _start_network(self) -> None:
        commands = [
            f"hostname {LOGIN}",
            f"mount --bind {self.folder}/hosts /etc/hosts",
            "ip link set lo up",
            "ip link add bridge type bridge",
            f"ip address add {_address(1)}/24 dev bridge",
            "ip link set bridge up",
            "exec sleep infinity",  # keeps the namespaces alive
        ]
        unshare = ["unshare", "--net", "--uts", "--mount", "sh", "-c", " && ".join(commands)]
        keeper = self._start("network", unshare)

        def is_up() -> bool:
            return os.readlink(f"/proc/{keeper.pid}/exe").endswith("/sleep")

        self.wait_for(is_up, _COMMAND_S, "the network")

    def _start_daemons(self) -> None:
        folder = self.folder
        munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket"]
        munged += [f"--key-file={folder}/munge.key", f"--pid-file={folder}/munged.pid"]
        munged += [f"--seed-file={folder}/seed", f"--log-file={folder}/munged.log"]
        slurmctld = ["slurmctld", "-D", "-i", "-f", str(folder / "slurm.conf")]
        self._start("munged", [*self._on_login(), "unshare", *_PROCESSES, *munged])
        self.wait_for((folder / "munge.socket").exists, _COMMAND_S, "munged listens")
        self._start("slurmctld", [*self._on_login(), "unshare", *_PROCESSES, *slurmctld])
        for node in self.nodes:
            self.start_node(node)
        self.wait_for(self._all_idle, 120.0, "all nodes are idle")

    def _all_idle(self) -> bool:
        try:
            states = self.command("sinfo", "--noheader", "--Node", "--format=%T").split()
        except AssertionError:
            return False
        return states == ["idle"] * len(self.nodes)

    def _start(self, name: str, command: list[str], stdin: int = subprocess.DEVNULL) -> subprocess.Popen:
        with open(self.folder / "daemons.out", "ab") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self._environment(),
                start_new_session=True,
                stdin=stdin,
                stdout=log,
                stderr=log,
            )
        self._processes[name] = process
        return process

    def _kill(self, name: str) -> None:
        """Kill what was started under this name; if it is process 1 of a namespace, all processes there end with it."""
        process = self._processes.pop(name)
        if process.stdin is not None:
            process.stdin.close()
        for pid in _children(process.pid):
            os.kill(pid, signal.SIGKILL)
        if name == "network":
            process.kill()
        try:
            process.wait(_COMMAND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _child(self, process: subprocess.Popen) -> int:
        self.wait_for(lambda: bool(_children(process.pid)), _COMMAND_S, "process 1 of a namespace")
        return _children(process.pid)[0]

    def _on_login(self) -> list[str]:
        return ["nsenter", f"--target={self._processes['network'].pid}", "--net", "--uts", "--mount", "--wd=."]

    def _in_network(self, *words: str) -> None:
        subprocess.run([*self._on_login(), *words], check=True, timeout=_COMMAND_S)

    def _environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**inherited, "SLURM_CONF": str(self.folder / "slurm.conf"), **(more or {})}


def _address(host: int) -> str:
    return f"10.77.0.{host}"


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
