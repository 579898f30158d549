"""Says which process listens on a TCP port of this machine, and which addresses its network interfaces have."""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_LISTENS = "0A"
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15
_SHOWN = 100


def listener(port: int) -> str:
    """Return the process that listens on a TCP port, such as "process 4711 (python -m http.server)"; "" if none does.

    A process of another user is not visible to a plain user; then only the user is named.
    """
    sockets = _listening(port)
    if not sockets:
        return ""
    wanted = {f"socket:[{inode}]" for inode in sockets}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if wanted & set(_held(pid)):
            return f"process {pid} ({_command(pid)})"
    return f"a process of user {next(iter(sockets.values()))}"


def _held(pid: str) -> Iterator[str]:
    """Yield what the open descriptors of a process lead to; nothing if it has ended or belongs to another user."""
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it was closed meanwhile
                yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def _command(pid: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "ended"
    return words.replace(b"\0", b" ").decode(errors="replace").strip()[:_SHOWN]


def _listening(port: int) -> dict[str, str]:
    """Return inode -> user id of the sockets that listen on a port."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                found[words[9]] = words[7]
    return found


def interfaces() -> dict[str, str]:
    """Return the first IPv4 address of each network interface of this machine that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def cannot_connect(host: str, port: int, limit_s: float) -> str:
    """Return why a TCP connection to ``host:port`` cannot be made within ``limit_s`` seconds, "" if it can.

    Nothing is sent.
    """
    try:
        with socket.create_connection((host, port), timeout=limit_s):
            return ""
    except TimeoutError:
        return f"no answer within {limit_s:g} s"
    except OSError as error:
        return error.strerror or str(error)
