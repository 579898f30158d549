"""The fault campaign: what it plans and says, and a short one."""

import random
import sys

import pytest
from ft_runs import ROOT

sys.path.insert(0, str(ROOT / "tools" / "experiments"))

import fault_campaign as campaign
import fault_campaign_report as report

from ft.faults import parse, schedule
from ft.faults.faults import RECOVERY_PHASES
from ft.faults.table import row_of


def rows(specs: list[str]) -> list[str]:
    return [row_of(fault).name for fault in schedule(parse(",".join(specs)), campaign.RANKS, ["n0"], 0)]


def test_over_the_seeds_every_kind_comes_and_a_seed_decides_everything():
    plans = [campaign.plan(seed) for seed in range(25)]
    assert plans == [campaign.plan(seed) for seed in range(25)]
    found = [name for plan in plans for name in rows(plan)]
    assert set(found) == {row.name for row in campaign.ROWS}
    assert len(found) >= 200
    assert any(f"phase={phase}" in spec for phase in RECOVERY_PHASES for plan in plans for spec in plan)
    assert any("@time=" in spec for plan in plans for spec in plan)


def test_the_matrix_has_every_kind_in_every_phase_of_a_recovery():
    pairs = {(row, spec.split("phase=")[1].split(":")[0]) for part in campaign.matrix() for row, spec in cases(part)}
    for row in campaign.ROWS:
        if row.outcome not in ("harmless",) and row.kind not in campaign.HOLDING_UP:
            assert {phase for name, phase in pairs if name == row.name} == set(RECOVERY_PHASES), row.name


def cases(part: list[str]) -> list[tuple[str, str]]:
    seconds = part[1::2]
    return [(rows([spec])[0], spec) for spec in seconds]


def test_the_table_counts_what_came_of_the_faults(tmp_path):
    fault = {"row": "kill", "where": "forward", "outcome": "replaced", "seconds": 0.2, "together": 1}
    runs = [
        {"name": "seed 0", "problem": "", "inject": "", "faults": [fault, {**fault, "seconds": 0.4}]},
        {"name": "seed 1", "problem": "hang", "inject": "kill@step=3", "faults": []},
        {"name": "seed 2", "problem": "", "inject": "", "faults": [{**fault, "where": "restore", "together": 2}]},
    ]
    text = report.table(runs)
    for words in ("3 faults in 3 runs", "1 of them inside a phase", "hangs: 1", "sound runs: 2", "kill@step=3"):
        assert words in text
    (line,) = [line.split() for line in text.splitlines() if line.startswith("kill ")]
    assert line == ["kill", "3", "3", "0.30", "0.40"]
    assert report.times(runs)["kill"] == {"count": 3, "median_s": 0.3, "worst_s": 0.4}
    report.picture(runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.long
def test_a_short_campaign(corpus, reference, tmp_path):
    seed, faults = random.randrange(1 << 20), 6
    specs = campaign.plan(seed, faults, but=campaign.HOLDING_UP)
    print(f"seed {seed}: {','.join(specs)}")
    steps = campaign.FIRST + faults * campaign.SPACING + 4
    entry = campaign.run_one(f"seed {seed}", specs, tmp_path, corpus, reference(4, campaign.LAYOUT, steps))
    assert entry["problem"] == "", (tmp_path / f"seed-{seed}.problem").read_text()
    assert len(entry["faults"]) >= 4, entry
