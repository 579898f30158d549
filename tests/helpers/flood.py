"""Opens connections to every port at which the processes of a run listen, and says nothing on them.

    python flood.py PID NUMBER SECONDS

PID is a process of the run; its descendants belong to the run, too. Each port gets NUMBER connections at once, for so
many seconds, one port after the other. Prints the ports.
"""

import contextlib
import resource
import socket
import sys
import time

import psutil


def ports_of(pid: int) -> set[tuple[str, int]]:
    """Return the addresses at which a process and its descendants listen."""
    found = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                for each in process.net_connections("tcp"):
                    if each.status == psutil.CONN_LISTEN:
                        found.add((each.laddr.ip, each.laddr.port))
    return found


def flood(address: tuple[str, int], number: int, seconds: float) -> int:
    """Open connections and close them after some seconds; return how many of them were established then."""
    host, port = address
    opened = []
    for _ in range(number):
        own = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        own.setblocking(False)
        own.connect_ex((host, port))
        opened.append(own)
    time.sleep(seconds)
    established = 0
    for own in opened:
        with contextlib.suppress(OSError):
            own.getpeername()
            established += 1
        own.close()
    return established


def main() -> None:
    pid, number, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < number + 100:
        sys.exit(f"needs {number + 100} file descriptors, and may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    done: set[tuple[str, int]] = set()
    while rest := sorted(ports_of(pid) - done):
        for address in rest:
            print(*address, flood(address, number, seconds), flush=True)
            done.add(address)


if __name__ == "__main__":
    main()
