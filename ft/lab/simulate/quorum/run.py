"""Run the emulation of ``ft simulate quorum``: start the quorum server and the replicas, and combine their logs.

A quorum is the set of replicas that execute a training step together. It goes from the quorum server to the leader of
each replica (rank 0), and from there to all ranks. The replicas are spread over several processes, called crews.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ft.base import bounded_json, token
from ft.base.checkout import CHECKOUT
from ft.base.errors import FtError
from ft.lab.simulate.quorum.shape import WARM_UP, Job
from ft.platform import processes

_DEADLINE_S = 1800.0
"""Seconds after which the emulation has failed."""
_TAIL = 2000
"""Number of characters of the processes' log in an error message."""


@dataclass(frozen=True)
class Round:
    """The latency of one quorum, counted from the last report of a member.

    Attributes:
        step: training step that the quorum is for.
        members: number of replicas in the quorum.
        leaders_s: seconds until the last leader received the quorum.
        ranks_s: seconds until the last logical rank received the quorum.
        change: difference of the members from the previous quorum: "none", "death" (one is lost) or "return".
    """

    step: int
    members: int
    leaders_s: float
    ranks_s: float
    change: str


@dataclass(frozen=True)
class Measured:
    """The result of an emulation.

    Attributes:
        rounds: latencies of all quorums after the warm-up.
        seconds: duration of the whole emulation in seconds, including the start of its processes.
        crews: number of processes over which the replicas were spread.
    """

    rounds: list[Round]
    seconds: float
    crews: int


def emulate(job: Job, crews: int) -> Measured:
    """Run the emulation.

    Args:
        job: parameters of the emulation.
        crews: number of processes for the replicas; the quorum server has one more.

    Raises:
        FtError: one of the processes failed.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ft-quorum-") as folder:
        run_dir = Path(folder)
        secret = token.make(run_dir, {})
        running: list[subprocess.Popen] = []
        try:
            options = {"replicas": job.replicas}
            server = _start("ft.job.quorum", run_dir, "--run-dir", folder, "--options", json.dumps(options))
            running.append(server)
            for place in range(crews):
                words = {"run_dir": folder, "token": secret, "job": asdict(job)}
                words["replicas"] = list(range(place, job.replicas, crews))
                running.append(_start("ft.lab.simulate.quorum.crew", run_dir, json.dumps(words)))
            logs = [entry for crew in running[1:] for entry in _end(crew, run_dir, began + _DEADLINE_S)]
        finally:
            for process in running:
                process.kill()
                process.wait()
    return Measured(list(rounds(logs)), time.monotonic() - began, crews)


def rounds(logs: list[dict]) -> Iterable[Round]:
    """Yield the latencies of each quorum after the warm-up, in order.

    Args:
        logs: output of the processes: the log of each replica.
    """
    found: dict[int, dict[int, list]] = {}
    for one in logs:
        for number, *entry in one["log"]:
            found.setdefault(number, {})[one["replica"]] = entry
    before: set[int] = set()
    for _, entries in sorted(found.items()):
        members, step = set(entries), next(iter(entries.values()))[0]
        asked = max(entry[1] for entry in entries.values())
        answered, delivered = (max(entry[place] for entry in entries.values()) for place in (2, 3))
        change = "death" if before - members else "return" if members - before else "none"
        if step >= WARM_UP:
            yield Round(step, len(members), answered - asked, delivered - asked, change)
        before = members


def _start(module: str, run_dir: Path, *words: str) -> subprocess.Popen:
    path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != token.VARIABLE}
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with open(run_dir / "log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )


def _end(process: subprocess.Popen, run_dir: Path, deadline: float) -> list[dict]:
    try:
        said, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise FtError(f"the emulation has not ended after {_DEADLINE_S:g} s") from error
    if process.returncode:
        said = (run_dir / "log").read_text()[-_TAIL:]
        raise FtError(f"a process of the emulation {processes.how_it_ended(process.returncode)}:\n{said}")
    return bounded_json.loads(said, non_finite=True)
