"""Compares ft diagnose hang --traces with torch's own torchfrtrace, on the same dumps of the flight recorder.

The dumps are those that ranks with NCCL would write: simulated hangs (tests/simulation/hangs) in the format of torch's
flight recorder, one pickle per rank. A rank that is stopped or dead writes none. Each tool is asked for the rank at
fault; torchfrtrace names ranks that are missing from an operation, and ranks whose operations do not match.

    python tools/experiments/hang_traces.py --cases 100
"""

import argparse
import io
import logging
import pickle
import re
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from ft.faults.hang.causes import diagnose
from ft.observe.diagnose.flight_recorder import read
from ft.show.text import table
from tests.simulation.hangs.faults import STEP
from tests.simulation.hangs.machine import Machine
from tests.simulation.hangs.run import choose

VERSION = "2.10"
_NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    tally: dict[str, list[int]] = {}
    seed, done = given.seed, 0
    while done < given.cases:
        found = case(seed)
        seed += 1
        if found is None:
            continue
        done += 1
        fault, ours, theirs, crashed = found
        for name in (fault, "all"):
            row = tally.setdefault(name, [0, 0, 0, 0])
            for at, value in enumerate((1, ours, theirs, crashed)):
                row[at] += value
    rows = [
        (fault, str(n), f"{ours / n:.0%}", f"{theirs / n:.0%}", str(crashed))
        for fault, (n, ours, theirs, crashed) in sorted(tally.items(), key=lambda item: (item[0] == "all", item[0]))
    ]
    print(f"seeds {given.seed} to {seed - 1}")
    print(table(("fault", "cases", "ft", "torchfrtrace", "it fails"), rows, right=(1, 2, 3, 4)))
    return 0


def case(seed: int) -> tuple[str, bool, bool, bool] | None:
    """Return (fault, whether we name exactly the ranks, whether torchfrtrace does, whether it fails), or None."""
    chosen = choose(seed)
    if chosen is None or chosen.injected.factor or len(chosen.injected.kinds) > 1 or chosen.layout.world_size > 32:
        return None
    machine = chosen.hangs(STEP + 2)
    if machine is None:
        return None
    expected = set(chosen.injected.kinds)
    with tempfile.TemporaryDirectory() as folder:
        write(machine, chosen.programs, Path(folder))
        causes = diagnose(read(Path(folder))).causes
        ours = {cause.rank for cause in causes[: len(expected)]} == expected
        named, crashed = torchfrtrace(Path(folder))
    return chosen.fault, ours, named == expected, crashed


def write(machine: Machine, all_, folder: Path) -> None:
    """Write one dump per rank that answers."""
    for rank, said in machine.look().ranks.items():
        if not said.answers:
            continue
        config = {
            name: {"name": name, "desc": name.partition("/")[0], "ranks": str(list(members))}
            for name, members in all_.groups.items()
            if rank in members
        }
        entries = [_entry(number, one, done, all_, rank) for number, (one, done) in enumerate(machine.started(rank))]
        dump = {"version": VERSION, "entries": entries, "pg_config": config, "pg_status": {}, "nccl_comm_state": {}}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))


def _entry(number: int, one, done: bool, all_, rank: int) -> dict:
    members = all_.groups[one.group]
    own = members.index(rank)
    if one.peer is None:
        name = f"nccl:{_NAMES.get(one.name, one.name)}"
    else:
        other = members.index(one.peer)
        name = f"nccl:send {own}->{other}" if one.name == "send" else f"nccl:recv {own}<-{other}"
    dtypes, shapes = ["BFloat16"] * len(one.sizes), [list(shape) for _, shape in one.sizes]
    filename, _, rest = str(one.site).partition(":")
    line, _, function = rest.partition(" ")
    message = one.peer is not None
    outputs = [_output(one.name, shape, len(members)) for shape in shapes]
    return {
        **{"record_id": number, "pg_id": 0, "process_group": (one.group, one.group.partition("/")[0])},
        **{"collective_seq_id": 0 if message else one.sequence, "p2p_seq_id": one.sequence if message else 0},
        **{"op_id": number, "profiling_name": name, "time_created_ns": number, "is_p2p": message, "timeout_ms": 600000},
        **{"input_sizes": shapes, "input_dtypes": dtypes, "output_sizes": outputs, "output_dtypes": dtypes},
        **{"state": "completed" if done else "started", "retired": done, "time_discovered_started_ns": number},
        "time_discovered_completed_ns": number if done else None,
        "frames": [{"name": function, "filename": filename, "line": int(line or 0)}],
    }


def _output(name: str, shape: list[int], members: int) -> list[int]:
    """Return the shape of the output of a collective; the simulation knows one shape per operation only."""
    if name == "all_gather":
        return [shape[0] * members, *shape[1:]]
    if name == "reduce_scatter":
        return [shape[0] // members, *shape[1:]]
    return shape


def torchfrtrace(folder: Path) -> tuple[set[int], bool]:
    """Return (the ranks that torchfrtrace names first, whether it fails)."""
    from torch.distributed.flight_recorder import fr_trace

    said, argv = io.StringIO(), sys.argv
    sys.argv = ["torchfrtrace", str(folder), "--prefix", "nccl_trace_rank_", "--allow-incomplete-ranks"]
    try:
        with redirect_stdout(said), redirect_stderr(said), _logged(said):
            fr_trace.main()
    except (Exception, SystemExit) as error:
        if not isinstance(error, SystemExit) or error.code not in (0, None):
            return set(), True
    finally:
        sys.argv = argv
    text = said.getvalue()
    for pattern in (r"missing ranks: \{([\d, ]+)\}", r"missed FR dumps from ranks \(\{([\d, ]+)\}\)"):
        if (found := re.search(pattern, text)) is not None:
            return {int(rank) for rank in found[1].split(",")}, False
    return {int(rank) for rank in re.findall(r"Culprit rank (\d+)", text)}, False


class _logged:
    """A context in which the messages of torchfrtrace's logger are written to a text."""

    def __init__(self, into: io.StringIO):
        self._into = into

    def __enter__(self) -> None:
        self._logger = logging.getLogger("Flight Recorder")
        self._before, self._logger.handlers = self._logger.handlers, [logging.StreamHandler(self._into)]

    def __exit__(self, *_) -> None:
        self._logger.handlers = self._before


if __name__ == "__main__":
    sys.exit(main())
