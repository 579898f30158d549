"""Commands of ``ft`` in tests, without the seconds that each of their processes would spend on imports.

The warm server forks a command instead of starting an interpreter, and so does the command with the processes that its
supervisor (:mod:`ft.platform.supervisor`) starts: node agents, control plane, warm pool. All of them run the production
code from their entry point on; only their modules are imported already. The processes of one command::

    warm server
      keeper            subreaper of the command; tells the test how it ends; kills what is left of it
        command         ft run ...
          spawner       forked from the command before it had threads; forks its children
          child         such as the control plane; a child of the command, as if the command had started it itself

With FT_TESTS_REAL_PROCESSES=1 all commands are started as a user starts them. :class:`harness.started.Started` is the
test's side.
"""

import atexit
import contextlib
import functools
import json
import os
import random
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from types import SimpleNamespace

from nodes import kernel

from ft.base.checkout import CHECKOUT
from ft.platform import supervisor
from harness import processes, wire

_BOOT = re.compile(re.escape(supervisor.command("MODULE", [], 0, True)[2]).replace("MODULE", r"(\S+)"))
"""The Python source of a supervised process; its group is the module."""
_WITHOUT_CHILDREN = ("ft.job.agent.warm", "ft.job.agent.control_plane")
"""Modules whose processes start no supervised children and therefore need no spawner."""
_HARMLESS = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "TORCH_CPP_LOG_LEVEL"}


def keep(request: dict, report: socket.socket, output: int, network: int | None) -> None:
    """Run a command in a child process until the test closes its end of ``report``; does not return.

    Args:
        request: {"words": arguments of ``ft``, "cwd": folder, "env": all environment variables, "hostname": name of
            the simulated host (:mod:`nodes`) that it runs on, or None}.
        report: receives (pid of this process, pid of the command), and later the command's exit code.
        output: descriptor of the file for standard output and standard error.
        network: descriptor of that host's network namespace, None without a simulated host.
    """
    processes.adopt_orphans()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    command = os.fork()
    if command == 0:
        if network is not None:
            kernel.enter(network, request["hostname"])
        _become({0: os.open(os.devnull, os.O_RDONLY), 1: output, 2: output}, request["env"], request["cwd"])
        _end_with(lambda: _run_ft(request["words"]))
    os.close(output)
    wire.send(report, (os.getpid(), command))
    while True:
        readable, _, _ = select.select([report, wake_read], [], [])
        if report in readable:
            processes.end(processes.members((), {os.getpid()}))
            os._exit(0)
        os.read(wake_read, 4096)
        for pid, status in processes.ended_children():
            if pid == command:
                wire.send(report, os.waitstatus_to_exitcode(status))


def _run_ft(words: list[str]) -> None:
    processes.adopt_orphans()
    _Spawner().install()
    sys.argv = ["ft", *words]
    runpy.run_module("ft", run_name="__main__", alter_sys=True)


def _become(descriptors: Mapping[int, int], env: Mapping[str, str], cwd: str | None) -> None:
    """Give this forked process what a started one would have.

    Args:
        descriptors: number in this process -> descriptor that it is a copy of; all others are closed.
        env: all environment variables.
        cwd: working directory; None: that of the parent.
    """
    os.setsid()
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    above = max(*descriptors.values(), *descriptors) + 1
    for offset, source in enumerate(descriptors.values()):
        os.dup2(source, above + offset)
    for offset, number in enumerate(descriptors):
        os.dup2(above + offset, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in descriptors:
            with contextlib.suppress(OSError):
                os.close(int(name))
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    extra = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [os.getcwd(), *extra, *interpreter_path()]
    random.seed()


@functools.cache
def interpreter_path() -> list[str]:
    """Return ``sys.path`` of an interpreter that is started without PYTHONPATH, except its first entry."""
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return json.loads(subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True).stdout)


def _end_with(main) -> None:
    """Call ``main`` and end this process with the exit code that an interpreter would end with."""
    status = 1
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


