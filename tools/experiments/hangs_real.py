"""Injects hangs and slow ranks into real runs of ft run, and counts how often ft diagnose hang names the cause.

    python tools/experiments/hangs_real.py --seeds 0..99 --into FOLDER       one file a case; those that are there stay
    python tools/experiments/hangs_real.py --report --into FOLDER            the table of all cases in the folder

Each case is a run of 4 or 8 workers that carry out the communication of Megatron's steps (``tests/simulation/hangs``)
with real process groups over gloo, and one fault. For a hang, the look is read that the run takes by itself before a
time limit passes; for a slow rank or connection, looks are asked for as ft diagnose hang --looks does. A killed worker
is named by the run at once, as its first fault. For a slow connection each rank is a host of its own, behind a router
that delays the packets of one of them (``tests/helpers/nodes``; it needs root).

Also counted are the ranks of which the run decides to replace the worker ("blamed"). These workers have no system that
would let the others go on: once a worker is replaced they end with an error, which is not counted.

Left out are operations of wrong sizes: with gloo the operation ends with an error and does not hang.
"""

import argparse
import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ft.base import events
from ft.faults import verdict
from ft.faults.hang.causes import DEAD_, Diagnosis
from ft.faults.hang.series import over_time
from ft.record import looks
from ft.record.looks import ask
from ft.record.run import load
from tests.simulation.hangs.faults import KINDS, STEP
from tests.simulation.hangs.machine import Layout
from tests.simulation.hangs.run import Case, Chosen, as_text, choose, count, judge

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tools/experiments/results/hangs_real.txt"
LAYOUTS = (
    *(Layout(dp=4), Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(cp=2, dp=2), Layout(pp=4), Layout(dp=4, ep=2)),
    *(Layout(pp=2, vpp=2, dp=2), Layout(tp=2, pp=2, dp=2, microbatches=2), Layout(tp=2, cp=2, pp=2, microbatches=2)),
)
LEFT_OUT = ("wrong sizes", "wrong size of a message")
SLOW_LINK, LINK_DELAY_S = "slow link", 0.1
LIMIT_S, LOOKS, EVERY_S = 120.0, 24, 0.3
STEPS, SLOW_STEPS = STEP + 2, 5000
LIMITS = "stall_s: 2\nsilent_s: 4\ncollective_s: 3\n"
START_S, START_ON_SLOW_LINK_S = 5, 60
"""Limits for the first steps, until the usual duration of a step is known."""
PORT = 29417


