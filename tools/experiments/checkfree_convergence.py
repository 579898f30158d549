"""What lost pipeline stages that are rebuilt from their neighbours do to the loss: strategies x failure rates.

    python tools/experiments/checkfree_convergence.py --into FOLDER --report            all of it, in minutes
    python tools/experiments/checkfree_convergence.py --into FOLDER --only ends         one part; what is there stays

A megatron-core GPT in four pipeline stages, a process each, learns the standard library's sources byte by byte with
this repository's trainer. Between two steps a stage loses parameters, optimizer and random numbers, and
ft.systems.checkfree rebuilds it: the code that runs in production, without the deaths and the recovery around it, which
cost no loss. Part "cross" has such faults in a real `ft run` whose workers are killed, and compares step by step.

middle      stages in the middle are lost (CheckFree): how they are rebuilt x how often they are lost
equal       the same where all stages begin with the same blocks
ends        the first and the last stage are lost (CheckFree+): with swapped training, and with core's own order of
            stages, embedding and head being kept twice in both
cross       one fault each by `ft run --inject`
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(Path(__file__).parent)]

STAGES, STEPS, FIRST, REST = 4, 240, 40, 30
"""Failures occur after step ``FIRST``, and not in the last ``REST`` steps; the final loss is a mean over the last of
these."""
RATES = (0.5, 1.0, 2.0)
"""Failures of a stage per 100 steps; parts "equal" and "ends" use the highest only."""
STRATEGIES = ("weighted", "uniform", "copy", "random")
SWAPPED, STRAIGHT, NO_FAILURES = "swapped", "straight", "no failures"
MIDDLE, EQUAL, ENDS, CROSS = PARTS = ("middle", "equal", "ends", "cross")
EVERY = 20
SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 8 "
    "--global-batch-size 16 --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --padded-vocab-size 512 --split 95,5,0 --num-workers 0 "
    "--lr 3e-3 --min-lr 3e-4 --lr-warmup-iters 20 --lr-decay-style linear --eval-iters 2 --log-interval 100000 "
    f"--use-distributed-optimizer --pipeline-model-parallel-size {STAGES} --ft-hot-swap"
)
LIMIT_S = 230.0
"""Time limit of one run, in seconds."""


@dataclass(frozen=True)
class Setting:
    """One run. ``way``: a strategy, or how the ends are trained. ``rate``: failures of a stage per 100 steps."""

    part: str
    way: str
    rate: float
    seed: int

    @property
    def at_risk(self) -> tuple[int, ...]:
        """Return the stages that may be lost."""
        return (0, STAGES - 1) if self.part == ENDS else tuple(range(1, STAGES - 1))

    def flags(self, corpus: str, steps: int) -> str:
        """Return the trainer's flags."""
        plus = self.part == ENDS
        strategy = self.way if self.way in STRATEGIES else STRATEGIES[0]
        how = "--ft-checkfree-plus" if plus else f"--ft-checkfree --ft-checkfree-strategy {strategy}"
        return f"{SHAPE} {how} --seed {1234 + self.seed} --train-iters {steps} --data-path {corpus}"


def settings(parts: Sequence[str], seeds: int) -> Iterator[Setting]:
    """Yield all runs of ``parts``, those of the first seed first."""
    for seed in range(seeds):
        for part in parts:
            if part == ENDS:
                yield from (Setting(part, way, rate, seed) for rate in (RATES[-1], 0.0) for way in (SWAPPED, STRAIGHT))
            elif part != CROSS:
                yield Setting(part, NO_FAILURES, 0.0, seed)
                rates = RATES if part == MIDDLE else RATES[-1:]
                yield from (Setting(part, way, rate, seed) for rate in rates for way in STRATEGIES)


