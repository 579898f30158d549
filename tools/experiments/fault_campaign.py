"""Faults of random kind, time and place in seeded runs of a tiny model: is every one of them survived?

    python tools/experiments/fault_campaign.py --seeds 0..24 --into FOLDER     runs them, one line each in FOLDER
    python tools/experiments/fault_campaign.py --matrix 0..20 --into FOLDER    every kind in every phase of a recovery
    python tools/experiments/fault_campaign.py --report --into FOLDER          table, picture and times of what is there

Each run has 4 logical ranks and a standby, saves a checkpoint every 5 steps, and is compared, bit for bit, with the
losses of a run without faults. Seeds that FOLDER has already are passed over, so a campaign can be run in pieces.
"""

import argparse
import itertools
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(Path(__file__).parent)]

from ft.faults import parse, schedule  # noqa: E402
from ft.faults.faults import RECOVERY_PHASES, STEP_PHASES  # noqa: E402
from ft.faults.table import CONTROL, FILES, HARMLESS, STOPPED, TABLE, UNNOTICED, WORKER, FaultRow, row_of  # noqa: E402
from ft.record.recoveries import recoveries  # noqa: E402

RANKS, STANDBYS = 4, 1
LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2"
SAVE_INTERVAL = 5
FAULTS, FIRST, SPACING = 8, 5, 7
STEPS = FIRST + FAULTS * SPACING + 4
LIMIT_S, SEEN_WITHIN_S = 450.0, 2.0  # a stall in a first step is tolerated for 300 s: it could be compilation
SECOND_S, TIMED = 0.3, 0.12
"""Shares of the faults that get a second fault during their recovery, and that are triggered by time, not by step."""
ROWS = [
    r for r in TABLE if r.outcome not in (STOPPED, UNNOTICED) and r.where in (WORKER, FILES, CONTROL) and not r.needs
]
BRIEF = {"slow": "for=300ms", "disk-full": "for=150ms"}
# A NaN written after the step's losses were checked can get into a checkpoint; then no intact state is left.
EARLY = ("corrupt-tensor", "stale-snapshot")
HOLDING_UP = ("stall", "gil", "out-of-step", "slow", "disk-full")
"""Kinds that are detected slowly during a recovery, or have no effect there: never used as second faults."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", metavar="A..B", help="run these seeds")
    parser.add_argument("--matrix", metavar="A..B", help="run these parts of the matrix kinds x phases x victims")
    parser.add_argument("--into", type=Path, required=True, help="folder for results and what the runs write")
    parser.add_argument("--stop-after", type=float, default=1e9, metavar="S", help="begin no run after so many seconds")
    parser.add_argument("--report", action="store_true", help="write table, picture and times from what is in --into")
    given = parser.parse_args(argv)
    given.into.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for name, specs in _wanted(given):
        if name in {entry["name"] for entry in read(given.into)} or time.monotonic() - began > given.stop_after:
            continue
        entry = run_one(name, specs, given.into, corpus(given.into), reference(given.into))
        with open(given.into / "runs.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")
        print(summary(entry), flush=True)
    if given.report:
        from fault_campaign_report import write

        print(write(read(given.into), ROOT))
    return 0 if all(entry["problem"] == "" for entry in read(given.into)) else 1


def _wanted(given: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    if given.seeds:
        yield from ((f"seed {seed}", plan(seed)) for seed in _range(given.seeds))
    if given.matrix:
        parts = matrix()
        yield from ((f"matrix {part}", parts[part]) for part in _range(given.matrix) if part < len(parts))


def _range(text: str) -> range:
    first, _, last = text.partition("..")
    return range(int(first), int(last or first) + 1)


# --- what is injected ------------------------------------------------------------------------------------------------


def plan(seed: int, faults: int = FAULTS, but: tuple[str, ...] = ()) -> list[str]:
    """Return the faults of one run, for ``--inject``. Over the seeds every kind occurs equally often.

    Args:
        seed: number of the run.
        faults: number of faults, without the second faults during their recoveries.
        but: kinds to leave out.
    """
    rng, specs = random.Random(f"campaign {seed}"), []
    rows = [row for row in (_kind(seed * FAULTS + i) for i in range(len(ROWS))) if row.kind not in but]
    for number, row in enumerate(rows[:faults]):
        step = FIRST + number * SPACING + rng.randrange(3)
        if row.where != CONTROL and rng.random() < TIMED and row.kind not in EARLY:
            specs.append(_spec(row, f"time={rng.uniform(0.2, 2.0):.2f}s:rank={rng.randrange(RANKS)}"))
            continue
        specs.append(_at_step(row, step, rng))
        if row.outcome != HARMLESS and rng.random() < SECOND_S:
            second = rng.choice([r for r in ROWS if r.kind not in HOLDING_UP])
            phase = rng.choice([p for p in RECOVERY_PHASES if p != "assemble"])
            specs.append(_spec(second, f"step={step}:rank={rng.randrange(RANKS)}:phase={phase}"))
    return specs


def _kind(number: int) -> FaultRow:
    """Return row ``number`` of an endless sequence of shuffled tables."""
    order = list(ROWS)
    random.Random(f"order {number // len(ROWS)}").shuffle(order)
    return order[number % len(ROWS)]


def _at_step(row: FaultRow, step: int, rng: random.Random) -> str:
    if row.where == CONTROL:
        return _spec(row, f"step={step}")
    phases = ("between", "forward") if row.kind in EARLY else [p for p in STEP_PHASES if p not in ("evaluate", "save")]
    return _spec(row, f"step={step}:rank={rng.randrange(RANKS)}:phase={rng.choice(phases)}")


def _spec(row: FaultRow, when: str) -> str:
    return row.spec(f"{when}:{BRIEF[row.kind]}" if row.kind in BRIEF else when)


def matrix() -> list[list[str]]:
    """Return runs in which a first worker is killed, and each kind of fault hits in each phase of its recovery: its
    successor, its data-parallel peer, which holds the only other copy of its state, or another worker. A run has
    ``FAULTS`` such pairs."""
    rows = [row for row in ROWS if row.outcome != HARMLESS or row.where == CONTROL or row.kind.endswith("-reports")]
    rows = [row for row in rows if row.kind not in HOLDING_UP]
    cases = [
        (row, phase, victim)
        for row, phase, victim in itertools.product(rows, RECOVERY_PHASES, (0, 1, 3))
        if not (phase == "assemble" and victim != 0) and not (phase == "leave" and victim == 0)
    ]
    random.Random("matrix").shuffle(cases)  # mix the kinds: a repeated identical error is treated differently
    parts = []
    for at in range(0, len(cases), FAULTS):
        part = []
        for number, (row, phase, victim) in enumerate(cases[at : at + FAULTS]):
            step = FIRST + number * SPACING
            part += [f"kill@step={step}:rank=0:phase=forward", _spec(row, f"step={step}:rank={victim}:phase={phase}")]
        parts.append(part)
    return parts


# --- runs ------------------------------------------------------------------------------------------------------------


def run_one(name: str, specs: list[str], into: Path, data: str, wanted: list[float]) -> dict:
    """Run one run; return its outcome and that of each of its faults, as JSON values.

    Args:
        name: name of the run.
        specs: the faults.
        into: folder of the results.
        data: prefix of the corpus.
        wanted: the losses of as many steps without a fault.

    Returns:
        "problem" is "" if the run is correct, else a short description of what is wrong.
    """
    from ft_runs import flags, ft_run

    folder = into / name.replace(" ", "-")
    for path in (folder, folder.with_name(folder.name + ".save")):
        shutil.rmtree(path, ignore_errors=True)
    saving = f"{LAYOUT} --save {folder}.save --save-interval {SAVE_INTERVAL}"
    options = f"--inject {','.join(specs)} --max-restarts 60"
    entry = {"name": name, "faults": [], "problem": "", "inject": ",".join(specs)}
    began, steps = time.monotonic(), len(wanted)
    try:
        done = ft_run(folder, flags(data, saving, steps), standby=STANDBYS, options=options, limit_s=LIMIT_S)
    except AssertionError as hang:
        (into / f"{folder.name}.problem").write_text(str(hang))
        return entry | {"problem": "hang", "wall_s": round(time.monotonic() - began, 1)}
    entry["wall_s"] = round(time.monotonic() - began, 1)
    losses = [step["loss"] for step in done.metrics]
    entry["faults"] = what_came(done.events, specs)
    entry["problem"] = "" if done.code == 0 and losses == wanted else "wrong losses" if done.code == 0 else "stopped"
    if entry["problem"]:
        (into / f"{folder.name}.problem").write_text(done.explain())
    else:
        shutil.rmtree(folder)
        shutil.rmtree(f"{folder}.save", ignore_errors=True)
    return entry


def what_came(history, specs: list[str]) -> list[dict]:
    """Return for each fault that occurred: the row of the table, the outcome, the seconds without training (None if
    there were none), and the number of faults in that interruption."""
    planned = schedule(parse(",".join(specs)), RANKS, ["n0"], 0)
    rows = {fault.number: row_of(fault) for fault in planned}
    happened = [event for event in history if event.name == "fault_injected"]
    interruptions = recoveries(history)
    by_number = {event.detail["number"]: recovery for recovery in interruptions for event in recovery.injected}
    led_to = {}
    for event in happened:
        number = event.detail["number"]
        if (recovery := by_number.get(number) or _in_time(event, interruptions, rows[number])) is not None:
            led_to[number] = recovery
    shared = Counter(recovery.number for recovery in led_to.values())
    found = []
    for event in happened:
        recovery = led_to.get(event.detail["number"])
        found.append(
            {
                "row": rows[event.detail["number"]].name,
                "where": event.detail.get("where", ""),
                "outcome": recovery.outcome if recovery is not None else HARMLESS,
                "seconds": round(recovery.total, 3) if recovery is not None and recovery.total else None,
                "together": shared[recovery.number] if recovery is not None else 1,
            }
        )
    return found


def _in_time(event, interruptions, row: FaultRow):
    """Find the interruption of a fault. If two faults hit one rank, an interruption names only the last of them."""
    if row.outcome == HARMLESS:
        return None
    later = [r for r in interruptions if r.ended is not None and r.ended.wall > event.wall and r.detected]
    return later[0] if later and later[0].detected[0].wall - event.wall < SEEN_WITHIN_S else None


def corpus(into: Path) -> str:
    import small_runs

    if not (into / "corpus.idx").exists():
        from megatron import patches

        patches.apply()
        small_runs.make_corpus(into)
    return str(into / "corpus")


def reference(into: Path, steps: int = STEPS) -> list[float]:
    """Return the losses without faults; compute them if they are not stored in ``into``."""
    from ft_runs import flags, ft_run

    file = into / f"reference-{steps}.json"
    if not file.exists():
        done = ft_run(into / "reference", flags(corpus(into), LAYOUT, steps), standby=0)
        if done.code:
            raise SystemExit(done.explain())
        file.write_text(json.dumps(done.losses))
    return json.loads(file.read_text())


def read(into: Path) -> list[dict]:
    """Return the recorded runs."""
    file = into / "runs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def summary(entry: dict) -> str:
    counts = {word: sum(f["outcome"] == word for f in entry["faults"]) for word in ("replaced", "in place", "restart")}
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    verdict = entry["problem"].upper() or "ok"
    return f"{entry['name']}: {verdict} in {entry['wall_s']} s; {len(entry['faults'])} faults: {words}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
