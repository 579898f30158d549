"""Every kind of fault, faults on faults, and the ends of what can be recovered in place."""

import json
import random

import pytest
import small_runs as runs
from ft_runs import Running, flags, ft_run

from ft.base.errors import NOT_INJECTED, NOT_SAVED
from ft.cli import main as cli

LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2"


def run(corpus, tmp_path, faults, steps=16, extra="", **how):
    folder = tmp_path / "run"
    how["options"] = f"{how.get('options', '')} --inject {faults}" if faults else how.get("options", "")
    return ft_run(folder, flags(corpus, f"{LAYOUT} {extra}", steps), **how)


WITHOUT_RESTART = {
    "an inner rank of trees with a fan-out of 2, which relays what ranks 3 and 0 say": (
        "kill@step=5:rank=1,hang@step=10:rank=1:phase=optimizer",
        {"script": "tests/helpers/narrow_gpt.py"},
    ),
    "first step, without copies yet, and the next": ("kill@step=1:rank=1:phase=backward,kill@step=2:rank=0", {}),
    "no standby, so that a worker is started for the seat": ("kill@step=7:rank=1", {"standby": 0}),
    "all crash at once, and leave their snapshots to their successors": (
        ",".join(f"segfault@step=7:rank={rank}:phase=backward" for rank in range(4)),
        {"standby": 2},
    ),
}
"""Name -> faults, and how the run is started. Each kind of fault by itself: ``test_faults_every_kind.py``."""


@pytest.mark.parametrize("name", WITHOUT_RESTART)
def test_faults_that_are_recovered_without_a_restart(name, corpus, reference, tmp_path):
    faults, how = WITHOUT_RESTART[name]
    done = run(corpus, tmp_path, faults, **how)
    assert done.code == 0 and len(done.named("restarted")) <= name.count("without copies yet"), done.explain()
    assert done.losses == reference(4, LAYOUT, 16)


def test_a_fault_whose_workers_reports_are_lost_happens_once_and_strictly_all_have_to_happen(
    corpus, reference, tmp_path
):
    faults = "lose-reports@step=6:rank=1,kill@step=6:rank=1:phase=backward,kill@step=6:rank=0:phase=assemble"
    done = run(corpus, tmp_path, faults, options="--inject-strict")
    assert [event.detail["number"] for event in done.named("fault_injected")] == [1, 2], done.explain()
    assert [event.detail["action"] for event in done.named("fault_detected")] == ["replace"], done.explain()
    assert done.losses == reference(4, LAYOUT, 16)
    missed = "1 of 3 planned fault(s) did not happen: kill of rank 0 at step 6 (assemble)"  # nobody takes over rank 0
    assert done.code == NOT_INJECTED and missed in done.output, done.explain()


def test_a_user_error_ends_the_run_with_its_message(corpus, tmp_path):
    done = run(corpus, tmp_path, "exception@step=4:rank=1:error=user")
    assert done.code == 2, done.explain()
    assert "injected fault" in done.output


def test_two_workers_lost_at_once_are_both_replaced(corpus, reference, tmp_path):
    """First they have different shards. Then, twice, rank 3 is killed because it hangs, and leaves its snapshots to its
    successor: the only copy of rank 2's state, and its own state, of which rank 2 had the only copy."""
    faults = (
        *("kill@step=7:rank=0:phase=forward", "kill@step=6:rank=3:phase=leave"),
        *("kill@step=17:rank=2:phase=forward", "hang@step=17:rank=3:phase=forward"),
        *("kill@step=27:rank=2:phase=forward", "hang@step=27:rank=3:phase=leave"),
    )
    done = run(corpus, tmp_path, ",".join(faults), steps=36, standby=2)
    assert done.code == 0 and not done.named("restarted"), done.explain()
    assert len(done.named("fault_injected")) == len(faults), done.explain()
    sources = [event.detail["sources"] for event in done.named("state_restored")]
    assert [(each["2"], each["3"]) for each in sources].count(("copy:3", "own")) == 2, done.explain()
    assert done.losses == reference(4, LAYOUT, 36)


