"""A forked rank: it sets up its session, environment and output, runs the test's function, and reports the result.

In the directory of its call, rank i writes ``i.log`` (stdout and stderr), ``i.stack`` (its stack at the time of a
SIGUSR1) and ``i.report``: a pickle of ("value", result) or
("error", monotonic time, traceback, the exception in one line).
"""

import atexit
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

from harness import processes


def main(request: dict, rank: int, port: int, server: int) -> int:
    """Run the function of `request` as rank `rank`; return the exit code of the process."""
    os.setsid()
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != server:
        return 1
    folder = Path(request["folder"])
    _redirect_output(folder / f"{rank}.log")
    stack = open(folder / f"{rank}.stack", "w")  # noqa: SIM115 - open for as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=sys.stderr)
    _set_environment(request, rank, port)
    try:
        try:
            value = _run(request, rank)
            _report(folder, rank, ("value", value))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        # In a real run, helper processes and threads of the function end with the interpreter: end them here too.
        atexit._run_exitfuncs()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        text = "".join(traceback.format_exception(type(error), error, _without_harness(error.__traceback__)))
        summary = traceback.format_exception_only(error)[0].strip().splitlines()[0]
        _report(folder, rank, ("error", time.monotonic(), text, summary))
        return 1
    return 0


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _set_environment(request: dict, rank: int, port: int) -> None:
    import torch

    world_size = request["world_size"]
    os.environ.clear()
    os.environ.update(request["environ"])
    os.environ.update(
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.path[:] = request["sys_path"]
    torch.set_num_threads(1)


def _run(request: dict, rank: int):
    function = _find(*request["function"])
    args, kwargs = pickle.loads(request["arguments"])
    if request["init"]:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{request['folder']}/store",
            rank=rank,
            world_size=request["world_size"],
            timeout=timedelta(seconds=request["collective_timeout"]),
        )
    return function(*args, **kwargs)


def _find(module: str, qualname: str, path: str):
    """Return the function `qualname` of the test module `module`, imported by name or else from its file."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        spec = importlib.util.spec_from_file_location(module, path)
        found = importlib.util.module_from_spec(spec)
        sys.modules[module] = found
        spec.loader.exec_module(found)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _report(folder: Path, rank: int, report: tuple) -> None:
    data = pickle.dumps(report)
    unfinished = folder / f"{rank}.unfinished"
    unfinished.write_bytes(data)
    unfinished.rename(folder / f"{rank}.report")


def _without_harness(trace):
    """Return the traceback from the first frame outside this package on; all of it if there is none."""
    here = os.path.dirname(__file__)
    inner = trace
    while inner is not None and os.path.dirname(inner.tb_frame.f_code.co_filename) == here:
        inner = inner.tb_next
    return inner or trace
