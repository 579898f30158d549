"""What protects a run, as ft run says before it starts, and what it refuses because it could never act."""

from pathlib import Path

import pytest
import small_runs as runs

from ft import faults as inject
from ft.commands import protection
from ft.commands.protection import HOT_SWAP, NOTHING, REPLICAS, UNKNOWN, LaunchLine, RunProtection
from ft.job.agent.options import Script

TRAINER = Path(__file__).parent.parent.parent / "pretrain_gpt.py"


def examined(flags: str = "", *, asked: LaunchLine | None = None, inject_text: str = "", target: Path = TRAINER):
    asked = asked or LaunchLine(2)
    faults = inject.schedule(inject.parse(inject_text), 2, ["n0"], 0) if inject_text else []
    return protection.examine(Script(str(target), False, f"{runs.BASE} --mock-data {flags}".split()), asked, faults)


def test_what_needs_protection_is_refused_where_the_trainer_has_none():
    found, problems = examined(asked=LaunchLine(2, ["--inject kill@step=3", "--standby 1"]))
    assert found.by == NOTHING
    ((problem, fix),) = problems
    assert problem.startswith("--inject kill@step=3, --standby 1 has no effect") and "--ft-hot-swap" in fix
    assert examined() == (RunProtection(NOTHING), [])
    assert examined("--ft-hot-swap", asked=LaunchLine(2, ["--standby 1"])) == (RunProtection(HOT_SWAP, 1), [])
    assert examined("--global-batch-size 12", asked=LaunchLine(2, replicas=3)) == (RunProtection(REPLICAS, 2), [])


@pytest.mark.parametrize(
    ("fault", "flags", "why"),
    [
        ("kill@step=5:rank=1", "", "the run ends with step 4"),
        ("bit-flip@step=3", "", "DMR is off"),
        ("corrupt-checkpoint@step=3", "", "no checkpoint to damage"),
        ("kill@step=4", "", ""),
        ("bit-flip@step=3", "--ft-dmr naive", ""),
        ("corrupt-checkpoint@step=3", "--save x", ""),
        ("kill@time=99s", "", ""),
    ],
)
def test_a_fault_that_finds_nothing_to_break_is_refused(fault, flags, why):
    _, problems = examined(f"--ft-hot-swap {flags}", inject_text=fault)
    assert len(problems) == bool(why)
    assert all(why in problem and "has no effect" in problem and fix for problem, fix in problems)


def test_the_trainers_own_flags_are_refused_before_it_starts():
    _, problems = examined("--hiden-size 3 --standby 1 --tensor-model-parallel-size 3")
    texts = [f"{problem}; {fix}" for problem, fix in problems]
    assert "did you mean --hidden-size?" in texts[0]
    assert "--standby; it is a flag of ft run" in texts[1]
    assert "2 ranks cannot be split into TP 3" in texts[2]
    assert examined("--hiden-size 3 --help") == (RunProtection(UNKNOWN), []), "the trainer shows its help"


def test_what_does_not_go_with_replicas_is_refused_before_it_starts():
    _, problems = examined("--ft-dmr-profile p.json", asked=LaunchLine(1, replicas=3))
    assert [problem for problem, _ in problems] == [
        "profile (--ft-dmr-profile) cannot be combined with replicas (--ft-hsdp-replicas): a profile describes one "
        "world, and replicas wait for one another",
        "global batch 8 is not a multiple of 3 replicas x micro batch 2 x DP 1 of a replica = 6",
    ]


def test_standbys_replace_workers_of_replicas_with_hot_swap_only():
    ((problem, _),) = examined(asked=LaunchLine(1, ["--standby 1"], replicas=2))[1]
    assert problem.startswith("--standby 1 has no effect: ") and problem.endswith("only with --ft-hot-swap")
    assert examined("--ft-hot-swap", asked=LaunchLine(2, ["--standby 1"], replicas=2))[1] == []


def test_another_script_is_not_judged(tmp_path):
    other, copy = tmp_path / "train.py", tmp_path / "copy.py"
    other.write_text("import ft")
    copy.write_bytes(TRAINER.read_bytes())
    assert examined("--no-such-flag", target=other) == (RunProtection(UNKNOWN), [])
    assert examined(target=copy) == (RunProtection(NOTHING), [])


def test_the_announcement_says_what_protects_and_that_one_host_holds_all_copies():
    assert "nothing protects this run" in protection.announcement(RunProtection(NOTHING), 1)
    assert "until its script calls ft.attach" in protection.announcement(RunProtection(UNKNOWN), 1)
    for found in (RunProtection(HOT_SWAP, 1), RunProtection(REPLICAS, 1)):
        assert "on this host" in protection.announcement(found, 1)
        assert "on this host" not in protection.announcement(found, 2)
    assert "nothing protects" in protection.announcement(RunProtection(REPLICAS, 0), 1)
    assert "first snapshot" in protection.has_joined(1) and "on this host" in protection.has_joined(1)
