"""CheckFree end to end: `ft run` loses whole pipeline stages."""

import math

import pytest
from ft_runs import flags, ft_run

ZERO = "--use-distributed-optimizer"
FOUR = f"{ZERO} --pipeline-model-parallel-size 4 --ft-checkfree"


def kill(step: int, first: int, *others: int) -> str:
    """The death of ``first`` before ``step``, and of the others in the recovery from it before any state is fetched.

    Were the others to die by themselves at the same step, they could leave it before, on a machine under load.
    """
    deaths = [f"kill@step={step - 1}:rank={rank}:phase=leave" for rank in others]
    return ",".join([f"kill@step={step}:rank={first}", *deaths])


def kill_after_a_repair(step: int, rank: int) -> str:
    """The death of ``rank`` in the recovery from an error, when all ranks have restored the same step.

    Were it to die by itself, a peer that has not noticed the end of the step before would have no weights to lend.
    """
    return f"exception@step={step}:rank={rank}:error=recoverable,kill@step={step - 1}:rank={rank}:phase=resume"


def check_went_on(done, steps: int) -> None:
    assert done.code == 0, done.explain()
    assert not done.named("restarted"), done.explain()
    losses = done.losses
    assert len(losses) == steps and all(map(math.isfinite, losses)), losses
    assert sum(losses[-4:]) < sum(losses[:4]), losses
    assert all(event.detail["violations"] == [] for event in done.named("invariants_checked"))


@pytest.mark.newest
def test_a_middle_stage_lost_with_its_copy_is_rebuilt_and_training_goes_on_with_the_same_batch(
    corpus, reference, tmp_path
):
    """The copy of rank 1 is at rank 2, whose own is at rank 3."""
    done = ft_run(tmp_path / "run", flags(corpus, FOUR, 16), options=f"--inject {kill(6, 1, 2)}", standby=2)
    check_went_on(done, 16)
    rebuilt = lost_stage(done, 1)
    assert rebuilt.detail["neighbours"] == [0, 2]
    assert rebuilt.detail["weights"] == pytest.approx(_shares(rebuilt.detail["norms"]))
    restored = done.named("state_restored")[-1].detail["sources"]
    assert restored == {"0": "own", "1": "rebuilt:0+2", "2": "copy:3", "3": "own"}
    plain = f"{ZERO} --pipeline-model-parallel-size 4"
    assert done.losses[:4] == reference(4, plain, 16)[:4], "the norms that are kept change no bit of a step"


def lost_stage(done, stage: int):
    """The event of its rebuild. The last step's copies may have been on their way when their owners died: then it is
    the step before that is gone back to, or the other stage is rebuilt as well."""
    (rebuilt,) = (each for each in done.named("stage_rebuilt") if each.detail["stage"] == stage)
    assert rebuilt.step in (4, 5)
    return rebuilt


def _shares(norms: list[float]) -> list[float]:
    before, after = (norm + 1e-4 for norm in norms)
    return [before / (before + after), after / (before + after)]


@pytest.mark.parametrize(
    "lost, holder, neighbour",
    [
        pytest.param(0, 1, 1, marks=pytest.mark.newest),
        pytest.param(3, 0, 2, marks=pytest.mark.long),
        pytest.param(2, 3, 1, marks=pytest.mark.long),
    ],
)
def test_with_swapped_training_every_stage_can_be_lost(lost, holder, neighbour, corpus, tmp_path):
    """A stage dies together with the worker that holds its copy, which is restored from its own copy first."""
    plus = f"{ZERO} --pipeline-model-parallel-size 4 --ft-checkfree-plus --save {tmp_path}/save --save-interval 8"
    done = ft_run(tmp_path / "run", flags(corpus, plus, 16), options=f"--inject {kill(6, lost, holder)}", standby=2)
    check_went_on(done, 16)
    assert (tmp_path / "save" / "iter_0000016").is_dir(), "stages that count from different steps have one checkpoint"
    rebuilt = lost_stage(done, lost)
    assert rebuilt.detail["neighbours"][0] == neighbour
    assert rebuilt.detail["strategy"] == ("weighted" if lost == 2 else "copy")


def test_two_adjacent_stages_lost_lead_to_the_checkpoint_by_themselves(corpus, tmp_path):
    """Nobody has copies, and the neighbour of a lost stage dies when it is to be rebuilt from it."""
    saving = f"{FOUR} --ft-snapshot-peers 0 --save {tmp_path}/save --save-interval 4"
    faults = f"{kill(7, 1)},kill@step=7:rank=2:phase=restore"
    done = ft_run(tmp_path / "run", flags(corpus, saving, 12), options=f"--inject {faults}", standby=2)
    assert done.code == 0, done.explain()
    assert len(done.named("fault_injected")) == 2, done.explain()
    (restarted,) = done.named("restarted")
    assert "the adjacent stages 1 and 2 are both lost" in restarted.detail["reason"]
    assert restarted.detail["reason"].endswith("what is left is the last persistent checkpoint")
    assert not done.named("stage_rebuilt") and done.metrics[-1]["step"] == 12


