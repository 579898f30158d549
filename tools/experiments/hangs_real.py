"""Injects hangs and slow ranks into real runs of ft run, and counts how often ft diagnose hang names the cause.

Each case is a run of 4 or 8 workers that carry out the communication of Megatron's steps (``ft simulate hangs``) with
real process groups over gloo, and one fault. For a hang, the look is read that the run takes by itself before a time
limit passes; for a slow rank, ft diagnose hang --looks is used. Operations of wrong sizes are left out, because gloo
ends the process instead of hanging; so are slow connections, which this machine has not, and killed workers, whose
death the run sees at once.

    python tools/experiments/hangs_real.py --cases 200 --into /tmp/hangs
"""

import argparse
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from ft.faults.hang.series import over_time
from ft.lab.simulate.hangs.faults import KINDS, STEP
from ft.lab.simulate.hangs.machine import Machine
from ft.lab.simulate.hangs.program import Layout, programs
from ft.record import looks
from ft.show.text import table

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = (
    *(Layout(dp=4), Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(cp=2, dp=2), Layout(pp=4), Layout(dp=4, ep=2)),
    *(Layout(pp=2, vpp=2, dp=2), Layout(tp=2, pp=2, dp=2, microbatches=2), Layout(tp=2, cp=2, pp=2, microbatches=2)),
)
LEFT_OUT = ("killed", "wrong sizes", "wrong size of a message", "slow link")
LIMIT_S, STEPS, SLOW_STEPS = 60.0, STEP + 2, 2000
LIMITS = "stall_s: 2\nsilent_s: 4\ncollective_s: 3\nstart_s: 5\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--into", type=Path, required=True)
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    tally: dict[str, list[int]] = {}
    misses, seed, done = [], given.seed, 0
    while done < given.cases:
        found = case(seed, given.into)
        seed += 1
        if found is None:
            continue
        done += 1
        fault, layout, expected, named = found
        first = named[: len(expected)]
        ranks = {rank for rank, _ in first} == expected.keys()
        kinds = ranks and all(expected[rank] == kind for rank, kind in first)
        for name in (fault, "all"):
            row = tally.setdefault(name, [0, 0, 0, 0])
            for at, value in enumerate((1, ranks, kinds, bool({rank for rank, _ in named} - expected.keys()))):
                row[at] += value
        if not kinds:
            misses.append(f"seed {seed - 1}, {layout}, {fault}: {named}; injected was {expected}")
            print(misses[-1], flush=True)
    print(f"seeds {given.seed} to {seed - 1}")
    rows = [
        (fault, str(n), f"{ranks / n:.1%}", f"{kinds / n:.1%}", str(innocents))
        for fault, (n, ranks, kinds, innocents) in sorted(tally.items(), key=lambda item: (item[0] == "all", item[0]))
    ]
    print(table(("fault", "cases", "rank named", "kind named", "innocents"), rows, right=(1, 2, 3, 4)))
    print("\n".join(["", "missed:", *misses] if misses else ["", "nothing was missed"]))
    return 0


def case(seed: int, into: Path):
    """Return (fault, layout, expected kinds by rank, named ranks and kinds); None if the seed has no case."""
    choice = random.Random(seed)
    layout, fault = choice.choice(LAYOUTS), choice.choice([kind for kind in sorted(KINDS) if kind not in LEFT_OUT])
    all_ = programs(layout)
    injected = KINDS[fault](all_, choice)
    if injected is None or "dead" in injected.kinds.values():
        return None
    expected = injected.kinds
    if not injected.factor:
        machine = Machine(all_, STEPS, injected.wrong, STEP, choice)
        machine.run()
        if all(rank.ended for rank in machine.look().ranks.values()):
            return None  # nothing hangs
        waited_for = {edge.on for edge in over_time([machine.look()]).waiting}
        expected = {
            r: kind for r, kind in expected.items() if machine.is_wrong(r) and (len(expected) == 1 or r in waited_for)
        }
    folder = into / f"case-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "limits.yaml").write_text(LIMITS)
    (folder / "case").write_bytes(pickle.dumps((all_, injected, SLOW_STEPS if injected.factor else STEPS)))
    found = _run(folder, layout.world_size, slow=bool(injected.factor))
    return fault, layout, expected, [(cause.rank, cause.kind) for cause in found.causes] if found is not None else []


def _run(folder: Path, size: int, slow: bool):
    """Run the case, and return the diagnosis; None if no look was taken."""
    run, here = folder / "run", Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "ft",
        "run",
        "--nproc-per-node",
        str(size),
        "--standby",
        "0",
        "--run-dir",
        str(run),
    ]
    command += ["--limits", str(folder / "limits.yaml"), "--max-restarts", "0"]
    command += [str(here / "hangs_real_worker.py"), str(folder / "case")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(folder / "out", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
    try:
        return _slow(run, size) if slow else _hung(run, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        subprocess.run(["pkill", "-KILL", "-f", str(folder / "case")], check=False)


def _hung(run: Path, process: subprocess.Popen):
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if looks.path(run, 1, "n0").exists():
            return over_time([looks.read(run, 1)])
        time.sleep(0.05)
    return over_time([looks.read(run, 1)]) if looks.path(run, 1, "n0").exists() else None


def _slow(run: Path, size: int, number: int = 24):
    """Take looks at a run under way, as ft diagnose hang --looks does."""
    deadline = time.monotonic() + LIMIT_S
    taken = []
    while time.monotonic() < deadline and len(taken) < number:
        known = looks.numbers(run)
        if (run / "status.json").exists() and (run / "status.json").read_text().count('"step": ') > size:
            looks.wanted(run).parent.mkdir(exist_ok=True)
            looks.wanted(run).write_text("asked for")
            until = time.monotonic() + 3
            while time.monotonic() < until and not (new := [n for n in looks.numbers(run) if n not in known]):
                time.sleep(0.02)
            time.sleep(0.05)
            if new and looks.path(run, new[-1], "n0").exists():
                taken.append(looks.read(run, new[-1]))
        time.sleep(0.1)
    moving = [look for look in taken if any(rank.step > 1 for rank in look.ranks.values())]
    return over_time(moving) if moving else None


if __name__ == "__main__":
    sys.exit(main())
