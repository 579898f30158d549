"""Campaign over random situations of the recovery ladder: the decision on each is checked against an oracle.

    python tools/experiments/recovery_ladder.py --plot tools/experiments/results/recovery_ladder.png \\
        > tools/experiments/results/recovery_ladder.txt

The oracle (tests/helpers/ladder_situations.py) looks at every snapshot of every worker. The properties: no state that
is not verified; no level skipped that would have lost less; no wait without a limit; an answer to every situation.
Planted bugs show that the oracle sees what it should. Some ten minutes.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from ladder_situations import PLANTED, broken, situation  # noqa: E402

from ft.job.control import recovery  # noqa: E402
from ft.job.control.recovery import Situation, decide  # noqa: E402
from ft.show import axes, palette  # noqa: E402
from ft.show.text import percent, table  # noqa: E402

_COLOURS = dict(
    zip(
        recovery.LADDER,
        ("#d9e5d6", "#9fc7a6", "#5aa06c", "#4f94c4", "#33659c", "#f1c453", "#c8322b", palette.INK),
        strict=True,
    )
)
_BASES = "no replicas", "replicas", "replicas, SPARe"
_KINDS = [base + more for base in _BASES for more in ("", ", hot-swap", ", hot-swap, CheckFree")]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--situations", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first situation")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the levels by protections, as PNG")
    given = parser.parse_args(argv)
    taken, wrong, began = Counter(), 0, time.process_time()
    for number in range(given.first, given.first + given.situations):
        asked = situation(number)
        found = decide(asked)
        taken[_kind(asked), found.level] += 1
        if said := broken(asked, found):
            wrong += 1
            print(f"situation {number}: {'; '.join(said)}")
    took_s = time.process_time() - began
    print("$ python tools/experiments/recovery_ladder.py")
    print(f"{given.situations} situations from number {given.first} in {took_s:.0f} s of CPU time: {wrong} broken\n")
    totals = {kind: sum(taken[kind, level] for level in recovery.LADDER) for kind in _KINDS}
    rows = [
        [kind, str(totals[kind]), *(percent(taken[kind, level] / max(1, totals[kind])) for level in recovery.LADDER)]
        for kind in _KINDS
    ]
    print(table(["protections", "situations", *recovery.LADDER], rows, right=range(1, 2 + len(recovery.LADDER))))
    print("\nplanted bugs, and the number of the first situation that shows each\n")
    missed = 0
    for title, planted in PLANTED.items():
        with planted:
            first = next((number for number in range(100_000) if broken(situation(number))), None)
        missed += first is None
        print(f"  {title:45} {'NOT FOUND' if first is None else first}")
    if given.plot:
        _draw(taken, totals, given, Path(given.plot))
    return 1 if wrong or missed else 0


def _kind(asked: Situation) -> str:
    base = _BASES[0 if asked.others.replicas == 1 else 2 if asked.others.reorders else 1]
    hot_swap = asked.hot_swap
    return base + (", hot-swap" if hot_swap else "") + (", CheckFree" if hot_swap and asked.stages.checkfree else "")


def _draw(taken: Counter, totals: dict[str, int], given: argparse.Namespace, path: Path) -> None:
    figure, place = axes.rows(f"What follows {given.situations:,} random situations, by protections", [3.6])
    axes.plain(place, "share of the situations in which each level of the ladder is taken", pad=26)
    for row, kind in enumerate(_KINDS):
        left = 0.0
        for level in recovery.LADDER:
            share = taken[kind, level] / max(1, totals[kind])
            place.barh(row, share, left=left, height=0.7, color=_COLOURS[level])
            left += share
    place.set_yticks(range(len(_KINDS)), _KINDS)
    place.set_ylim(len(_KINDS) - 0.5, -0.5)
    place.set_xlim(0, 1)
    place.xaxis.set_major_formatter(axes.Percents())
    axes.legend(place, [place.barh(0, 0, color=_COLOURS[level], label=level) for level in recovery.LADDER])
    figure.savefig(path, format="png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
