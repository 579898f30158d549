"""Runs the training script in a worker forked from the warm pool, as if it were started with ``python script``.

The warm pool is a process of ``ft run`` that has imported torch and megatron. The node agent supervises the workers.
"""

import errno
import faulthandler
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import time
import types
from pathlib import Path

from ft.base import output
from ft.base.errors import UserError
from ft.job.agent import ending
from ft.platform import processes

_ORPHANED = 70


def become_worker(born_of: int, agent: int, log: str, environment: dict[str, str]) -> None:
    """Turn a process forked from the warm pool into a worker, with its own session, output and environment.

    The kernel kills the worker when its agent dies.

    Args:
        born_of: pid of the parent, which is about to exit; the agent then becomes this process's parent.
        agent: pid of the node agent.
        log: file for stdout and stderr.
        environment: variables to set.
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


def run(target: str, is_module: bool, args: list[str]) -> int:
    """Run a script or module as ``__main__``, and return the exit status that ``python`` would give.

    An uncaught exception is printed as Python prints it, a UserError as ``ft`` does, with its exit code.

    Args:
        target: path of the script, or name of the module.
        is_module: whether ``target`` is the name of a module.
        args: command-line arguments of the script.
    """
    sys.argv = [target, *args]
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_file(target)
    except SystemExit as end:
        return ending.status_of(end)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except BaseException as error:
        trace = _without_launcher(error)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def search_path(script: str, is_module: bool, path: list[str]) -> list[str]:
    """Return ``sys.path`` as Python sets it for a script or, with ``-m``, a module.

    Args:
        script: path of the script, or name of the module.
        is_module: whether ``script`` is the name of a module.
        path: ``sys.path`` of this process.
    """
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


def _without_launcher(error: BaseException):
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
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
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
    sys.stdout = sys.__stdout__ = output.stream_for(1)
    sys.stderr = sys.__stderr__ = output.stream_for(2)
