"""Compare the speed of the digest with that of a copy and of a comparison of the same tensor.

    python tools/bench/dmr_digest.py [--device cuda]

Prints one JSON line. For each size, the sides alternate in one process, and every figure is a median: `us` is the
duration of one call; `gb_s` is the size of the tensor divided by this time (also for a copy and a comparison, which
access twice as many bytes); `of_copy` is the speed of the digest divided by that of the copy. The goal on a GPU is
`of_copy` >= 0.7.

Sides: "digest" is the digest with the default `backend`, "eager" the same from plain torch, "copy" a copy into existing
memory, "compare" this project's bitwise comparison of two equal tensors, and "equal" torch.equal of them. On a CPU, the
digest is also measured with the instructions that the C library uses on older processors.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from ft.systems.dmr.digest import backend, compare, digest, eager, native

SEED = 1


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kib", type=int, nargs="+", default=[2, 64, 1024, 4096, 65536, 262144], help="sizes")
    parser.add_argument("--rounds", type=int, default=15, help="turns of every side that count")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a turn, about")
    arguments = parser.parse_args(argv)
    sizes = {f"{kib} KiB": _size(arguments, kib * 1024) for kib in arguments.kib}
    machine = {"device": arguments.device, "backend": backend(arguments.device), "threads": torch.get_num_threads()}
    if arguments.device != "cpu":
        machine["name"] = torch.cuda.get_device_name()
    print(json.dumps({"bench": "dmr_digest", **machine, "torch": torch.__version__, "sizes": sizes}))
    return 0


def _size(arguments: argparse.Namespace, size: int) -> dict:
    tensor = torch.randn(size // 4, device=arguments.device)
    sides = _sides(tensor)
    took = {name: [] for name in sides}
    calls = {name: _calls(side, arguments) for name, side in sides.items()}
    for _ in range(arguments.rounds):
        for name, side in sides.items():
            took[name].append(_timed(side, calls[name], arguments.device))
    medians = {name: statistics.median(times) for name, times in took.items()}
    return {
        "us": {name: round(1e6 * seconds, 2) for name, seconds in medians.items()},
        "gb_s": {name: round(size / seconds / 1e9, 2) for name, seconds in medians.items()},
        "of_copy": round(medians["copy"] / medians["digest"], 3),
    }


def _sides(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    out = torch.empty(2, dtype=torch.int64, device=tensor.device)
    other = tensor.clone()
    same = tensor.clone()
    sides = {
        "digest": lambda: digest(tensor, SEED),
        "copy": lambda: other.copy_(tensor),
        "compare": lambda: compare(tensor, same),
        "equal": lambda: torch.equal(tensor, same),
        "eager": lambda: eager.digest(tensor, SEED, out),
    }
    if backend(tensor.device) == "native":
        for width, name in ((0, "plain C"), (2, "AVX2")):
            if width < native.library().width:
                sides[name] = lambda width=width: native.digest(tensor, SEED, out, width=width)
    return sides


def _calls(side: Callable[[], object], arguments: argparse.Namespace) -> int:
    """Return the number of calls that fill a turn; the first calls warm up."""
    _timed(side, 3, arguments.device)
    return max(1, int(arguments.seconds / _timed(side, 3, arguments.device)))


def _timed(side: Callable[[], object], calls: int, device: str) -> float:
    """Return the mean seconds of one of ``calls`` calls."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        side()
    _wait(device)
    return (time.perf_counter() - start) / calls


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
