"""Faults in the middle of recoveries, and more of them than there is redundancy: recovered or restarted, no hang."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from ft_runs import flags, ft_run

from ft.base.errors import NOT_SAVED
from ft.faults.faults import RECOVERY_PHASES

LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2"
FIRST = "kill@step={step}:rank=0:phase=forward"
PAIRS = tomllib.loads(Path(__file__).with_name("faults_on_faults.toml").read_text())


@pytest.mark.parametrize(
    "victim", [pytest.param(one, marks=() if one == "who takes the seat" else pytest.mark.long) for one in PAIRS]
)
def test_a_second_fault_in_each_phase_of_a_recovery(victim, corpus, reference, tmp_path):
    pairs, steps = PAIRS[victim], 52
    faults = [fault for i, pair in enumerate(pairs) for fault in (FIRST.format(step=4 + 7 * i), pair)]
    saving = f"{LAYOUT} --save {tmp_path}/save --save-interval 3"
    options = f"--inject {','.join(faults)} --max-restarts 20"
    done = ft_run(tmp_path / "run", flags(corpus, saving, steps), options=options)
    assert done.code == 0, done.explain()
    happened = {event.detail["where"] for event in done.named("fault_injected")}
    assert happened - {"forward"} == {pair.split("phase=")[1].split(":")[0] for pair in pairs}, done.explain()
    assert len(done.named("fault_injected")) == len(faults), done.explain()
    if victim != "who has the only copy":
        assert not done.named("restarted"), done.explain()
    assert done.losses == reference(4, LAYOUT, steps)


def test_every_phase_of_a_recovery_is_covered():
    tested = {pair.split("phase=")[1].split(":")[0] for pairs in PAIRS.values() for pair in pairs}
    assert tested == set(RECOVERY_PHASES)


@pytest.mark.long
def test_more_failures_than_standbys_then_in_the_first_steps_after_a_warm_restart(corpus, reference, tmp_path):
    """Ranks 0 and 3 are lost with one standby; then both copies; then, in the steps redone, one worker and another."""
    faults = "kill@step=5:rank=0:phase=forward,kill@step=5:rank=3:phase=forward,"
    # Rank 3 dies while it leaves the step of rank 2's fault, before it can hand on the only other copy of its state.
    faults += "kill@step=14:rank=2:phase=optimizer,kill@step=14:rank=3:phase=leave,"
    faults += "kill@step=14:rank=1:phase=optimizer,hang@step=15:rank=0:phase=reduce"
    saving = f"{LAYOUT} --save {tmp_path}/save --save-interval 4"
    done = ft_run(tmp_path / "run", flags(corpus, saving, 24), options=f"--inject {faults}")
    assert done.code == 0, done.explain()
    assert len(done.named("fault_injected")) == 6 and len(done.named("restarted")) == 1, done.explain()
    assert "both copies lost" in done.output
    assert done.losses == reference(4, LAYOUT, 24)


def test_the_disk_is_full_when_the_checkpoint_is_needed(corpus, reference, tmp_path):
    """Room for two checkpoints: later ones are not written, and the last one that is there serves."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3500k", "tmpfs", disk], check=False).returncode
    ):
        pytest.skip("a small disk has to be mounted: needs root")
    try:
        faults = "kill@step=17:rank=2:phase=optimizer,kill@step=17:rank=3:phase=leave"
        saving = f"{LAYOUT} --save {disk}/save --save-interval 4"
        done = ft_run(tmp_path / "run", flags(corpus, saving, 24), options=f"--inject {faults}")
        kept = sorted(path.name for path in (disk / "save").glob("iter_*"))
    finally:
        subprocess.run(["umount", "-l", disk], check=False)
    assert done.code == NOT_SAVED and len(done.named("restarted")) == 1, done.explain()
    assert "the disk is full" in done.output and kept, done.explain()
    assert f"going on after step {int(kept[-1].removeprefix('iter_'))}" in done.output, done.explain()
    assert done.losses == reference(4, LAYOUT, 24)


def test_the_control_plane_dies_in_a_recovery(corpus, reference, tmp_path):
    faults = (
        "kill@step=6:rank=0:phase=forward,kill-control@step=6:rank=3:phase=rebuild,kill@step=14:rank=2:phase=backward"
    )
    saving = f"{LAYOUT} --save {tmp_path}/save --save-interval 4"
    done = ft_run(tmp_path / "run", flags(corpus, saving, 24), options=f"--inject {faults}")
    assert done.code == 0, done.explain()
    assert done.losses == reference(4, LAYOUT, 24)
