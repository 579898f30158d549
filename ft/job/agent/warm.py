"""The warm pool of ``ft run``: a process that has imported torch, megatron and the script's modules, and forks workers.

It forks a worker whenever the node agent requests one. The pool has a single thread and initialises no device, because
a forked process could use neither its threads nor its devices. A worker is forked twice: its direct parent exits, and
the agent, which is a subreaper, becomes its parent and is notified of its exit at once. The worker runs the training
script as if it were started with ``python script``. When the agent dies, the pool kills all processes that its workers
have started, and exits.

Protocol, one JSON object per line. Requests: ``{"fork": {"worker", "log", "env"}}`` (start a worker),
``{"guard": [pid, ...]}`` (workers of an earlier pool, which this pool kills with the agent), ``{"forget": pid}`` (a
worker has ended). Answers: ``{"ready": seconds}``, ``{"worker", "pid"}`` (a worker was started), ``{"note": text}``.
:mod:`ft.job.agent.pool` starts this process and sends the requests.

A worker ends like Python itself, but safely while threads are blocked in C++ code (:func:`leave`). While Python
finalises the interpreter, it ends any thread that returns from C++ and requests the interpreter lock (up to Python
3.13). C++ frames of torch's bindings must not be unwound in that way: the whole process aborts with "terminate called
without an active exception". After a recovery, a worker may have such threads, which wait for an abandoned operation or
for a connection to close. These waits cannot be ended from outside. So the process ends without finalising the
interpreter.
"""

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib.machinery
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from ft.base import bounded_json, files, output
from ft.base.errors import UserError
from ft.job.agent import preload
from ft.platform import processes
from ft.platform.supervisor import command

_ORPHANED = 70


def become_worker(born_of: int, agent: int, log: str, environment: dict[str, str]) -> None:
    """Turn a process forked from the warm pool into a worker, with its own session, output and environment.

    The kernel kills the worker when its agent dies.

    Args:
        born_of: pid of the parent, which is about to exit; the agent then becomes this process's parent.
    """
    os.setsid()
    while os.getppid() == born_of:
        time.sleep(0.0001)
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(_ORPHANED)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _own_output(log)
    os.environ.update(environment)
    numpy = sys.modules.get("numpy")
    # numpy was seeded when the pool imported it: without a new seed, all workers would draw the same numbers
    if numpy is not None:
        numpy.random.seed()
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def run_script(target: str, is_module: bool, args: list[str]) -> int:
    """Run a script or module as ``__main__``, and return the exit status that ``python`` would give.

    An uncaught exception is printed as Python prints it, a UserError as ``ft`` does, with its exit code.
    """
    sys.argv = [target, *args]
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_file(target)
    except SystemExit as end:
        return status_of(end)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except BaseException as error:
        trace = _without_launcher(error)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def search_path(script: str, is_module: bool, path: list[str]) -> list[str]:
    """Return ``sys.path`` as Python sets it for a script or, with ``-m``, a module."""
    return [os.getcwd() if is_module else str(Path(script).absolute().parent), *path]


def _run_file(script: str) -> None:
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    main.__dict__.update(__file__=script, __builtins__=__builtins__, __loader__=loader, __spec__=None)
    with io.open_code(script) as file:
        code = compile(file.read(), script, "exec")
    # never removed again: pickles and threads look the module up even after the script's last line
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _without_launcher(error: BaseException) -> types.TracebackType | None:
    """Return the traceback from the script's first frame on, None for an error before that (such as a syntax error)."""
    here = os.path.dirname(__file__)
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if os.path.dirname(file) != here and not file.startswith("<frozen"):
            return trace
        trace = trace.tb_next
    return None