class _Spawner:
    """Forks the children of this process from a process that has no threads."""

    def __init__(self):
        self._socket, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            processes.die_with_parent(signal.SIGKILL)
            with contextlib.suppress(EOFError, OSError):
                while os.getppid() == parent:
                    self._serve(theirs)
            os._exit(0)
        theirs.close()

    def install(self) -> None:
        """Let the supervisor of this process start its children here. The supervisor knows the spawner as a child."""
        spawner, begin = self, supervisor.Supervisor.__init__

        class Forked(subprocess.Popen):
            def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
                _, _, _, *pipes = rest[:9]
                env = dict(os.environ if env is None else env)
                if not _can_be_forked(args, env):
                    super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
                    return
                to_child, _, _, from_child, _, errors = pipes
                numbers = {0: to_child, 1: from_child, 2: errors, **{fd: fd for fd in pass_fds}}
                self.pid = spawner.spawn(args[2], args[3:], env, numbers)
                self._child_created = True
                self._close_pipe_fds(*pipes)

        def register(self):
            begin(self)
            self._children[spawner.pid] = (SimpleNamespace(returncode=None), lambda code: None)

        supervisor.Supervisor.__init__ = register
        supervisor.subprocess = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)

    def spawn(self, code: str, arguments: list[str], env: dict, numbers: dict[int, int]) -> int:
        """Fork a child of this process that executes ``code``; return its pid.

        Args:
            code: Python source, as for ``python -c``.
            arguments: content of ``sys.argv[1:]``.
            env: all environment variables.
            numbers: number of a descriptor in the child -> descriptor of this process.
        """
        wire.send(self._socket, (code, arguments, env, list(numbers)))
        socket.send_fds(self._socket, [b"f"], list(numbers.values()))
        return wire.receive(self._socket)

    @staticmethod
    def _serve(sock: socket.socket) -> None:
        """Fork one child. Its direct parent ends at once, so that the spawner's parent, a subreaper, adopts it."""
        code, arguments, env, numbers = wire.receive(sock)
        _, descriptors, _, _ = socket.recv_fds(sock, 1, len(numbers))
        started, go = os.pipe(), os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(started[1], str(pid).encode())
                os._exit(0)
            os.read(go[0], 1)
            _become(dict(zip(numbers, descriptors, strict=True)), env, None)
            _end_with(lambda: _boot(code, arguments))
        os.waitpid(between, 0)
        pid = int(os.read(started[0], 32))
        os.write(go[1], b"!")
        for descriptor in (*started, *go, *descriptors):
            os.close(descriptor)
        wire.send(sock, pid)


def _boot(code: str, arguments: list[str]) -> None:
    if _BOOT.fullmatch(code)[1] not in _WITHOUT_CHILDREN:
        processes.adopt_orphans()
        _Spawner().install()
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})


def _can_be_forked(args: list[str], env: Mapping[str, str]) -> bool:
    """Return whether a child would import the modules that the warm server has imported."""
    is_ours = len(args) > 2 and args[:2] == [sys.executable, "-c"] and _BOOT.fullmatch(args[2])
    if not is_ours or not has_usual_variables(env):
        return False
    if is_ours[1] == "ft.job.agent.warm":
        config = json.loads(args[-1])
        folder = os.path.dirname(os.path.abspath(config["target"]))
        foreign = os.path.exists(f"{folder}/megatron") and not os.path.samefile(folder, CHECKOUT)
        return not foreign and not config["preload"]
    return True


def has_usual_variables(env: Mapping[str, str]) -> bool:
    """Return whether libraries would act on ``env``, when they are imported, as they did in the warm server."""
    return env.get("OMP_NUM_THREADS", "1") == "1" and _special(env) == _USUAL


def _special(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables on which libraries act when they are imported."""
    prefixes = ("LD_", "PYTHON", "TORCH_", "MKL_", "GLOO_", "NUMBA_")
    return {name: value for name, value in env.items() if name.startswith(prefixes) and name not in _HARMLESS}


_USUAL = _special(os.environ)
"""Those of the test process, with which the warm server was started."""
