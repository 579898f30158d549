"""Protections together, in seeded runs with random faults, some of them during a recovery: is every run sound?

    python tools/experiments/composed_campaign.py --seeds 0..299 --into FOLDER     runs them, one line each in FOLDER
    python tools/experiments/composed_campaign.py --report --into FOLDER           table of what is there

The seeds take the combinations and their layouts in turn. A run without replicas is sound if its losses equal those of
a run without faults, bit for bit; where CheckFree has rebuilt a stage, the losses before that, and all later ones have
to be finite. A run of replicas is sound if all replicas of a quorum were equal bit for bit after every step, every
sample was trained once, and each failure cost one step at most. No run may hang or leave a process behind. Seeds that
FOLDER has already are passed over, so a campaign can be run in pieces.
"""

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hsdp_campaign
from fault_campaign import corpus, read

STEPS, FIRST, FAULTS, SPACING = 36, 5, 4, 7
SAVE_INTERVAL = 6
LIMIT_S = 300.0
SECOND = 0.35
"""Share of the faults that get a second fault during their recovery."""
DMR, HOT, FREE, PLUS = "--ft-dmr piggyback", "--ft-hot-swap", "--ft-checkfree", "--ft-checkfree-plus"
ALONE = f"{HOT} {FREE} --ft-snapshot-peers 0"
LOSSES = ("kill", "kill", "hang", "drop", "exception:error=recoverable", "exception:error=node")
FLIPS = (
    "bit-flip:operator=mm:phase=forward",
    "bit-flip:operator=mm:phase=backward",
    "bit-flip:operator=sqrt:phase=optimizer",
)
SHARDED = "--use-distributed-optimizer"
WORLD = (
    f"{SHARDED} --overlap-grad-reduce",
    f"{SHARDED} --pipeline-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel",
)
OF_REPLICA = (f"{SHARDED} --overlap-grad-reduce", "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2")
FOUR = (f"{SHARDED} --pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 4")


@dataclass(frozen=True)
class Combination:
    """Protections that are on together.

    Attributes:
        name: for the report.
        flags: the trainer's flags.
        layouts: flags of the layouts, tried in turn.
        replicas: number of replicas; 0: none.
        redundancy: SPARe's redundancy; 0: without SPARe.
        standbys: standbys of the node, or of each replica.
    """

    name: str
    flags: str
    layouts: tuple[str, ...]
    replicas: int = 0
    redundancy: int = 0
    standbys: int = 0

    @property
    def ranks(self) -> int:
        """Ranks of a world."""
        return 2 if self.replicas else 4

    @property
    def options(self) -> str:
        """Options of ``ft run`` beside those that all combinations have."""
        stacks = f"--ft-spare-redundancy {self.redundancy}" if self.redundancy else ""
        return f"{stacks} --standby {self.standbys}" if self.replicas and self.standbys else stacks


COMBINATIONS = (
    Combination("hot-swap + DMR", f"{HOT} {DMR}", WORLD, standbys=1),
    Combination("hot-swap + CheckFree", f"{HOT} {FREE}", FOUR, standbys=2),
    Combination("hot-swap + CheckFree + DMR", f"{HOT} {FREE} {DMR}", FOUR, standbys=2),
    Combination("hot-swap + CheckFree+ + DMR", f"{HOT} {PLUS} {DMR}", FOUR, standbys=2),
    Combination("replicas + DMR", DMR, OF_REPLICA, replicas=3),
    Combination("replicas + SPARe + DMR", DMR, OF_REPLICA, replicas=3, redundancy=2),
    Combination("replicas + hot-swap", HOT, OF_REPLICA, replicas=3, standbys=1),
    Combination("replicas + hot-swap + DMR", f"{HOT} {DMR}", OF_REPLICA, replicas=3, standbys=1),
    Combination("hot-swap + CheckFree, no copies", ALONE, (SHARDED, WORLD[1], FOUR[0]), standbys=2),
    Combination("replicas + hot-swap + CheckFree, no copies", ALONE, (SHARDED, ""), replicas=3, standbys=1),
    Combination("replicas + SPARe + hot-swap", HOT, OF_REPLICA, replicas=3, redundancy=2, standbys=1),
    Combination("replicas + SPARe + hot-swap + DMR", f"{HOT} {DMR}", OF_REPLICA, replicas=3, redundancy=2, standbys=1),
)


def main() -> int:
    options = _options()
    options.into.mkdir(parents=True, exist_ok=True)
    began, (first, _, last) = time.monotonic(), (options.seeds or "0..-1").partition("..")
    for seed in range(int(first), int(last or first) + 1):
        if seed in {entry["seed"] for entry in read(options.into)} or time.monotonic() - began > options.stop_after:
            continue
        entry = run_one(seed, options.into)
        with open(options.into / "runs.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")
        print(_line(entry), flush=True)
    if options.report:
        print(report(read(options.into)))
    return 1 if any(entry["problems"] for entry in read(options.into)) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", metavar="A..B", help="run these seeds")
    parser.add_argument("--into", type=Path, required=True, help="folder for results and what the runs write")
    parser.add_argument("--stop-after", type=float, default=1e9, metavar="S", help="begin no run after so many seconds")
    parser.add_argument("--report", action="store_true", help="print the table of what is in --into")
    return parser.parse_args()