def _own_output(path: str) -> None:
    try:
        log = files.open_no_link(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        log = os.open(os.devnull, os.O_WRONLY)  # no room for one more file: the worker trains all the same
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    # The output is no terminal, so Python cannot derive an encoding: without UTF-8, printing a progress bar could fail.
    sys.stdout = sys.__stdout__ = output.stream_for(1)  # type: ignore[misc]  # typeshed: Final
    sys.stderr = sys.__stderr__ = output.stream_for(2)  # type: ignore[misc]  # typeshed: Final


_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


class Pool:
    """The pool's end of the protocol with the agent.

    Args:
        config: {"target", "is_module", "args", "preload"} and, after a new start, {"withheld", "probes"}.
    """

    def __init__(self, sock: socket.socket, agent: int, config: dict[str, Any]):
        self._sock, self._agent, self.config = sock, agent, config
        self._reader = sock.makefile("rb")
        self._sessions: set[int] = set()

    def say(self, **message: Any) -> None:
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def keep_open(self) -> int:
        """Make the socket survive an exec, and return its file descriptor."""
        self._sock.set_inheritable(True)
        return self._sock.fileno()

    def serve(self) -> None:
        """Fork workers on request. Return only in a new worker.

        When the agent has ended, kill all processes that workers have started, and exit.
        """
        try:
            for line in self._reader:
                message = bounded_json.loads(line, non_finite=True)
                if "fork" in message:
                    if self._fork(**message["fork"]):
                        return
                elif "guard" in message:
                    self._sessions.update(message["guard"])
                else:
                    self._sessions.discard(message["forget"])
        except OSError:
            pass
        self._bury()

    def _fork(self, worker: str, log: str, env: dict[str, str]) -> bool:
        """Fork a worker. Return True in the worker, False in the pool."""
        read, write = os.pipe()
        # this process ignores SIGTERM; a worker gets one that is sent before it no longer does, because it is blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        between = os.fork()
        if between == 0:
            between = os.getpid()
            pid = os.fork()
            if pid:
                os.write(write, str(pid).encode())
                os._exit(0)
            os.close(read)
            os.close(write)
            self._reader.close()
            self._sock.close()
            processes.set_name(worker)
            become_worker(between, self._agent, log, env)
            return True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.close(write)
        pid = int(os.read(read, 32))
        os.close(read)
        os.waitpid(between, 0)
        self._sessions.add(pid)
        self.say(worker=worker, pid=pid)
        return False

    def _bury(self) -> None:
        """Kill the processes that workers have started, and exit. The workers themselves die with the agent."""
        for pid in processes.members(self._sessions):
            processes.send(pid, signal.SIGKILL)
        os._exit(0)


def main() -> None:
    """Run the pool's process.

    ``sys.argv[1:]`` is (descriptor of the socket, config).
    """
    started, agent = time.monotonic(), os.getppid()
    fd, text = sys.argv[1:]
    config = bounded_json.loads(text, non_finite=True)
    pool = Pool(socket.socket(fileno=int(fd)), agent, config)
    root = sys.path[0]
    sys.path[:] = search_path(config["target"], config["is_module"], _interpreter_path(root))
    sys.argv = [config["target"], *config["args"]]
    # Without the first one, counting GPUs would initialise CUDA, which forked processes could not use. Without the
    # second one, torch 2.8 would start processes and threads for compilation when it is imported beside Triton.
    given = dict(os.environ)
    own = {name: value for name, value in ((_NVML_CHECK, "1"), ("TORCH_WARM_POOL", "0")) if name not in os.environ}
    os.environ.update(own)
    _preload(pool, agent, given)
    for name in own:
        del os.environ[name]
    # from here on, the pool detects the agent's death by the end of the socket, and first kills the workers' processes
    processes.die_with_parent(0)
    if os.getppid() != agent:
        os._exit(0)
    processes.set_name("ft-pool")
    pool.say(ready=round(time.monotonic() - started, 3))
    pool.serve()
    leave(run_script(config["target"], config["is_module"], config["args"]))


def _interpreter_path(root: str) -> list[str]:
    """Return ``sys.path`` without its first entry, which is not the interpreter's, but with ``root``, ft's folder."""
    rest = sys.path[1:]
    return rest if root in rest else [root, *rest]


def _preload(pool: Pool, agent: int, environment: Mapping[str, str]) -> None:
    """Import the modules that workers need. If one makes forking impossible, exec this process without it.

    Args:
        environment: the variables with which this process has been started.
    """
    config = pool.config
    withheld, probes = set(config.get("withheld", [])), config.get("probes", False)
    names = preload.plan(config["target"], config["is_module"], config["preload"])
    again: dict[str, Any] = {}
    try:
        broken = preload.load(names, withheld, probes)
        if broken:
            pool.say(note=f"warm pool: CUDA cannot be initialised on this node ({broken})")
        elif not probes and (why := preload.why_children_fail()):
            pool.say(
                note=f"warm pool: after the imports, forked workers cannot use CUDA ({why}); the cause is searched"
            )
            again = {"probes": True}
    except preload.UnfitForForking as error:
        new = sorted(error.roots - withheld or {error.module} - withheld)
        what = f"{', '.join(new)} themselves, and all that needs it" if new else "everything themselves"
        pool.say(note=f"warm pool: {error}; workers will import {what}")
        again = {"withheld": [*withheld, *new]} if new else {"preload": ["none"]}
    if again:
        text = json.dumps({**config, **again})
        words = command(__name__, [str(pool.keep_open()), text], agent, ignores_signals=True)
        os.execve(sys.executable, words, environment)


# --- the end of a worker ----------------------------------------------------------------------------------------------


_FLUSH_S = 5.0
_NOT_FLUSHED = 120  # Python's own exit code when it cannot flush stdout
_ANY = io.IOBase.__base__
_PLAIN = (io.FileIO, io.BytesIO, io.StringIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)


def status_of(end: SystemExit) -> int:
    """Return the exit status that Python gives for a SystemExit. If its code is a message, print it to stderr."""
    code = end.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there is no stderr, or it is closed
        print(code, file=sys.stderr, flush=True)
    return 1


def leave(status: int) -> NoReturn:
    """End this process with ``status``, after the steps that Python takes at the exit of a program.

    Non-daemon threads are joined, exit handlers run, output is flushed, and buffered data of open files is written. If
    a daemon thread is still alive, the interpreter is not finalised. The destructors that would run during finalisation
    then do not run; Python does not guarantee that they run.
    """
    _quietly(threading._shutdown)  # type: ignore[attr-defined]  # Python calls it as well; it also ends the threads of concurrent.futures
    if all(thread is threading.current_thread() for thread in threading.enumerate()):
        sys.exit(status)
    _quietly(atexit._run_exitfuncs)
    if not all([_flushed(sys.stdout), _flushed(sys.stderr)]):
        status = _NOT_FLUSHED
    files = threading.Thread(target=_write_files, daemon=True)
    files.start()
    files.join(_FLUSH_S)  # a thread that is blocked in a write holds the lock of its file
    os._exit(status)


def _quietly(call: Callable[[], object]) -> None:
    """Call a function. If it raises any exception, print the exception and continue, as Python does at exit."""
    try:
        call()
    except BaseException:
        traceback.print_exc()


def _flushed(stream: IO[str] | None) -> bool:
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except Exception:
        return False
    return True


def _write_files() -> None:
    """Flush the files that the program has not closed, and the output buffers of C libraries."""
    gc.unfreeze()
    files = [thing for thing in gc.get_objects() if _ANY in type(thing).__mro__]
    texts = [file for file in files if isinstance(file, io.TextIOWrapper)]
    packed = [file for file in files if not isinstance(file, _PLAIN)]  # a compressed file needs its end to be written
    for file in texts:
        with contextlib.suppress(Exception):
            file.flush()
    for file in packed:
        with contextlib.suppress(Exception):
            if file.writable():
                file.close()
    for file in files:
        with contextlib.suppress(Exception):
            if isinstance(file, io.BufferedWriter | io.BufferedRandom):
                file.flush()
    ctypes.CDLL(None).fflush(None)
