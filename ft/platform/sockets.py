"""Finds the sockets of this process that belong to a connection, and shuts them down without closing them.

This is how blocked gloo operations are aborted in a recovery. gloo has no call for that, but when a connection breaks,
gloo itself aborts all operations that wait on it, within milliseconds. Shutting the sockets down from outside breaks
the connections; gloo then closes the sockets itself.
"""

import contextlib
import os
import re
import socket
import stat
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ft.base.errors import FtError

# file descriptor -> inode; the inode distinguishes a socket from a later socket with the same descriptor
Sockets = dict[int, int]
Address = tuple[str, int]
_REGISTERED = re.compile(r"^tfd:\s*(\d+) .* ino:([0-9a-f]+)", re.MULTILINE)

_DUPLICATES = threading.RLock()
"""Lock held while a duplicate descriptor exists and while descriptors are listed.

A duplicate that another thread is about to close is not the descriptor that the socket's owner reads.
"""
os.register_at_fork(before=_DUPLICATES.acquire, after_in_parent=_DUPLICATES.release, after_in_child=_DUPLICATES.release)


def held() -> Sockets:
    """Return all sockets of this process at this moment."""
    return _sockets_among(_descriptors())


class ConnectionWatch:
    """Finds the connections that were opened since the last call, efficiently for a quick series of calls.

    It checks only descriptors that were free at the last call, which takes a tenth of the time of checking all.
    """

    def __init__(self) -> None:
        self._sockets, self._descriptors = held(), _descriptors()

    def opened(self, addresses: set[Address], expected: int) -> Sockets:
        """Return the connections with one end in ``addresses`` that were opened since the last call.

        There are more than ``expected`` if strangers have connected to a listening socket of this process.

        Raises:
            FtError: there are fewer than ``expected``.
        """
        descriptors = _descriptors()
        found = touching(_sockets_among(descriptors - self._descriptors), addresses)
        if len(found) < expected:  # a descriptor was closed and reused
            found = touching(since(self._sockets), addresses)
        if len(found) < expected:
            raise FtError(f"found {len(found)} connections with ends at {sorted(addresses)} instead of {expected}")
        # Inodes of sockets closed since then stay recorded: the kernel does not reuse them so soon.
        self._sockets.update(found)
        self._descriptors = descriptors
        return found


def since(before: Sockets) -> Sockets:
    """Return the sockets that were opened after ``before`` was taken."""
    return {fd: inode for fd, inode in held().items() if before.get(fd) != inode}


def listening(sockets: Sockets) -> list[Address]:
    """Return the addresses of the listening sockets."""
    return [_address(own.getsockname()) for own in opened(sockets) if _listens(own)]


def listeners(sockets: Sockets) -> Sockets:
    """Return those sockets that listen."""
    return {fd: inode for fd, inode in sockets.items() if listening({fd: inode})}


def touching(sockets: Sockets, addresses: set[Address]) -> Sockets:
    """Return the connected sockets with one end in ``addresses``."""
    found = {}
    for fd, inode in sockets.items():
        for own in opened({fd: inode}):
            with contextlib.suppress(OSError):  # not connected, or no longer
                if {_address(own.getsockname()), _address(own.getpeername())} & addresses:
                    found[fd] = inode
    return found


@dataclass(frozen=True)
class EventLoop:
    """An epoll instance of this process, recognized by a listening socket that is registered with it.

    Attributes:
        epoll: descriptor of the instance.
        listener: inode of the listening socket.
    """

    epoll: int
    listener: int

    @classmethod
    def of(cls, address: Address) -> "EventLoop":
        """Return the epoll instance with which the socket that listens at ``address`` is registered.

        Raises:
            FtError: there is none.
        """
        for fd, inode in held().items():
            if listening({fd: inode}) == [address]:
                for epoll in _descriptors():
                    if _registered(epoll).get(fd) == inode:
                        return cls(epoll, inode)
        raise FtError(f"no event loop serves a socket that listens at {address}")

    def connected(self) -> Sockets:
        """Return the sockets that are registered now, without the listening one; none if the instance has ended."""
        found = _registered(self.epoll)
        if self.listener not in found.values():
            return {}
        return {fd: inode for fd, inode in _sockets_among(found).items() if inode == found[fd] != self.listener}


def _registered(epoll: int) -> Sockets:
    """Return the descriptors registered with an epoll instance; none if ``epoll`` is no such instance."""
    try:
        text = Path(f"/proc/self/fdinfo/{epoll}").read_text()
    except OSError:  # closed by now
        return {}
    return {int(fd): int(inode, 16) for fd, inode in _REGISTERED.findall(text)}


def admit(sockets: Sockets, everybody: bool) -> None:
    """Let listening sockets accept connections, or have the kernel drop whoever asks for one.

    What is dropped are packets of programs that do not set their time to live to 255, and of hosts behind a router
    (``IP_MINTTL``). This needs no capability. It keeps out floods and scans, but nobody who knows of it.
    """
    for own in opened(sockets):
        level, option = (socket.IPPROTO_IP, 21) if own.family == socket.AF_INET else (socket.IPPROTO_IPV6, 73)
        with contextlib.suppress(OSError):  # a kernel without this option
            own.setsockopt(level, option, 0 if everybody else 255)


def shut(sockets: Sockets) -> None:
    """Break these connections. Listening sockets and reused descriptors are not touched.

    gloo's listener would end the process if its socket failed. Only the reading direction is shut down; gloo then
    closes the sockets itself. If a write failed, gloo would not abort the operations that wait for that write.
    """
    for own in opened(sockets):
        with contextlib.suppress(OSError):  # already broken
            if not _listens(own):
                own.shutdown(socket.SHUT_RD)


def _descriptors() -> set[int]:
    with _DUPLICATES:
        found = {int(name) for name in os.listdir("/proc/self/fd")}
    listing = os.dup(0)  # the lowest free descriptor, which is the one that the listing itself has used
    os.close(listing)
    return found - {listing}


def _sockets_among(descriptors: Iterable[int]) -> Sockets:
    found = {}
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed by now, as the descriptor of the listing is
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                found[descriptor] = status.st_ino
    return found


def opened(sockets: Sockets) -> Iterator[socket.socket]:
    """Yield a duplicate of each descriptor that still refers to the same socket; it is closed after the loop's body."""
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
