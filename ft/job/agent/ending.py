"""Process exit for the workers of ``ft run``: like Python's own exit, but safe while threads are blocked in C++ code.

While Python finalises the interpreter, it ends any thread that returns from C++ and requests the interpreter lock (up
to Python 3.13). C++ frames of torch's bindings must not be unwound in that way: the whole process aborts with
"terminate called without an active exception". After a recovery, a worker may have such threads, which wait for an
abandoned operation or for a connection to close. These waits cannot be ended from outside. So this module ends the
process without finalising the interpreter.
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
from collections.abc import Callable
from typing import IO, NoReturn

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
