"""Child processes of the launcher: they die with it, and receive Ctrl-C only through it."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ft.base.checkout import CHECKOUT
from ft.platform import processes

_BOOT = "import sys; sys.path[0] = sys.argv.pop(1); from ft.job.replicas.child import main; main()"
_ORPHANED = 70


def start(
    module: str,
    arguments: list[str],
    out: Path,
    err: Path,
    environment: Mapping[str, str],
    deaf: bool = False,
) -> subprocess.Popen:
    """Start ``python -m module arguments``, importing ``ft`` from the same folder as this process.

    Args:
        module: module to run.
        arguments: its command-line arguments.
        out: file that standard output is appended to.
        err: file that standard error is appended to.
        environment: variables set in addition to those of this process.
        deaf: ignore SIGINT and SIGTERM, which Slurm may send to all processes of a job step.

    Raises:
        OSError: a file cannot be written, or no process can be created.
    """
    with open(out, "ab") as stdout, open(err, "ab") as stderr:
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(CHECKOUT), str(os.getpid()), "deaf" if deaf else "", module, *arguments],
            env={**os.environ, **environment},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )


def main() -> None:
    """Entry point of the process: ``sys.argv[1:]`` is (pid of the launcher, "deaf" or "", module, its arguments)."""
    launcher, deaf, module = int(sys.argv.pop(1)), sys.argv.pop(1), sys.argv.pop(1)
    processes.die_with_parent(signal.SIGKILL)
    for signum in (signal.SIGINT, signal.SIGTERM) if deaf else ():
        signal.signal(signum, signal.SIG_IGN)
    if os.getppid() != launcher:
        os._exit(_ORPHANED)
    sys.argv[0] = module
    runpy.run_module(module, run_name="__main__", alter_sys=True)
