"""Faults of random kind, time and victim in seeded runs of replicas: does training go on, equal and without a gap?

    python tools/experiments/hsdp_campaign.py --seeds 0..9 --into FOLDER     runs them, one line each in FOLDER
    python tools/experiments/hsdp_campaign.py --report --into FOLDER          table and picture of what is there

Each run has 3 replicas of 2 ranks (distributed optimizer) and saves a checkpoint every 10 steps. It is sound if it
reached its last step, replicas of a quorum were bit for bit equal after every step, every sample was trained once,
each failure cost one step at most (where a replica was left; between two loads of a checkpoint, otherwise), and no
process is left. Seeds that FOLDER has already are passed over, so a campaign can be run in pieces.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fault_campaign import ROOT, corpus, read

from ft.observe.report.lineage import lineage

REPLICAS, RANKS = 3, 2
LAYOUT = "--use-distributed-optimizer"
SAVE_INTERVAL = 10
FAULTS, FIRST, SPACING = 20, 5, 14
LIMIT_S = 220.0
PHASES = ("between", "forward", "backward", "reduce", "optimizer")
SERVER = "kill-server"
"""Kills the quorum server: no worker can do that, so the campaign does."""

WORKER = (
    *("kill", "kill", "kill", "hang", "drop", "segfault", "exit", "gil", "stall", "slow", "disk-full"),
    *("out-of-memory", "out-of-files", "io-error", "lose-device"),
    *("exception:error=recoverable", "exception:error=timeout", "exception:error=node", "exception:error=software"),
    *("lose-reports", "duplicate-reports", "reorder-reports", "delay-reports"),
)
OF_REPLICA = ("kill-control", "kill-agent")
TOGETHER = {
    "two replicas": ("kill", "kill"),
    "all replicas": ("kill", "kill", "kill"),
    "kill, hang": ("kill", "hang"),
}
"""Pairs of faults that hit different replicas in the same step."""
IN_RETURN = ("returning: restore", "returning: resume", "healthy: restore", "healthy: resume")
"""A replica is killed; when it returns, it or another replica is killed in that phase."""
KINDS = (*WORKER, *OF_REPLICA, SERVER, SERVER, *TOGETHER, *IN_RETURN)
HOLDING_UP = ("stall", "gil", "kill-agent", "kill-control", "disk-full")
"""Kinds after which a replica is absent for several steps at which others are planned: few occur in a short run."""
BRIEF = {"slow": "for=300ms", "disk-full": "for=300ms"}


@dataclass(frozen=True)
class Planned:
    """One fault of a run. ``specs``: for ``--inject``; empty if the campaign injects it. ``replicas``: victims."""

    kind: str
    step: int
    replicas: tuple[int, ...]
    specs: tuple[str, ...]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", metavar="A..B", help="run these seeds")
    parser.add_argument("--into", type=Path, required=True, help="folder for results and what the runs write")
    parser.add_argument("--stop-after", type=float, default=1e9, metavar="S", help="begin no run after so many seconds")
    parser.add_argument("--report", action="store_true", help="write table and picture from what is in --into")
    given = parser.parse_args(argv)
    given.into.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    first, _, last = (given.seeds or "0..-1").partition("..")
    for seed in range(int(first), int(last or first) + 1):
        if seed in {entry["seed"] for entry in read(given.into)} or time.monotonic() - began > given.stop_after:
            continue
        entry = run_one(seed, given.into, corpus(given.into))
        with open(given.into / "runs.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")
        print(summary(entry), flush=True)
    if given.report:
        from hsdp_campaign_report import write

        print(write(read(given.into), ROOT))
    return 0 if not any(entry["problems"] for entry in read(given.into)) else 1


def steps_of(faults: int) -> int:
    """Return the number of steps of a run with that many faults."""
    return FIRST + faults * SPACING + 5


# --- what is injected ------------------------------------------------------------------------------------------------


def plan(seed: int, faults: int = FAULTS) -> list[Planned]:
    """Return the faults of one run. Over the seeds every kind occurs as often as in ``KINDS``."""
    rng = random.Random(f"replicas {seed}")
    return [
        _planned(_kind(seed * FAULTS + number), FIRST + number * SPACING + rng.randrange(3), rng)
        for number in range(faults)
    ]


def _kind(number: int) -> str:
    """Return kind ``number`` of an endless sequence of shuffled tables."""
    order = list(KINDS)
    random.Random(f"order {number // len(KINDS)}").shuffle(order)
    return order[number % len(KINDS)]


def _planned(kind: str, step: int, rng: random.Random) -> Planned:
    victims = rng.sample(range(REPLICAS), REPLICAS)
    if kind == SERVER:
        return Planned(kind, step, (), ())
    if kind in OF_REPLICA:
        return Planned(kind, step, (victims[0],), (f"{kind}@replica={victims[0]}:step={step}",))
    if kind in TOGETHER:
        hit = tuple(zip(TOGETHER[kind], victims, strict=False))
        specs = tuple(_spec(one, replica, step, rng) for one, replica in hit)
        return Planned(kind, step, tuple(replica for _, replica in hit), specs)
    if kind in IN_RETURN:
        who, _, phase = kind.partition(": ")
        second = victims[0] if who == "returning" else victims[1]
        rank = rng.randrange(RANKS)
        return Planned(
            kind,
            step,
            tuple(dict.fromkeys((victims[0], second))),
            (
                _spec("kill", victims[0], step, rng),
                f"kill@replica={second}:step={step}:rank={rank}:phase={phase}",
            ),
        )
    return Planned(kind, step, (victims[0],), (_spec(kind, victims[0], step, rng),))


def _spec(kind: str, replica: int, step: int, rng: random.Random) -> str:
    name, _, how = kind.partition(":")
    keys = [f"replica={replica}", f"step={step}", f"rank={rng.randrange(RANKS)}", f"phase={rng.choice(PHASES)}"]
    return f"{name}@" + ":".join([*keys, *filter(None, (how, BRIEF.get(name)))])


# --- runs ------------------------------------------------------------------------------------------------------------


def run_one(seed: int, into: Path, data: str, faults: int = FAULTS) -> dict:
    """Run one run; return its outcome and that of each fault, as JSON values. "problems": all that is wrong."""
    from replica_runs import Replicas, flags

    planned, steps = plan(seed, faults), steps_of(faults)
    specs = ",".join(spec for one in planned for spec in one.specs)
    folder, saved = into / f"seed-{seed}", into / f"seed-{seed}.save"
    for path in (folder, saved):
        shutil.rmtree(path, ignore_errors=True)
    wanted = flags(data, f"{LAYOUT} --save {saved} --save-interval {SAVE_INTERVAL}", steps)
    entry = {"seed": seed, "inject": specs, "faults": [], "problems": []}
    began = time.monotonic()
    try:
        run = Replicas(folder, wanted, replicas=REPLICAS, nproc=REPLICAS * RANKS, options=f"--inject {specs}")
        kills = _kill_servers(run, [one for one in planned if one.kind == SERVER], began + LIMIT_S)
        done = run.wait(max(1.0, began + LIMIT_S - time.monotonic()))
    except AssertionError as hang:
        (into / f"seed-{seed}.problem").write_text(str(hang))
        return entry | {"problems": ["hangs, or leaves processes"], "wall_s": round(time.monotonic() - began, 1)}
    entry["wall_s"] = round(time.monotonic() - began, 1)
    entry["problems"] = judge(done, steps, [event.wall for event in done.injected()] + kills)
    entry["faults"] = what_came(done, planned, kills)
    if entry["problems"]:
        (into / f"seed-{seed}.problem").write_text("\n".join([*entry["problems"], done.explain()]))
    else:
        shutil.rmtree(folder)
        shutil.rmtree(saved, ignore_errors=True)
    return entry


def _kill_servers(run, planned: list[Planned], until: float) -> list[float]:
    """Kill the quorum server in each of the planned steps; return the wall times."""
    found = []
    for one in planned:
        while run.step() < one.step and run.process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        if run.process.poll() is None:
            found.append(time.time())
            os.kill(run.server(), signal.SIGKILL)
    return found


def judge(done, steps: int, failures: list[float]) -> list[str]:
    """Return all that is wrong with a finished run of ``steps`` steps. ``failures``: their wall times."""
    loads = reloads(done)
    found = [] if done.code == 0 else [f"exit code {done.code}"]
    found += done.proof.problems(steps, math.inf) + redone(done, failures, loads)
    for load in loads:
        lost = [replica for replica in load.holders if _has_begun_again(done, replica, load.wall)]
        if set(lost) != set(load.holders):
            lived = sorted(set(load.holders) - set(lost))
            found.append(f"step {load.step} was loaded while replicas {lived} lived")
    return found


@dataclass(frozen=True)
class Load:
    """A resumption of the run from a checkpoint.

    Attributes:
        step: the first step after it.
        quorum: the quorum of that step.
        wall: wall time of that step's commit.
        holders: the replicas that had committed the last step before.
    """

    step: int
    quorum: int
    wall: float
    holders: tuple[int, ...]


def reloads(done) -> list[Load]:
    """Return the resumptions from checkpoints. The first step after one may be committed twice, too."""
    lines = sorted(_commits(done), key=lambda c: (c.quorum, c.step, c.wall))
    found = []
    for last, commit in pairwise(lines):
        is_same = last.before == 0 and last.step == commit.step
        if commit.before == 0 and commit.quorum > last.quorum and not is_same:
            found.append(Load(commit.step, commit.quorum, commit.wall, last.members))
    return found


def redone(done, failures: list[float], loads: list[Load]) -> list[str]:
    """List the stretches between resumptions in which more steps were repeated than there were failures.

    Steps that a resumption takes back do not count as repeated in the stretch before: they led to its last state.
    """
    found, last = [], max((commit.quorum for commit in _commits(done)), default=0)
    begins = [(0, -math.inf), *((load.quorum, load.wall) for load in loads), (last + 1, math.inf)]
    for (first, since), (end, until) in pairwise(begins):
        until_then = {who: [c for c in lines if c.quorum < end] for who, lines in done.proof.lines.items()}
        anew = [step.commit for step in lineage(until_then).superseded if step.commit.quorum >= first]
        most = sum(since <= wall < until for wall in failures)
        if len(anew) > most:
            steps = [(commit.step, commit.quorum) for commit in anew]
            found.append(f"superseded (step, quorum), in quorums {first} to {end - 1}: {steps}; at most {most} may be")
    return found


def _commits(done) -> list:
    return [commit for lines in done.proof.lines.values() for commit in lines]


def _has_begun_again(done, replica: int, before: float) -> bool:
    """Return whether the replica's workers were restarted between its last commit before ``before`` and that time."""
    from ft.base import events

    walls = [commit.wall for commit in done.proof.lines[replica] if commit.wall < before and commit.before]
    return any(max(walls, default=0.0) < event.wall < before for event in done.of(replica, events.WORKER_STARTED))


