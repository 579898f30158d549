"""How the workers of runs with a killed worker end: many small runs, every end counted by its exit status.

    python tools/experiments/worker_ends.py --runs 200 --seed 0 --into FOLDER

Each run is ``ft run`` of pretrain_gpt.py with two logical ranks, data parallel, and a standby, a few steps long; one
rank is killed at a random step and phase. The processes that a run would start anew, its warm pool and its control
plane, are forked from this one, which has imported everything; all else is as in any run. Prints one JSON line: how
many ends there were of each status, and which threads of the workers lived on when the script was over, with the line
that each of them was at. A run is unclean if another worker than the killed one ended with another status than 0; its
logs are kept.
"""

import argparse
import contextlib
import ctypes
import json
import linecache
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import small_runs  # noqa: E402
from ft_runs import flags  # noqa: E402

from ft.cli import main as ft  # noqa: E402
from ft.job.agent import ending, preload  # noqa: E402
from ft.job.agent.workforce import Workforce  # noqa: E402
from ft.platform import processes  # noqa: E402

SCRIPT = str(ROOT / "pretrain_gpt.py")
RANKS = 2
FLAGS = "--use-distributed-optimizer --hidden-size 128 --seq-length 64 --micro-batch-size 4 --global-batch-size 16"
"""Gradients of several MiB, so that some messages are interrupted by the death of a worker."""
PHASES = ("forward", "backward", "reduce", "optimizer", "transfer")
LIMIT_S = 60.0


class Forked:
    """A replacement of ``subprocess.Popen`` for ``python -c CODE ARGUMENTS``: it forks the process from this one
    instead of starting a new one, so that all imports are done. The process ends as ``python`` does."""

    def __init__(self, command, *, stdin, stdout, stderr, env=None, pass_fds=(), start_new_session=False):
        self.stdin, self.returncode = None, None
        source = os.open(os.devnull, os.O_RDONLY)
        if stdin == subprocess.PIPE:
            os.close(source)
            source, into = os.pipe()
            self.stdin = os.fdopen(into, "wb")
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number, file in enumerate((source, stdout.fileno(), stderr.fileno())):
                os.dup2(file, number)
            keep = {0, 1, 2, *pass_fds}
            for number in [int(name) for name in os.listdir("/proc/self/fd")]:
                if number not in keep:
                    with contextlib.suppress(OSError):
                        os.close(number)
            os.environ.clear()
            os.environ.update(env or {})
            sys.argv = ["-c", *command[3:]]
            _run_to_the_end(command[2])
        os.close(source)

    def poll(self):
        return self.returncode


def _run_to_the_end(code: str) -> NoReturn:
    status = 0
    sys.path.insert(0, "")
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    ctypes.pythonapi.Py_Exit(status)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5, help="of each run")
    parser.add_argument("--stop-after", type=float, default=1e9, metavar="S", help="begin no run after so many seconds")
    parser.add_argument("--into", type=Path, required=True, help="folder for what the runs write")
    given = parser.parse_args(argv)
    given.into.mkdir(parents=True, exist_ok=True)
    ours = ["ft.job.agent.agent", "ft.job.agent.start", "ft.job.control.sidecar"]
    preload.load([*preload.plan(SCRIPT, False, []), *ours], set())
    job = flags(_corpus(given.into), FLAGS, given.steps)
    began, ends, codes, living, unclean = time.monotonic(), Counter(), Counter(), Counter(), []
    for number in range(given.runs):
        if time.monotonic() - began > given.stop_after:
            break
        folder = given.into / f"run{number}"
        shutil.rmtree(folder, ignore_errors=True)
        for suffix in (".ends", ".threads"):
            folder.with_suffix(suffix).unlink(missing_ok=True)
        chance = random.Random(f"worker ends {given.seed} {number}")
        step, rank, phase = chance.randrange(2, given.steps), chance.randrange(RANKS), chance.choice(PHASES)
        fault = f"kill@step={step}:rank={rank}:phase={phase}"
        code = run_one(folder, fault, job)
        codes[str(code)] += 1
        found = statuses(folder)
        ends.update(found.values())
        living.update(threads(folder))
        if code != 0 or not is_clean(found):
            unclean.append({"run": number, "fault": fault, "code": code, "ends": found})
            print(json.dumps(unclean[-1]), file=sys.stderr, flush=True)
        else:
            shutil.rmtree(folder)
    print(
        json.dumps(
            {
                "seed": given.seed,
                "runs": sum(codes.values()),
                "exit_codes": dict(codes),
                "ends": dict(ends),
                "threads_that_lived_on": dict(living.most_common()),
                "unclean": unclean,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    )
    return 1 if unclean else 0


def _corpus(folder: Path) -> str:
    """Write the corpus in a separate process, because this process must not start threads; return its prefix."""
    if not (folder / "corpus.bin").exists():
        pid = os.fork()
        if pid == 0:
            small_runs.make_corpus(folder)
            os._exit(0)
        os.waitpid(pid, 0)
    return str(folder / "corpus")


def run_one(folder: Path, fault: str, job: str) -> int:
    """Run one `ft run` in a process forked from this one; return its exit code."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        log = os.open(f"{folder}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        subprocess.Popen = Forked
        record_ends(folder)
        record_threads(folder)
        try:
            own = ["--run-dir", str(folder), "--nproc-per-node", str(RANKS), "--standby", "1", "--inject", fault]
            ft(["run", *own, SCRIPT, *job.split()])
        except BaseException:
            traceback.print_exc()
        os._exit(99)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    processes.kill_whole([pid])
    os.waitpid(pid, 0)
    return -99


def is_clean(ends: dict[str, str]) -> bool:
    """Return whether exactly one worker was killed by the fault, and the others ended with status 0. Workers that are
    still starting at the end are killed by the agent, and are ignored."""
    others = Counter(how for how in ends.values() if how not in ("exited with status 0", "killed by the agent"))
    return others == {"killed by SIGKILL": 1}


def record_ends(folder: Path) -> None:
    """Make the agent in this process record how each of its workers ends."""
    ended = Workforce.ended

    def recorded(self, pid: int, code: int):
        worker = ended(self, pid, code)
        if worker is not None:
            how = "killed by the agent" if worker.doomed else processes.how_it_ended(code)
            with open(folder.with_suffix(".ends"), "a") as file:
                file.write(json.dumps([worker.name, how]) + "\n")
        return worker

    Workforce.ended = recorded


def record_threads(folder: Path) -> None:
    """Make workers forked by this process record which threads are still alive when their script ends, and where."""
    leave = ending.leave

    def recorded(status: int) -> NoReturn:
        frames = sys._current_frames()
        with open(folder.with_suffix(".threads"), "a") as file:
            for thread in threading.enumerate():
                frame = frames.get(thread.ident)
                if thread is not threading.current_thread() and frame is not None:
                    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                    file.write(json.dumps(f"{thread.name}: {line}") + "\n")
        leave(status)

    ending.leave = recorded


def threads(folder: Path) -> list[str]:
    """Return the threads that ``record_threads`` has recorded."""
    file = folder.with_suffix(".threads")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def statuses(folder: Path) -> dict[str, str]:
    """Return how each worker of a run has ended."""
    return dict(json.loads(line) for line in folder.with_suffix(".ends").read_text().splitlines())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
