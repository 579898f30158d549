"""Which sockets of this process belong to a connection, and shutting them without closing them.

gloo offers no way to end an operation that is blocked, but it ends every one of them itself, within milliseconds, when
the connection it waits on breaks. Shutting down its sockets from outside is such a break: they stay gloo's to close.
"""

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterable, Iterator

from ft.base.errors import FtError

Sockets = dict[int, int]  # file descriptor -> inode, which tells a socket from a later one with the same descriptor
Address = tuple[str, int]

_DUPLICATES = threading.RLock()
"""Held while a duplicate exists, and while descriptors are listed: a duplicate that another thread is about to close is
not the descriptor that the socket's owner reads."""
os.register_at_fork(before=_DUPLICATES.acquire, after_in_parent=_DUPLICATES.release, after_in_child=_DUPLICATES.release)


def held() -> Sockets:
    """All sockets of this process at this moment."""
    return _sockets_among(_descriptors())


class Watch:
    """Finds the connections that were opened since the last look, for a run of looks in short order.

    A look at descriptors that were free at the last one costs a tenth of one at all of them.
    """

    def __init__(self):
        self._sockets, self._descriptors = held(), _descriptors()

    def opened(self, addresses: set[Address], expected: int) -> Sockets:
        """The ``expected`` connections of which one end is one of ``addresses``, and that were opened since.

        Raises:
            FtError: there are more or fewer.
        """
        descriptors = _descriptors()
        found = touching(_sockets_among(descriptors - self._descriptors), addresses)
        if len(found) != expected:  # a descriptor has been closed and given out again
            found = touching(since(self._sockets), addresses)
        if len(found) != expected:
            raise FtError(f"found {len(found)} connections with ends at {sorted(addresses)} instead of {expected}")
        # Inodes of sockets that were closed since stay noted: they are not given out again so soon.
        self._sockets.update(found)
        self._descriptors = descriptors
        return found


def since(before: Sockets) -> Sockets:
    """Those that were opened after ``before`` was taken."""
    return {fd: inode for fd, inode in held().items() if before.get(fd) != inode}


def listening(sockets: Sockets) -> list[Address]:
    """Addresses of those that wait for connections."""
    return [_address(own.getsockname()) for own in opened(sockets) if _listens(own)]


def towards(sockets: Sockets, port: int) -> Sockets:
    """Connected sockets of which the other end has this port."""
    found = {}
    for fd, inode in sockets.items():
        for own in opened({fd: inode}):
            with contextlib.suppress(OSError):  # not connected, or no longer
                if _address(own.getpeername())[1] == port:
                    found[fd] = inode
    return found


def touching(sockets: Sockets, addresses: set[Address]) -> Sockets:
    """Connected sockets of which one end is one of ``addresses``."""
    found = {}
    for fd, inode in sockets.items():
        for own in opened({fd: inode}):
            with contextlib.suppress(OSError):  # not connected, or no longer
                if {_address(own.getsockname()), _address(own.getpeername())} & addresses:
                    found[fd] = inode
    return found


def shut(sockets: Sockets) -> None:
    """Break these connections. A descriptor that is another socket's by now is left alone, and so are listening ones
    (gloo's listener ends the process when its socket fails).

    Only reading ends here: gloo then closes them itself. After a write that fails it would forget who waits for it.
    """
    for own in opened(sockets):
        with contextlib.suppress(OSError):  # already broken
            if not _listens(own):
                own.shutdown(socket.SHUT_RD)


def _descriptors() -> set[int]:
    with _DUPLICATES:
        found = {int(name) for name in os.listdir("/proc/self/fd")}
    listing = os.dup(0)  # the lowest free descriptor, which the listing itself has just had
    os.close(listing)
    return found - {listing}


def _sockets_among(descriptors: Iterable[int]) -> Sockets:
    found = {}
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed by now, as the one that listed them is
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                found[descriptor] = status.st_ino
    return found


def opened(sockets: Sockets) -> Iterator[socket.socket]:
    """A duplicate of each that is still the socket meant, for as long as the loop looks at it."""
    for fd, inode in sockets.items():
        with _DUPLICATES:
            try:
                duplicate = os.dup(fd)
            except OSError:
                continue
            if os.fstat(duplicate).st_ino != inode:
                os.close(duplicate)
                continue
            with socket.socket(fileno=duplicate) as own:
                yield own


def _listens(own: socket.socket) -> bool:
    return bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _address(name: tuple | str) -> Address:
    return (name[0], name[1]) if isinstance(name, tuple) else (str(name), 0)  # a Unix socket has no port
