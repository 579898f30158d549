"""The few system calls that Python 3.11 has no names for; run as a program, it becomes another one on a host.

``python kernel.py NAMESPACE HOSTNAME PARENT COMMAND...``: NAMESPACE is a descriptor, PARENT the pid to die with.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys

NEW_NETWORK, NEW_HOSTNAME = 0x40000000, 0x04000000
_TUNSETIFF, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_DIE_WITH_PARENT = 1

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(what: int) -> None:
    """Raises OSError where that is not permitted."""
    _check(_libc.unshare(what), "unshare")


def enter_network(namespace: int) -> None:
    """Puts this thread into the network namespace behind a descriptor."""
    _check(_libc.setns(namespace, NEW_NETWORK), "setns")


def die_with_parent() -> None:
    """SIGKILL for this process as soon as the thread that started it is gone."""
    _check(_libc.prctl(_DIE_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0), "prctl")


def open_tun(name: str) -> int:
    """A new network interface of this namespace; whole IP packets are read from and written to the descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER))
    return fd


def ip(*arguments: str) -> str:
    """Runs iproute2's ``ip``; raises CalledProcessError with what it said."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10).stdout


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main() -> None:
    namespace, name, parent, *command = sys.argv[1:]
    die_with_parent()
    if os.getppid() != int(parent):
        sys.exit("whoever started this is gone")
    enter_network(int(namespace))
    os.close(int(namespace))
    unshare(NEW_HOSTNAME)
    socket.sethostname(name)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
