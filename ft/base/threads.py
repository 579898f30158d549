"""Starts threads; where the system allows no further one, that is an error which passes, as any other of the system."""

import errno
import threading
from collections.abc import Callable
from typing import Any


def start(target: Callable[..., Any], args: tuple[Any, ...] = (), name: str | None = None) -> threading.Thread:
    """Start a daemon thread and return it.

    Raises:
        OSError: the system allows no further thread at present.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    return thread