def failures(at_risk: Sequence[int], rate: float, steps: int, seed: int) -> list[tuple[int, int]]:
    """Return (step, stage) of each failure, in order: each stage fails independently, on average ``rate`` times in 100
    steps.

    The failures are the same for all strategies. Of stages that would fail at the same step, one fails a step later.
    """
    rng, found, late = random.Random(f"{seed} {rate} {list(at_risk)}"), [], []
    for step in range(min(FIRST, steps // 3), steps - min(REST, steps // 4) + 1):
        late += [stage for stage in rng.sample(at_risk, len(at_risk)) if rng.random() < rate / 100]
        if late:
            found.append((step, late.pop(0)))
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="folder for the results; runs that are there stay")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts (may be repeated)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="with seeds 0 to N - 1")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="of each run")
    parser.add_argument("--stop-after", type=float, default=1e9, metavar="S", help="begin no run after so many seconds")
    parser.add_argument("--report", action="store_true", help="write table and picture from what is in --into")
    given = parser.parse_args(argv)
    given.into.mkdir(parents=True, exist_ok=True)
    run_all(given.into, given.only or PARTS, given.seeds, given.steps, given.stop_after)
    if given.report:
        import checkfree_convergence_report

        print(checkfree_convergence_report.write(read(given.into), ROOT))
    return 0


def run_all(into: Path, parts: Sequence[str], seeds: int, steps: int, stop_after: float) -> None:
    """Run what ``into`` does not contain yet."""
    began = time.monotonic()
    done = {key(row) for row in read(into)}
    todo = [each for each in settings(parts, seeds) if key(asdict(each) | {"steps": steps}) not in done]
    real = CROSS in parts and not any(row["part"] == CROSS for row in read(into))
    if not (todo or real):
        return
    with tempfile.TemporaryDirectory() as folder, Ranks(Path(folder)) as ranks:
        corpus = ranks.corpus(into)
        for each in todo:
            if time.monotonic() - began > stop_after:
                return
            add(into, run_one(each, ranks, corpus, steps))
        if real and time.monotonic() - began <= stop_after:
            from checkfree_convergence_cross import compare

            for row in compare(ranks, corpus, Path(folder)):
                add(into, row)


def run_one(setting: Setting, ranks: Callable, corpus: str, steps: int) -> dict:
    """Return one row: the setting and what ``checkfree_convergence_job.train`` returns on the last stage."""
    from checkfree_convergence_job import train

    lost = failures(setting.at_risk, setting.rate, steps, setting.seed)
    how = {"straight": setting.way == STRAIGHT, "equal": setting.part == EQUAL}
    seen = ranks(train, STAGES, setting.flags(corpus, steps), lost, every=EVERY, **how)[-1]
    return {**asdict(setting), "steps": steps, **seen}


def key(row: dict) -> tuple:
    return row["part"], row["way"], row["rate"], row["seed"], row["steps"]


def read(into: Path) -> list[dict]:
    path = into / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(into: Path, row: dict) -> None:
    with (into / "runs.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(
        f"{row['part']:7s} {row['way']:12s} rate {row['rate']:<4g} seed {row['seed']}  {len(row['rebuilt'])} failures",
        end="  ",
    )
    print(f"held-out loss {row['held_out'][-1][1]:.4f}  {row['took_s']:.1f} s", flush=True)


class Ranks:
    """Ranks forked from a warm process, available inside the context: ``ranks(function, world, ...)``."""

    def __init__(self, folder: Path):
        from harness import Ranks as Warm

        self._folder, self._count = folder, 0
        self._ranks = Warm(self._make_folder)

    def __call__(self, function: Callable, world: int, *args, **how) -> list:
        return self._ranks(function, world, *args, timeout=LIMIT_S, **how)

    def corpus(self, into: Path) -> str:
        """Write the standard library's sources as an indexed dataset; return its prefix."""
        import small_runs

        if not (into / "corpus.idx").exists():
            self._ranks(small_runs.make_corpus, 1, into, documents=150, init=False, timeout=LIMIT_S)
        return str(into.resolve() / "corpus")

    def _make_folder(self) -> Path:
        self._count += 1
        folder = self._folder / f"ranks{self._count}"
        folder.mkdir()
        return folder

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        self._ranks.close_forgotten()
        self._ranks.server.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
