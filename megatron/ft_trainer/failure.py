"""Stops all ranks of a job within seconds when one rank fails, so that the first error is printed once.

It serves jobs that are started by torchrun, srun or mpirun; in jobs of ``ft run`` the control plane does this.
"""

import os
import sys
import threading
import traceback
from datetime import timedelta

import torch.distributed as dist

from ft.base.errors import FtError, UserError

POLL_S = 0.3
EXIT_CODE = 1


class FailureNotice:
    """A key in the job's TCPStore that the first failing rank sets and all other ranks watch.

    A thread of each rank polls the key every POLL_S seconds, and ends the process when the key is set. This object has
    its own connection to the store of ``init_process_group``, because torch's connection is busy whenever the trainer
    creates a process group. If the connection fails, the node that hosts the store is lost, and this rank ends too.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._store = dist.PrefixStore(
            f"failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=30),
            ),
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure-notice", daemon=True)
        self._thread.start()

    def claim(self) -> bool:
        """Set the key. Return True on the first rank that does so: its error is the cause of the others' errors.

        Return False if the store cannot be reached.
        """
        self._stop.set()
        try:
            return self._store.add("claims", 1) == 1
        except RuntimeError:
            return False

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                failed = self._store.check(["claims"])
            except RuntimeError:
                failed = not self._stop.is_set()
            if failed and not self._stop.is_set():
                os._exit(EXIT_CODE)


def report(error: BaseException, rank: int) -> int:
    """Print ``error``, with a traceback only if it is of an unexpected type (no FtError or UserError).

    Returns:
        the exit code for it.
    """
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    head = f"rank {rank} failed: {type(error).__name__}: {error}"
    if isinstance(error, FtError):
        print(head, file=sys.stderr, flush=True)
    else:
        print("".join(traceback.format_exception(error)) + head, file=sys.stderr, flush=True)
    return EXIT_CODE