def of_seed(seed: int) -> tuple[Combination, str]:
    """Return the combination and the layout of a seed."""
    combination = COMBINATIONS[seed % len(COMBINATIONS)]
    return combination, combination.layouts[seed // len(COMBINATIONS) % len(combination.layouts)]


# --- what is injected ------------------------------------------------------------------------------------------------


def plan(seed: int, combination: Combination) -> list[str]:
    """Return the faults of a run, for ``--inject``."""
    return list(_planned(random.Random(f"composed {seed}"), combination))


def _planned(rng: random.Random, combination: Combination) -> Iterator[str]:
    kinds = [*LOSSES, *(FLIPS * 2 if DMR in combination.flags else ())]
    kinds += ["corrupt-tensor"] if combination.replicas and DMR in combination.flags else []
    for number in range(FAULTS):
        kind, step = rng.choice(kinds), FIRST + number * SPACING + rng.randrange(3)
        yield _spec(kind, step, rng, combination, "" if ":phase=" in kind else _phase(kind, rng))
        if not kind.startswith("bit-flip") and rng.random() < SECOND:
            yield _spec("kill", step, rng, combination, f"phase={rng.choice(('restore', 'resume'))}")


def _phase(kind: str, rng: random.Random) -> str:
    return "" if kind == "corrupt-tensor" else f"phase={rng.choice(('between', 'forward', 'backward', 'reduce'))}"


def _spec(kind: str, step: int, rng: random.Random, combination: Combination, phase: str) -> str:
    name, _, how = kind.partition(":")
    where = [f"replica={rng.randrange(combination.replicas)}"] if combination.replicas else []
    where += [f"step={step}", f"rank={rng.randrange(combination.ranks)}"]
    return f"{name}@{':'.join(filter(None, [*where, how, phase]))}"


# --- runs ------------------------------------------------------------------------------------------------------------


def run_one(seed: int, into: Path) -> dict:
    """Run one run, and return its outcome as JSON values. "problems": all that is wrong."""
    combination, layout = of_seed(seed)
    specs = ",".join(plan(seed, combination))
    folder = into / f"seed-{seed}"
    saved = folder.with_name(folder.name + ".save")
    for path in (folder, saved):
        shutil.rmtree(path, ignore_errors=True)
    entry = {"seed": seed, "combination": combination.name, "layout": layout, "inject": specs, "problems": []}
    flags = f"{layout} {combination.flags} --save {saved} --save-interval {SAVE_INTERVAL}"
    options = f"{combination.options} --inject {specs} --max-restarts 60"
    began = time.monotonic()
    try:
        done = _run(combination, flags, options, folder, corpus(into))
        entry["faults"] = len(done.injected() if combination.replicas else done.named("fault_injected"))
        judged = _judge_replicas(done) if combination.replicas else _judge_world(done, into, combination, layout)
        entry["problems"] = judged
        said = "" if not judged else "\n".join([*judged, done.explain()])
    except AssertionError as hang:
        entry["problems"], said = ["hangs, or leaves processes"], str(hang)
    entry["wall_s"] = round(time.monotonic() - began, 1)
    if said:
        (into / f"seed-{seed}.problem").write_text(said)
    else:
        shutil.rmtree(folder)
        shutil.rmtree(saved, ignore_errors=True)
    return entry


def _run(combination: Combination, flags: str, options: str, folder: Path, data: str):
    import ft_runs
    import replica_runs

    if not combination.replicas:
        given = ft_runs.flags(data, flags.replace(HOT, ""), STEPS)
        return ft_runs.ft_run(folder, given, standby=combination.standbys, options=options, limit_s=LIMIT_S)
    workers, replicas = combination.ranks * combination.replicas, combination.replicas
    given = replica_runs.flags(data, flags, STEPS)
    return replica_runs.train(folder, given, limit_s=LIMIT_S, replicas=replicas, nproc=workers, options=options)


def _judge_replicas(done) -> list[str]:
    return hsdp_campaign.judge(done, STEPS, [event.wall for event in done.injected()])


def _judge_world(done, into: Path, combination: Combination, layout: str) -> list[str]:
    if done.code:
        return [f"exit code {done.code}"]
    losses, wanted = done.losses, _reference(into, combination, layout)
    rebuilt = [event.step for event in done.named("stage_rebuilt")]
    exact = min(rebuilt, default=STEPS)
    found = [] if losses[:exact] == wanted[:exact] else ["wrong losses"]
    found += [] if len(losses) == STEPS and all(map(math.isfinite, losses)) else ["a loss is missing or not finite"]
    return found


def _reference(into: Path, combination: Combination, layout: str) -> list[float]:
    """Return the losses of the layout without faults and without DMR; compute them if they are not stored."""
    import ft_runs

    swapped = PLUS if PLUS in combination.flags else ""
    file = into / f"reference {layout} {swapped}.json"
    if not file.exists():
        given = ft_runs.flags(corpus(into), f"{layout} {swapped}", STEPS)
        done = ft_runs.ft_run(into / "reference", given, standby=0)
        if done.code:
            raise SystemExit(done.explain())
        file.write_text(json.dumps(done.losses))
        shutil.rmtree(into / "reference")
    return json.loads(file.read_text())


# --- report ----------------------------------------------------------------------------------------------------------


def report(entries: list[dict]) -> str:
    """Return the table of all runs, by combination, and the problems."""
    from ft.show.text import table

    rows = []
    for combination in COMBINATIONS:
        mine = [entry for entry in entries if entry["combination"] == combination.name]
        sound = sum(not entry["problems"] for entry in mine)
        faults = sum(entry.get("faults", 0) for entry in mine)
        rows.append((combination.name, str(len(mine)), str(faults), str(sound)))
    problems = [_line(entry) for entry in entries if entry["problems"]]
    return "\n".join([table(("combination", "runs", "faults", "sound"), rows), *problems])


def _line(entry: dict) -> str:
    verdict = "; ".join(entry["problems"]) or "ok"
    return f"seed {entry['seed']}, {entry['combination']}, {entry['layout']}: {verdict} in {entry['wall_s']} s"


if __name__ == "__main__":
    sys.exit(main())
