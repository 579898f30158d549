"""Measure the fetch of a training state by a replica that catches up, and what serving it costs the source.

    python tools/bench/hsdp_fetch.py

Prints one JSON line. All figures are medians from alternating measurements in one run; MB = 10^6 bytes.

- `MB_s`: bandwidth of a fetch from one source (`fetch_1`) and from two (`fetch_2`), of the download of a file of the
  same size from Python's http.server (`file`), and of a copy over a plain socket (`socket`), each into existing memory.
  Each source is a process of its own.
- `against_file`, `against_socket`: the faster fetch divided by the download and by the copy.
- `step`: step time of a compute loop in a source that serves without pause, divided by the step time without serving
  (`step_ms` has both). `step_MB_s`: bandwidth that the source serves meanwhile. The fetching process runs on the same
  cores (`beside`), or with the lowest priority, as if it were on another host (`apart`).
- `withdraw_ms`: longest time to withdraw an offer in the middle of a fetch.
- `offer_us`: time to offer 1000 tensors, as every committed step does.
- `checksum_GB_s`: speed of checksums of a block of 1 MiB, this project's first.
- `load`: mean load of the machine. Serving has a low priority, so it waits for other work on the machine.
"""

import argparse
import contextlib
import hashlib
import http.client
import http.server
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from ft.net.framed import checksum  # noqa: E402
from ft.state.fetch import FetchRefused, StateServer, fetch  # noqa: E402