@dataclass(frozen=True)
class Result:
    """What was said of one case.

    Attributes:
        case: the case, and whether the diagnosis is right.
        blamed: ranks of which the run has decided to replace the worker.
    """

    case: Case
    blamed: tuple[int, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", metavar="A..B", help="random seeds, each at most one case")
    parser.add_argument("--into", type=Path, required=True, help="folder for the results")
    parser.add_argument("--report", action="store_true", help="write the table of what is in --into")
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    if given.seeds:
        first, _, last = given.seeds.partition("..")
        for seed in range(int(first), int(last or first) + 1):
            path = given.into / f"{seed}.json"
            if not path.exists() and (found := run_case(seed, given.into / f"run-{seed}")) is not None:
                path.write_text(json.dumps(asdict(found)) + "\n")
                print(seed, found.case.fault, found.case.found, "blamed", found.blamed, flush=True)
    if given.report:
        TABLE.write_text(report(given.into))
        print(TABLE.read_text())
    return 0


def report(folder: Path) -> str:
    """Return the table of all cases in a folder."""
    read = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"), key=lambda one: int(one.stem))]
    results = [Result(_case_of(one["case"]), tuple(one["blamed"])) for one in read]
    innocents = [one for one in results if set(one.blamed) - one.case.expected.keys()]
    lines = [
        "python tools/experiments/hangs_real.py --report --into FOLDER",
        f"{len(results)} real runs, seeds up to {results[-1].case.seed}",
        f"runs in which a worker was to be replaced although nothing was wrong there: {len(innocents)}",
        *(f"  seed {one.case.seed}, {one.case.fault}: ranks {one.blamed}" for one in innocents),
    ]
    return "\n".join([*lines, "", as_text(count(one.case for one in results))]) + "\n"


def _case_of(values: dict) -> Case:
    expected = {int(rank): kind for rank, kind in values["expected"].items()}
    found = tuple((rank, kind) for rank, kind in values["found"])
    return Case(**{**values, "layout": Layout(**values["layout"]), "expected": expected, "found": found})


# --- one case ---------------------------------------------------------------------------------------------------------


def run_case(seed: int, folder: Path) -> Result | None:
    """Run the case of a seed; None if it has none."""
    chosen = choose(seed, LAYOUTS, KINDS.keys() - set(LEFT_OUT))
    if chosen is None:
        return None
    expected = chosen.injected.kinds
    if not chosen.injected.factor:
        machine = chosen.hangs(STEPS)
        if machine is None:
            return None
        awaited = {rank for wait in over_time([machine.look()]).waiting for rank in wait.on}
        expected = {r: k for r, k in expected.items() if machine.is_wrong(r) and (len(expected) == 1 or r in awaited)}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    start_s = START_ON_SLOW_LINK_S if chosen.fault == SLOW_LINK else START_S
    (folder / "limits.yaml").write_text(f"{LIMITS}start_s: {start_s}\n")
    steps = SLOW_STEPS if chosen.injected.factor else STEPS
    (folder / "case").write_bytes(pickle.dumps((chosen.programs, chosen.injected, steps)))
    with agents(chosen, folder) as processes:
        found = watched(folder / "run") if chosen.injected.factor else hung(folder / "run", processes)
    blamed = tuple(sorted({one.rank for one in _faults(folder / "run") if one.detail["action"] == verdict.REPLACE}))
    if DEAD_ in expected.values() and found is None:
        first = next(iter(_faults(folder / "run")), None)
        named = () if first is None else ((first.rank, DEAD_),)
        right = {rank for rank, _ in named} <= expected.keys() and bool(named)
        return Result(Case(seed, chosen.layout, chosen.fault, expected, named, right, right, ()), blamed)
    result = Result(judge(chosen, expected, found or Diagnosis((), ())), blamed)
    if result.case.kind_is_right and set(blamed) <= expected.keys():
        shutil.rmtree(folder)
    return result


@contextlib.contextmanager
def agents(chosen: Chosen, folder: Path):
    """Return a context with the agents of a run, which are ended at its end: one, or one on each of several hosts."""
    with contextlib.ExitStack() as stack:
        if chosen.fault == SLOW_LINK:
            sys.path[:0] = [str(ROOT / "tests/helpers")]
            from nodes import Lab

            lab = stack.enter_context(Lab(chosen.layout.world_size))
            [slow] = chosen.injected.wrong
            lab.hosts[slow].degrade(delay_s=LINK_DELAY_S)
            where = ["--nnodes", str(len(lab.hosts)), "--rdzv-endpoint", f"{lab.hosts[0].address}:{PORT}"]
            # the hosts share the network's name of this machine, but not its address
            started = [_start(folder, [*where, "--node-rank", str(h.index)], 1, h.start, h.name) for h in lab.hosts]
        else:
            started = [_start(folder, [], chosen.layout.world_size, subprocess.Popen, "here")]
        try:
            yield started
        finally:
            for process in started:
                process.send_signal(signal.SIGTERM)
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                process.kill()
                process.wait()
            subprocess.run(["pkill", "-KILL", "-f", str(folder / "case")], check=False)


def _start(folder: Path, where: list[str], nproc: int, popen, name: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "ft", "run", "--nproc-per-node", str(nproc), "--standby", "0", *where]
    command += ["--run-dir", str(folder / "run"), "--limits", str(folder / "limits.yaml"), "--max-restarts", "0"]
    command += [str(Path(__file__).with_name("hangs_real_worker.py")), str(folder / "case")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(folder / f"out-{name}", "w") as log:
        return popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True)


def hung(run: Path, processes: list[subprocess.Popen]) -> Diagnosis | None:
    """Return the diagnosis of the look that the run takes by itself; None if it takes none."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and processes[0].poll() is None and not looks.path(run, 1, "n0").exists():
        time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        processes[0].wait(10)  # what the run does about it is counted, too
    return over_time([looks.read(run, 1)]) if looks.path(run, 1, "n0").exists() else None


def watched(run: Path) -> Diagnosis | None:
    """Return the diagnosis over looks at a run under way, as ft diagnose hang --looks does."""
    deadline = time.monotonic() + LIMIT_S
    status, taken = run / "status.json", []
    while time.monotonic() < deadline and len(taken) < LOOKS:
        if status.exists() and (number := ask(run)) is not None:
            look = looks.read(run, number)
            taken += [look] if any(rank.step > 1 for rank in look.ranks.values()) else []
        time.sleep(EVERY_S)
    return over_time(taken) if taken else None


def _faults(run: Path) -> list:
    if not (run / "events.jsonl").exists():
        return []
    return [event for event in load(run).events if event.name == events.FAULT_DETECTED and event.rank is not None]


if __name__ == "__main__":
    sys.exit(main())
