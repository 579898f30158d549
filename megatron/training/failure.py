"""Stops all ranks within seconds when one rank fails, and shows the first error once."""

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
    """A key in the job's store that the first failing rank sets and all other ranks watch.

    It has its own connection to the store of ``init_process_group``, because torch's connection is busy whenever the
    trainer makes a group. If the store is lost, its host is lost, and this rank ends too.
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
        """Return True on the first rank of the job that calls this: its error is the cause of later errors."""
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
    """Print ``error`` once, with a traceback only if it is unexpected.

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