TOKEN, LIMIT_S, TENSORS = "bench", 60.0, 16
BLOCK_S = 1.0
"""Duration of one run of the compute loop, in seconds."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.serve:
        Serving(arguments.mib, Path(arguments.serve)).run()
        return 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        (Path(folder) / "state").write_bytes(os.urandom(1 << 20) * arguments.mib)
        sources = [Source(arguments.mib, folder) for _ in range(2)]
        try:
            print(
                json.dumps(result(sources, arguments.mib, arguments.rounds) | {"rounds": arguments.rounds} | machine())
            )
        finally:
            for source in sources:
                source.close()
    return 0


def machine() -> dict:
    """Return the number of cores, and the mean load of the last minute, which includes these processes."""
    return {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}


def result(sources: list["Source"], mib: int, rounds: int) -> dict:
    """Make all measurements, and return them as the JSON line's values (see the module's docstring).

    Args:
        sources: two processes that serve the state.
        mib: size of the state in MiB.
        rounds: number of repetitions of each measurement.
    """
    into = tensors(mib)
    buffer = memoryview(bytearray(mib << 20))
    methods = {
        "fetch_1": lambda: fetch([sources[0].address], TOKEN, 1, 1, into, LIMIT_S),
        "fetch_2": lambda: fetch([source.address for source in sources], TOKEN, 1, 1, into, LIMIT_S),
        "file": lambda: download(sources[0].http, buffer),
        "socket": lambda: copy(sources[0].raw, buffer),
    }
    for method in methods.values():
        method()
    took: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            began = time.perf_counter()
            method()
            took[name].append(time.perf_counter() - began)
    rates = {name: round((mib << 20) / statistics.median(values) / 1e6) for name, values in took.items()}
    best = max(rates["fetch_1"], rates["fetch_2"])
    against = {"against_file": best / rates["file"], "against_socket": best / rates["socket"]}
    return (
        {"bench": "hsdp_fetch", "mib": mib, "MB_s": rates}
        | {name: round(value, 3) for name, value in against.items()}
        | {"withdraw_ms": withdrawal(sources[0], into, rounds)}
        | {"offer_us": offering(), "checksum_GB_s": checksums()}
        | serving(sources[0], into, rounds)
    )


def tensors(mib: int) -> dict[str, torch.Tensor]:
    """Return a training state of ``mib`` MiB: tensors of equal size by name."""
    return {f"weight{i}": torch.ones((mib << 20) // TENSORS // 4) for i in range(TENSORS)}


def download(address: str, buffer: memoryview) -> None:
    connection = http.client.HTTPConnection(address)
    connection.request("GET", "/state")
    _fill(connection.getresponse().readinto, buffer)
    connection.close()


def copy(address: str, buffer: memoryview) -> None:
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        _fill(connection.recv_into, buffer)


def _fill(read, view: memoryview) -> None:
    while view:
        view = view[read(view) :]


def serving(source: "Source", into: dict[str, torch.Tensor], rounds: int) -> dict:
    """Measure the compute loop alone and with a fetch, alternating; finally at the lowest priority, which stays set."""
    found = {}
    for name, niceness in (("beside", 0), ("apart", 19)):
        os.nice(niceness)
        pairs = [(compute_with(source, None), compute_with(source, into)) for _ in range(rounds)]
        step = statistics.median(served[0] / alone[0] for alone, served in pairs)
        rate = statistics.median(served[1] for _, served in pairs)
        both = [statistics.median(alone[0] for alone, _ in pairs), statistics.median(served[0] for _, served in pairs)]
        found[name] = {"step": round(step, 3), "step_ms": [round(ms, 3) for ms in both], "step_MB_s": round(rate)}
    return found


def compute_with(source: "Source", into: dict[str, torch.Tensor] | None) -> tuple[float, float]:
    """Return milliseconds per step of the loop in ``source``, and the MB per second fetched from it meanwhile."""
    answers: list[str] = []
    source.send("compute")
    waiter = threading.Thread(target=lambda: answers.append(source.receive()))
    waiter.start()
    began, amount = time.perf_counter(), 0
    while into is not None and waiter.is_alive():
        amount += fetch([source.address], TOKEN, 1, 1, into, LIMIT_S).bytes
    seconds = time.perf_counter() - began
    waiter.join()
    return float(answers[0]), amount / seconds / 1e6


def withdrawal(source: "Source", into: dict[str, torch.Tensor], rounds: int) -> float:
    """Return the longest time in milliseconds that ``source`` needed to withdraw its offer during a fetch."""
    longest = 0.0
    for turn in range(rounds):
        timer = threading.Timer(0.01 + 0.005 * turn, lambda: source.send("withdraw"))
        timer.start()
        with contextlib.suppress(FetchRefused):
            fetch([source.address], TOKEN, 1, 1, into, LIMIT_S)
        timer.join()
        longest = max(longest, float(source.receive()))
    return round(longest, 3)


def offering() -> int:
    """Return the median time in microseconds to offer 1000 small tensors."""
    live = {f"parameter{i}": torch.zeros(8) for i in range(1000)}
    server, took = StateServer("127.0.0.1", TOKEN), []
    for step in range(50):
        began = time.perf_counter()
        server.withdraw()
        server.offer(step, 1, dict(live), {"step": step})
        took.append(time.perf_counter() - began)
    server.close()
    return round(1e6 * statistics.median(took))


def checksums() -> dict[str, float]:
    """Return name of the checksum -> median speed in GB/s on a block of 1 MiB."""
    block = memoryview(bytearray(os.urandom(1 << 20)))
    methods = {"ours": checksum, "crc32": zlib.crc32, "adler32": zlib.adler32}
    methods |= {name: lambda data, name=name: hashlib.new(name, data).digest() for name in ("sha256", "blake2b")}
    rates = {}
    for name, method in methods.items():
        took = []
        for _ in range(30):
            began = time.perf_counter()
            method(block)
            took.append(time.perf_counter() - began)
        rates[name] = round(len(block) / statistics.median(took) / 1e9, 2)
    return rates


class Source:
    """A process that serves the state by fetch, HTTP and plain socket, and runs the compute loop on request."""

    def __init__(self, mib: int, folder: str):
        command = [sys.executable, __file__, "--mib", str(mib), "--serve", folder]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)
        self.address, self.http, self.raw = self.receive().split()

    def send(self, word: str) -> None:
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def receive(self) -> str:
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Serving:
    """The serving side, in the process of a ``Source``."""

    def __init__(self, mib: int, folder: Path):
        self._state = tensors(mib)
        self._server = StateServer("127.0.0.1", TOKEN)
        self._server.offer(1, 1, self._state, {})
        plain = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _file_handler(folder))
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_serve_raw, args=(listener, bytes(mib << 20)), daemon=True).start()
        ports = plain.server_address[1], listener.getsockname()[1]
        print(self._server.address, *(f"127.0.0.1:{port}" for port in ports), flush=True)

    def run(self) -> None:
        """Execute the commands on stdin, and print the milliseconds that each took."""
        for line in sys.stdin:
            if line.strip() == "compute":
                print(compute(BLOCK_S), flush=True)
            else:
                began = time.perf_counter()
                self._server.withdraw()
                print(1e3 * (time.perf_counter() - began), flush=True)
                self._server.offer(1, 1, self._state, {})


def compute(seconds: float) -> float:
    """Return the mean milliseconds per forward and backward pass of a small network."""
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    data, until, steps = torch.randn(256, 256), time.perf_counter() + seconds, 0
    began = time.perf_counter()
    while time.perf_counter() < until:
        model(data).square().mean().backward()
        model.zero_grad()
        steps += 1
    return 1e3 * (time.perf_counter() - began) / steps


def _file_handler(folder: Path):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *arguments) -> None:
            pass

    return Quiet


def _serve_raw(listener: socket.socket, data: bytes) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