@pytest.mark.parametrize("phase", ["restore", pytest.param("resume", marks=pytest.mark.long)])
def test_a_fault_during_a_rebuild_has_it_begun_again(phase, corpus, tmp_path):
    """All of stage 1 dies; while it is rebuilt, one of its new workers, or a neighbour, does as well.

    That death is planned for either step that the victim may take for the next one, see `lost_stage`.
    """
    layout = f"{ZERO} --num-layers 3 --pipeline-model-parallel-size 3 --ft-checkfree"
    victim = 3 if phase == "resume" else 4
    deaths = [f"kill@step={step}:rank={victim}:phase={phase}" for step in (5, 6)]
    faults = ",".join([kill(6, 2, 3), *deaths])
    done = ft_run(tmp_path / "run", flags(corpus, layout, 16), nproc=6, options=f"--inject {faults}", standby=3)
    check_went_on(done, 16)
    assert len(done.named("fault_injected")) in (3, 4), done.explain()
    assert {event.detail["stage"] for event in done.named("stage_rebuilt")} >= {1}
    assert {event.step for event in done.named("stage_rebuilt")} <= {4, 5}


WITHOUT_COPIES = "--ft-checkfree --ft-snapshot-peers 0"


@pytest.mark.parametrize(
    ("layout", "exact"),
    [
        (f"{ZERO} --bf16", False),
        ("", True),
        pytest.param(
            "--tensor-model-parallel-size 2 --hidden-dropout 0.1 --attention-dropout 0.1", True, marks=pytest.mark.long
        ),
        pytest.param(f"{ZERO} --tensor-model-parallel-size 2", False, marks=pytest.mark.long),
        pytest.param(f"{ZERO} --pipeline-model-parallel-size 2", False, marks=pytest.mark.long),
        pytest.param(f"{ZERO} --num-experts 4 --expert-model-parallel-size 2", False, marks=pytest.mark.long),
    ],
    ids=["sharded bf16", "not sharded", "TP, dropout, not sharded", "TP", "PP", "experts"],
)
def test_without_copies_a_lost_rank_takes_the_exact_weights_of_its_data_parallel_peer(
    layout, exact, corpus, reference, tmp_path
):
    nproc = 4 if "size 2" in layout else 2
    given = flags(corpus, f"{layout} {WITHOUT_COPIES}", 12)
    done = ft_run(tmp_path / "run", given, nproc=nproc, options=f"--inject {kill_after_a_repair(6, 1)}")
    check_went_on(done, 12)
    (taken,) = done.named("stage_rebuilt")
    (peer,) = taken.detail["neighbours"]
    assert taken.detail["strategy"] == f"weights of rank {peer}" and taken.step in (4, 5)
    assert done.named("state_restored")[-1].detail["sources"]["1"] == f"rebuilt:{peer}"
    of_reference = reference(nproc, layout, 12)
    upto = 12 if exact else taken.step + 1  # the loss of the next step is that before its update with new moments
    assert done.losses[:upto] == of_reference[:upto]
    assert done.losses == pytest.approx(of_reference, abs=0.2)


def test_without_copies_a_lost_pipeline_stage_is_rebuilt(corpus, tmp_path):
    layout = f"{ZERO} --pipeline-model-parallel-size 3 --num-layers 3 {WITHOUT_COPIES}"
    done = ft_run(tmp_path / "run", flags(corpus, layout, 16), nproc=3, options=f"--inject {kill(6, 1)}")
    check_went_on(done, 16)
    assert lost_stage(done, 1).detail["neighbours"] == [0, 2]
    assert "hot-swap without copies" in done.output


@pytest.mark.long
def test_a_rank_lost_while_its_peers_update_has_its_stage_rebuilt(corpus, tmp_path):
    """Rank 2 dies when rank 3 may have updated: nobody has the weights of the last committed step any more."""
    layout = f"{ZERO} --pipeline-model-parallel-size 3 --num-layers 3 {WITHOUT_COPIES}"
    fault = "--inject kill@step=6:rank=2:phase=optimizer"
    done = ft_run(tmp_path / "run", flags(corpus, layout, 16), nproc=6, options=fault)
    check_went_on(done, 16)
    assert {event.detail["stage"] for event in done.named("stage_rebuilt")} == {1}
