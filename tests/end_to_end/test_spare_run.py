"""SPARe with the real trainer: every step trains the whole batch, whichever groups are lost, and no sample twice."""

import pytest
import small_runs
from replica_runs import Done, flags, train
from test_hsdp_run import DISTRIBUTED, SLOWLY, happened

from ft.base import events

SPARE = "--ft-spare-redundancy 2"
STEPS = 30
CLOSE, BOUND = 2e-3, 2e-2
"""Of losses, of the first steps and of all: sums in another order, and what training makes of that."""


@pytest.fixture(scope="module")
def whole(_warm_ranks, corpus, tmp_path_factory):
    """Losses of ordinary data parallelism with the same global batch."""
    file = tmp_path_factory.mktemp("reference") / "metrics.jsonl"
    wanted = flags(corpus, f"{DISTRIBUTED} --metrics-file {file}", STEPS)
    _warm_ranks(small_runs.run, 3, wanted)
    return small_runs.losses(file)


def judge(done: Done, whole: list[float], failures: int) -> None:
    done.check(STEPS, failures)
    found = done.losses()
    assert found[:20] == pytest.approx(whole[:20], abs=CLOSE), done.explain()
    assert found == pytest.approx(whole, abs=BOUND), done.explain()
    trained = {step.commit.streams for step in done.proof.lineage.steps}
    assert trained == {(0, 1, 2)}, "a step that has not trained all shard types"


@pytest.mark.newest
def test_lost_groups_cost_no_sample_and_come_back(corpus, whole, tmp_path):
    lost = "kill@replica=1:step=10:rank=0:phase=backward,kill@replica=2:step=20:rank=0:phase=optimizer"
    options = f"{SPARE} --inject {lost},{SLOWLY}"
    done = train(tmp_path / "run", flags(corpus, DISTRIBUTED, STEPS), replicas=3, nproc=3, options=options)
    happened(done, lost)
    judge(done, whole, 2)
    steps = done.proof.lineage.steps
    assert any(done.of(group, events.CAUGHT_UP) for group in (1, 2)), f"nobody has come back\n{done.explain()}"
    if not any(1 in step.commit.healthy for step in steps[9:19]):
        pytest.skip("the second group was lost before the first one was back, which a test of wipe-outs has")
    # A group can be back before the step that it was lost in is done anew: nothing is patched then.
    for group, before, commit in ((1, steps[8].commit, steps[9].commit), (2, steps[19].commit, steps[20].commit)):
        if group in before.healthy and group not in commit.healthy:
            assert group in commit.patch and 2 in {step.commit.stack for step in steps}, done.explain()


def test_the_types_of_a_wipe_out_are_computed_by_who_is_left(corpus, whole, tmp_path):
    lost = ",".join(f"kill@replica={group}:step=10:rank=0:phase=backward" for group in (1, 2))
    options = f"{SPARE} --inject {lost},{SLOWLY}"
    done = train(tmp_path / "run", flags(corpus, DISTRIBUTED, STEPS), replicas=3, nproc=3, options=options)
    happened(done, lost)
    judge(done, whole, 0)
    if done.proof.lineage.steps[9].commit.healthy != (0,):
        pytest.skip("a lost group was back before the step was done anew")
    adopted = [step.commit for step in done.proof.lineage.steps if step.commit.adopted]
    assert adopted and {commit.adopted for commit in adopted} == {(2,)}, done.explain()
    assert all(commit.owners[2] == 0 for commit in adopted)
    later = [step.commit.healthy for step in done.proof.lineage.steps[10:]]
    assert (0, 1, 2) in later, "nobody has come back"


def test_all_groups_lost_begin_again_from_the_checkpoint_with_new_stacks(corpus, whole, tmp_path):
    faults = ["kill@replica=1:step=8:rank=0:phase=backward"]
    faults += [f"kill@replica={group}:step=12:rank=0:phase=backward" for group in range(3)]
    saves, plan = f"--save {tmp_path}/saved --save-interval auto", tmp_path / "plan.json"
    plan.write_text('{"groups": 3, "recommended": 2, "checkpoint_interval_steps": 5}')
    done = train(
        tmp_path / "run",
        flags(corpus, f"{DISTRIBUTED} {saves}", STEPS),
        replicas=3,
        nproc=3,
        options=f"--ft-spare-plan {plan} --inject {','.join(faults)}",
    )
    judge(done, whole, 12)
    assert 1 in {step.commit.stack for step in done.proof.lineage.steps[-10:]}, done.explain()
    assert {5, 10, 15, 20, 25, 30} == {int(path.name[5:]) for path in (tmp_path / "saved").glob("iter_*")}


@pytest.mark.long
def test_gradients_by_tokens_and_over_stages_are_the_same_too(ranks, corpus, tmp_path):
    """What core does with gradients once they are reduced, division by tokens and the sum of tied embeddings' copies,
    must not get into what is kept of an attempt that fails."""
    layout = "--pipeline-model-parallel-size 2 --calculate-per-token-loss --eod-mask-loss"
    file = tmp_path / "reference.jsonl"
    wanted = flags(corpus, layout, STEPS).replace("--untie-embeddings-and-output-weights", "")
    ranks(small_runs.run, 2, f"{wanted} --metrics-file {file}")
    inject = "kill@replica=1:step=10:rank=1:phase=optimizer"  # the others compute the next step whole, exchange nothing
    done = train(tmp_path / "run", wanted, replicas=3, nproc=6, options=f"{SPARE} --inject {inject}")
    happened(done, inject)
    judge(done, small_runs.losses(file), 1)