# --- what came of it -------------------------------------------------------------------------------------------------


def what_came(done, planned: list[Planned], server_kills: list[float]) -> list[dict]:
    """Return for each planned fault that occurred: its kind, whether its replicas were left out for a while, how much
    longer than normal the step took in which it occurred, and the seconds until the last of its replicas was back."""
    from ft.observe.report.lineage import find
    from ft.observe.report.record import load

    steps = done.proof.lineage.steps
    pace, _ = find(steps, load(done.folder).events)
    walls = _walls(done, planned, server_kills)
    order = sorted(walls.values())
    found = []
    for number, wall in walls.items():
        one = planned[number]
        until = next((w for w in order if w > wall), float("inf"))
        after = [index for index, step in enumerate(steps) if step.when > wall]
        near = [index for index in after if steps[index].when - pace.took[index] < min(until, wall + 60.0)]
        stall = max((pace.stall(index) for index in near[:3]), default=0.0)
        back = [_back(steps, after, near, replica, wall) for replica in one.replicas]
        left = [seconds for is_left, seconds in back if is_left]
        is_reload = any(steps[index].commit.before == 0 for index in near if steps[index].number > 1)
        found.append(
            {
                "kind": one.kind,
                "left": bool(left),
                "reload": is_reload,
                "stall_s": round(stall, 3),
                "back_s": round(max(left), 3) if left and None not in left else None,
            }
        )
    return found