def test_a_second_copy_serves_where_the_first_is_corrupt(corpus, reference, tmp_path):
    layout = "--use-distributed-optimizer"
    folder = tmp_path / "run"
    faults = "corrupt-snapshot@step=7:rank=3:copies=peer:phase=backward,kill@step=7:rank=2:phase=reduce"
    wanted = flags(corpus, f"{layout} --ft-snapshot-peers 2", 16)
    done = ft_run(folder, wanted, options=f"--inject {faults}")
    assert done.code == 0 and not done.named("restarted"), done.explain()
    assert done.losses == reference(4, layout, 16)


def test_training_does_not_stop_for_the_control_plane_and_a_fault_in_its_absence_is_recovered(
    corpus, reference, tmp_path
):
    done = run(corpus, tmp_path, "kill-control@step=6,kill@step=8:rank=2,kill@step=30:rank=1", steps=60)
    assert done.code == 0 and not done.named("restarted"), done.explain()
    assert done.named("control_back") and len(done.named("worker_lost")) == 2, done.explain()
    assert done.losses == reference(4, LAYOUT, 60)


@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
@pytest.mark.parametrize(
    ("faults", "saves"), [("", []), ("disk-full@step=6:rank=2:for=300s", [4])], ids=["the disk", "the limit of a rank"]
)
def test_a_run_whose_last_save_fails_says_so_at_its_end(small_disk, faults, saves, corpus, tmp_path, capsys):
    saving = f"{LAYOUT} --save {tmp_path / 'save' if saves else small_disk} --save-interval 4"
    options = f"--inject {faults}" if faults else ""
    done = ft_run(tmp_path / "run", flags(corpus, saving, 12), standby=0, options=options)
    assert done.code == NOT_SAVED and len(done.losses) == 12, done.explain()
    assert [event.step for event in done.named("saved")] == saves, done.explain()
    failed = [event.step for event in done.named("save_failed")]
    assert failed == [step for step in (4, 8, 12) if step not in saves]
    capsys.readouterr()
    assert cli(["status", "--json", str(done.folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["phase"] == "finished, not saved" and "THE LAST SAVE FAILED (step 12, " in found["saves"]
    assert "the run ends without it" in done.output and done.output.count("training goes on") == len(failed) - 1
    assert cli(["report", str(done.folder)]) == 0
    assert "THE LAST SAVE FAILED" in capsys.readouterr().out
    assert cli(["diagnose", "crash", str(done.folder)]) == 0


@pytest.mark.long
def test_forty_random_faults(corpus, reference, tmp_path, seed):
    """One long run; every fault is recovered, and the losses are those of a run without any."""
    choose, steps = random.Random(seed), 250
    phases = ("forward", "backward", "reduce", "optimizer", "transfer", "between")
    kinds = ("kill", "kill", "kill", "hang", "exception", "drop")
    faults = [
        f"{choose.choice(kinds)}@step={6 * (i + 1)}:rank={choose.randrange(4)}:phase={choose.choice(phases)}"
        for i in range(40)
    ]
    folder = tmp_path / "run"
    saving = f"{LAYOUT} --save {tmp_path}/save --save-interval 50"
    job = Running(folder, "pretrain_gpt.py", flags(corpus, saving, steps), options=f"--inject {','.join(faults)}")
    done = job.wait(280)
    assert done.code == 0, done.explain()
    assert len(done.named("fault_injected")) == 40, done.explain()
    assert done.losses == reference(4, LAYOUT, steps)


def test_hot_swap_without_ft_run_is_refused(ranks, corpus):
    handle = ranks.start(
        runs.launch, 2, flags(corpus, LAYOUT.replace("--pipeline-model-parallel-size 2", "")), init=False
    )
    assert [rank.value for rank in handle.wait(180)] == [2, 2]
    assert "ft run" in handle.output(0)
