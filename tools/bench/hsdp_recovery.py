"""Measure the loss and the return of a replica in real runs of `ft run`, while the other replicas continue training.

    python tools/bench/hsdp_recovery.py --replicas 3

Prints one JSON line. Workers are killed one after the other by SIGKILL (with --kind hang: stopped by SIGSTOP) from
outside, at a random point of a step, each after all replicas have trained together for some steps. The figures are
medians over the faults. `stall_ms` is the duration of the other replicas' step beyond a normal one. `back_in_quorum_ms`
is the time from the fault until a quorum includes the replica again, `contributes_ms` the time until its first step.
`rejoin_ratio` is the longest step of the others during its return divided by a normal step; for comparison,
`calm_ratio` is the same for as many undisturbed steps. `phases_ms` has the durations of the phases of the return, from
the events of the run. Durations of steps are those of the run's report.

What torchft-nightly took for the same model and fault is in tools/bench/results/torchft_recovery.jsonl (program of
commit 96f2db59).
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from in_ranks import ROOT, median_ms

from ft.base import events
from ft.observe.report import record
from ft.observe.report.lineage import FAILURE, REJOIN
from ft.systems.hsdp import commits

START_S, RETURN_S, END_S = 90.0, 60.0, 30.0
SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}


@dataclass(frozen=True)
class Fault:
    """An injected fault: its wall time and its replica."""

    at: float
    replica: int


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="of a replica")
    parser.add_argument("--faults", type=int, default=6, help="that count, beside a first one to warm up")
    parser.add_argument("--kind", default="kill", choices=sorted(SIGNALS), help="what is done to the worker")
    parser.add_argument("--settled-steps", type=int, default=20, help="steps of all replicas before a fault")
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=32)
    parser.add_argument("--rank-batch", type=int, default=2, help="samples of a rank in a step")
    parser.add_argument("--keep", type=Path, help="run folder that is kept")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # cleans up on SIGTERM
    load = [round(one, 1) for one in os.getloadavg()]
    with tempfile.TemporaryDirectory() as folder:
        import small_runs as runs

        from megatron import patches

        patches.apply()
        corpus = runs.make_corpus(Path(folder))
        run = Run(arguments, arguments.keep or Path(folder) / "run", corpus)
        try:
            faults = [run.strike(number % arguments.replicas) for number in range(arguments.faults + 1)]
        finally:
            run.end()
        found = result(arguments, run.folder, faults)
    print(json.dumps({**found, "load_before": load, **options(arguments)}))
    return 0


class Run:
    """A run in progress."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, corpus: str):
        import small_runs as runs

        self.folder, self._arguments = folder, arguments
        replicas, ranks = arguments.replicas, arguments.ranks
        flags = (
            f"{runs.BASE} --hidden-size {arguments.hidden_size} --num-layers {arguments.layers} "
            f"--seq-length {arguments.seq_length} --micro-batch-size {arguments.rank_batch} "
            f"--global-batch-size {arguments.rank_batch * ranks * replicas} --train-iters 1000000 "
            f"--use-distributed-optimizer --data-path {corpus}"
        )
        command = [sys.executable, "-m", "ft", "run", "--quiet", "--ft-hsdp-replicas", str(replicas)]
        command += ["--nproc-per-node", str(replicas * ranks), "--run-dir", str(folder), str(ROOT / "pretrain_gpt.py")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "console.log", "w") as log:
            self._job = subprocess.Popen(
                [*command, *flags.split()], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def strike(self, replica: int) -> Fault:
        """Break a worker of ``replica`` once all replicas train together, and wait until they do so again."""
        self._wait(START_S, self._is_settled)
        pid = self._worker(replica)
        fault = Fault(time.time(), replica)
        os.kill(pid, SIGNALS[self._arguments.kind])
        self._wait(RETURN_S, lambda: self._is_settled(after=fault.at))
        return fault

    def end(self) -> None:
        self._job.terminate()
        try:
            self._job.wait(END_S)
        except subprocess.TimeoutExpired:
            self._job.terminate()
            self._job.wait(END_S)

    def _is_settled(self, after: float = 0.0) -> bool:
        """Return whether all replicas contributed to the last steps, which came after ``after``, and still train."""
        wanted = self._arguments.settled_steps
        for replica in range(self._arguments.replicas):
            last = commits.read(self.folder / f"replica-{replica}")[-wanted:]
            if len(last) < wanted or last[0].wall < after or time.time() - last[-1].wall > 1.0:
                return False
            if any(len(one.healthy) < self._arguments.replicas for one in last):
                return False
        return True

    def _worker(self, replica: int) -> int:
        """Return the process id of the last rank of ``replica``."""
        own = events.read(self.folder / f"replica-{replica}" / "events.jsonl")
        opened = [event for event in own if event.name == events.EPOCH_OPENED][-1]
        name = opened.detail["seats"][str(self._arguments.ranks - 1)]
        started = [event for event in own if event.name == events.WORKER_STARTED and event.worker == name]
        return started[-1].detail["pid"]

    def _wait(self, limit_s: float, is_there) -> None:
        deadline = time.monotonic() + limit_s
        while not is_there():
            if time.monotonic() > deadline or self._job.poll() is not None:
                logs = [path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*/logs/*"))]
                said = (self.folder / "console.log").read_text()[-3000:]
                raise SystemExit("\n".join([f"not all replicas train within {limit_s:g} s", said, *logs]))
            time.sleep(0.1)


# --- the figures ------------------------------------------------------------------------------------------------------


def result(arguments: argparse.Namespace, folder: Path, faults: list[Fault]) -> dict:
    """Return medians over all faults but the first."""
    report = record.load(folder)
    counted = faults[1:]
    ends = [*(fault.at for fault in counted[1:]), float("inf")]
    failures = [incident(report, FAILURE, fault, end) for fault, end in zip(counted, ends, strict=True)]
    rejoins = [incident(report, REJOIN, fault, end) for fault, end in zip(counted, ends, strict=True)]
    returns = [moments(report, fault, end) for fault, end in zip(counted, ends, strict=True)]
    normal = statistics.median(one.normal_s for one in failures)
    stalls = [one.stall_s for one in failures]
    phases = {name: each for way in returns for name in way for each in [[w[name] for w in returns if name in w]]}
    return {
        "bench": "hsdp_recovery",
        "stall_ms": median_ms(stalls),
        "stall_all_ms": every_ms(stalls),
        "stall_goal_ms": round(1e3 * (0.3 if arguments.kind == "kill" else 3 * normal + 1.0)),
        "step_ms": median_ms([normal]),
        "back_in_quorum_ms": median_ms(phases["quorum"]),
        "back_in_quorum_all_ms": every_ms(phases["quorum"]),
        "contributes_ms": median_ms(phases["first_step"]),
        "rejoin_ratio": round(statistics.median(one.longest_s / one.normal_s for one in rejoins), 3),
        "rejoin_ratio_all": [round(one.longest_s / one.normal_s, 2) for one in rejoins],
        "rejoin_longest_ms": median_ms([one.longest_s for one in rejoins]),
        "calm_ratio": calm_ratio(report, statistics.median_low(one.last - one.first + 1 for one in rejoins)),
        "phases_ms": in_turn(phases),
        "samples_once": report.audit.is_clean,
        "load_after": [round(one, 1) for one in os.getloadavg()],
    }


def incident(report: record.Record, kind: str, fault: Fault, end: float):
    """Return the report's incident for the failure, or for the return."""
    found = [one for one in report.of_kind(kind) if fault.replica in one.replicas and fault.at - 1.0 < one.end < end]
    if not found:
        raise SystemExit(f"the report knows of no {kind} of replica {fault.replica} at {fault.at}: {report.incidents}")
    return found[0]


def calm_ratio(report: record.Record, count: int) -> float:
    """Return the noise: the median ratio of the longest of ``count`` undisturbed steps in a row to a normal step."""
    disturbed = {number for one in report.incidents for number in range(one.first - 1, one.last + 2)}
    ratios = [took / normal for took, normal in zip(report.pace.took, report.pace.normal, strict=True)]
    calm = [
        max(ratios[i : i + count])
        for i in range(1, len(ratios) - count)
        if not disturbed & {step.number for step in report.steps[i : i + count]}
    ]
    return round(statistics.median(calm), 3)


def moments(read: record.Record, fault: Fault, end: float) -> dict[str, float]:
    """Return the seconds from the fault to each phase of the replica's return that events record."""
    own = [event for event in read.replicas[fault.replica].events if fault.at <= event.wall < end]
    whole = [event for event in read.events if fault.at <= event.wall < end]
    found = {}
    for name, event in (
        ("death_seen", events.FAULT_DETECTED),
        ("restart_ordered", events.RESTARTED),
        ("worker_forked", events.WORKER_STARTED),
        ("seat_taken", events.EPOCH_OPENED),
        ("model_built", events.RESUMED),
        ("fetched", events.CAUGHT_UP),
    ):
        found[name] = next((one.wall for one in own if one.name == event), None)
    online = (e for e in whole if e.name == events.REPLICA_ONLINE and e.detail["replica"] == fault.replica)
    found["reported"] = next((event.wall for event in online), None)
    formed = [event for event in whole if event.name == events.QUORUM_FORMED]
    is_in = (e.wall for e in formed if fault.replica in (*e.detail["healthy"], *e.detail["behind"]))
    found["quorum"] = next((wall for wall in is_in if found["reported"] and wall >= found["reported"]), None)
    steps = (one for one in read.replicas[fault.replica].commits if fault.at < one.wall < end)
    found["first_step"] = next((one.wall for one in steps if fault.replica in one.healthy), None)
    return {name: wall - fault.at for name, wall in found.items() if wall is not None}


def in_turn(phases: dict[str, list[float]]) -> dict[str, float]:
    """Return the median duration of each phase, from the end of the one before."""
    medians = sorted((statistics.median(each), name) for name, each in phases.items())
    return {b: round(1e3 * (at_b - at_a), 1) for (at_a, _), (at_b, b) in pairwise([(0.0, ""), *medians])}


def options(arguments: argparse.Namespace) -> dict:
    """Return the flags, without paths of this machine."""
    return {name: value for name, value in vars(arguments).items() if name != "keep"}


def every_ms(seconds: list[float]) -> list[int]:
    return [round(1e3 * one) for one in seconds]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