def _walls(done, planned: list[Planned], server_kills: list[float]) -> dict[int, float]:
    """Return number of each planned fault -> wall time at which (the first part of) it occurred."""
    from ft import faults as inject
    from ft.job.replicas import places

    specs = inject.parse(",".join(spec for one in planned for spec in one.specs))
    by_replica = places.plan_faults(specs, REPLICAS, places.LauncherPart(0, 1, 0, RANKS), 0)
    of_run = [fault for some in by_replica.values() for fault in some]
    steps = {one.step: number for number, one in enumerate(planned)}
    numbers = {fault.number: steps[fault.step] for fault in of_run}
    found: dict[int, float] = {}
    for event in done.injected():
        found.setdefault(numbers[event.detail["number"]], event.wall)
    of_server = [number for number, one in enumerate(planned) if one.kind == SERVER]
    return {**found, **dict(zip(of_server, server_kills, strict=False))}


def _back(steps, after, near, replica: int, wall: float) -> tuple[bool, float | None]:
    """Return (whether the replica was left out, seconds until the next step that it contributes to, None: never)."""
    gone = next((index for index in near if replica not in steps[index].commit.healthy), None)
    if gone is None:
        return False, None
    again = next((i for i in after if i > gone and replica in steps[i].commit.healthy), None)
    return True, None if again is None else max(0.0, steps[again - 1].when - wall)


def summary(entry: dict) -> str:
    verdict = "; ".join(entry["problems"]) or "ok"
    left = sum(fault["left"] for fault in entry["faults"])
    return f"seed {entry['seed']}: {verdict} in {entry['wall_s']} s; {len(entry['faults'])} faults, {left} left out"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
