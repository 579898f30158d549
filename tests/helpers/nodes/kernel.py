"""The system calls that Python 3.11 does not provide; run as a program, it executes another program on a host.

``python kernel.py NAMESPACE HOSTNAME PARENT COMMAND...``: NAMESPACE is a descriptor, PARENT the pid of the process
whose death also ends the command.
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
    """Move this thread to new namespaces. Raise OSError if that is not permitted."""
    _check(_libc.unshare(what), "unshare")


def enter_network(namespace: int) -> None:
    """Move this thread to the network namespace behind a descriptor."""
    _check(_libc.setns(namespace, NEW_NETWORK), "setns")


def enter(namespace: int, hostname: str) -> None:
    """Move this thread to a simulated host: the network namespace behind a descriptor, and a hostname of its own."""
    enter_network(namespace)
    unshare(NEW_HOSTNAME)
    socket.sethostname(hostname)


def die_with_parent() -> None:
    """Ask the kernel to kill this process with SIGKILL when the thread that started it ends."""
    _check(_libc.prctl(_DIE_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0), "prctl")


def open_tun(name: str) -> int:
    """Return a descriptor of a new network interface of this namespace, which reads and writes whole IP packets."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER))
    return fd


def ip(*arguments: str) -> str:
    """Run iproute2's ``ip`` and return its output; raise CalledProcessError with its output if it fails."""
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
    enter(int(namespace), name)
    os.close(int(namespace))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
