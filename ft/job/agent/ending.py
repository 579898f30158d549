"""The end of a worker's process: as ``python`` ends it, but the interpreter is not finalised under living threads.

While the interpreter is being finalised, a thread that comes back from C++ and asks for its lock is ended on the spot
(up to Python 3.13). If one of its C++ frames must not be left in that way, as those of torch's bindings, the whole
process aborts with "terminate called without an active exception". After a recovery a worker may have such threads:
they wait for an operation that was given up, or for the end of a connection. These waits cannot be ended from outside,
so the process ends first.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
import threading
import traceback
from typing import NoReturn

_FLUSH_S = 5.0
_NOT_FLUSHED = 120  # Python's own exit code for that
_ANY = io.IOBase.__base__
_PLAIN = (io.FileIO, io.BytesIO, io.StringIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)


def status_of(end: SystemExit) -> int:
    """The exit status that Python gives for it; a reason in words is printed, as Python does."""
    code = end.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no stderr, or a closed one
        print(code, file=sys.stderr, flush=True)
    return 1


def leave(status: int) -> NoReturn:
    """Ends this process with ``status``, after all that Python does at its end for the program's sake: threads that are
    no daemons are waited for, exit handlers run, output is flushed, files left open are written to their end.

    If a daemon thread lives on, the interpreter is not finalised, and the destructors that would run then do not run;
    Python does not promise that they do.
    """
    _quietly(threading._shutdown)  # what Python calls; it also ends concurrent.futures' threads
    if all(thread is threading.current_thread() for thread in threading.enumerate()):
        sys.exit(status)
    _quietly(atexit._run_exitfuncs)
    if not all([_flushed(sys.stdout), _flushed(sys.stderr)]):
        status = _NOT_FLUSHED
    files = threading.Thread(target=_write_files, daemon=True)
    files.start()
    files.join(_FLUSH_S)  # a thread that is blocked in a write holds the lock of its file
    os._exit(status)


def _quietly(call) -> None:
    """Python goes on with its end, whatever comes out of this."""
    try:
        call()
    except BaseException:
        traceback.print_exc()


def _flushed(stream) -> bool:
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except Exception:
        return False
    return True


def _write_files() -> None:
    """Writes out what the program has written to files that it has not closed, and what C libraries have printed."""
    gc.unfreeze()
    files = [thing for thing in gc.get_objects() if _ANY in type(thing).__mro__]
    texts = [file for file in files if isinstance(file, io.TextIOWrapper)]
    packed = [file for file in files if not isinstance(file, _PLAIN)]  # a compressed file has an end to be written
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
