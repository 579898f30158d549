"""FT-HSDP replicas and SPARe's groups of a Megatron-LM checkout's own trainer under ``ft run``.

The checkouts are found by ``megatron_lm_trees``; without them the tests are skipped.
"""

import megatron_lm_trees as checkouts
import pytest
import replica_runs
from replica_runs import Done

from ft.base import events
from ft.observe.report import lineage

SLOWLY = "slow@replica=0:step=2:rank=0:factor=6:for=300s"
"""Steps long enough, by sleeping, that a replica is back after a few of them."""
COMMON = f"{checkouts.BASE} --global-batch-size 8 --eval-iters 1 --log-interval 1 --rerun-mode disabled"
TWO_STAGES = f"{COMMON} --num-layers 4 --pipeline-model-parallel-size 2 --mock-data"
ONE_RANK = f"{COMMON} --num-layers 2 --mock-data --eval-interval 100"
SHARDED = (
    f"{COMMON} --num-layers 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --num-workers 2 "
    "--eval-interval 4 --log-params-norm --log-num-zeros-in-grad --save-interval 6 --async-save "
    "--data-path {data} --data-cache-path {cache} --save {save}"
)

FSDP2 = (
    f"{COMMON} --num-layers 2 --use-torch-fsdp2 --untie-embeddings-and-output-weights --ckpt-format torch_dist "
    "--mock-data --eval-interval 5"
)


def steps_of(count: int) -> str:
    return f"--train-iters {count} --lr-decay-iters {count}"


def train(folder, flags: str, release: str = "0.16", *, replicas: int = 2, nproc: int = 4, options: str = "") -> Done:
    """Run replicas of the checkout of ``release`` from start to end."""
    how = {"replicas": replicas, "nproc": nproc, "options": options, "limit_s": 400}
    return replica_runs.train(folder, flags, script=str(checkouts.script_of(release)), **how)


def check(done: Done, steps: int, failures: int) -> None:
    """All that has to be true of every run: see :meth:`replica_runs.Proof.problems`; and replicas that have committed a
    step in one quorum log the same."""
    done.check(steps, failures)
    logged: dict[tuple[int, int], set] = {}
    for replica, commits in done.proof.lines.items():
        quorums = {commit.step: commit.quorum for commit in commits}  # the last one of each step
        for step, *line in logged_by(done, replica):
            logged.setdefault((step, quorums[step]), set()).add(tuple(line))
    assert all(len(lines) == 1 for lines in logged.values()), f"{logged}\n{done.explain()}"


def logged_by(done: Done, replica: int) -> list[tuple]:
    """Return (step, loss, gradient norm, validation loss) of each step that a replica has logged, with all bits."""
    names = ("loss", "grad_norm", "validation_loss")
    return [
        (line["step"], *(line[name].hex() if name in line else "" for name in names))
        for line in done.metrics_of(replica)
    ]


@pytest.mark.parametrize("release", ["0.16", "installed"])
def test_a_killed_replica_comes_back_and_every_sample_is_trained_once(tmp_path, release):
    steps = 20
    flags = f"{TWO_STAGES} {steps_of(steps)} --eval-interval 5"
    done = train(
        tmp_path / "run", flags, release, options=f"--inject kill@replica=1:step=5:rank=1:phase=evaluate,{SLOWLY}"
    )
    check(done, steps, 1)
    assert done.of(1, events.CAUGHT_UP), done.explain()
    assert any(len(step.commit.healthy) == 1 for step in done.proof.lineage.steps), done.explain()
    for replica, commits in done.proof.lines.items():
        logged = {step for step, *_ in logged_by(done, replica)}
        assert logged == {commit.step for commit in commits}, done.explain()


@pytest.mark.parametrize("release", ["0.16", "installed"])
def test_a_standby_takes_a_lost_workers_place_inside_its_replica(tmp_path, release):
    steps = 16
    flags = f"{ONE_RANK} {steps_of(steps)} --use-distributed-optimizer --ft-hot-swap"
    options = f"--standby 1 --inject kill@replica=1:step=4:rank=1,{SLOWLY}"
    done = train(tmp_path / "run", flags, release, options=options)
    check(done, steps, 1)
    assert done.of(1, events.STATE_RESTORED) and done.proof.lines[1][-1].step > 5, done.explain()


@pytest.mark.newest
def test_a_killed_replica_comes_back_to_shards_of_fsdp2(tmp_path):
    """A worker is lost, and then both of its replica at once."""
    both = ",".join(f"kill@replica=1:step=11:rank={rank}:phase=optimizer" for rank in range(2))
    options = f"--inject kill@replica=1:step=4:rank=1:phase=backward,{both},{SLOWLY}"
    done = train(tmp_path / "run", f"{FSDP2} --bf16 {steps_of(24)}", "installed", options=options)
    check(done, 24, 3)
    assert {event.step for event in done.of(1, events.CAUGHT_UP)}, done.explain()
    assert any(len(step.commit.healthy) == 1 for step in done.proof.lineage.steps), done.explain()


@pytest.mark.long
def test_a_standby_in_a_replica_of_fsdp2_changes_nothing(tmp_path):
    flags = f"{FSDP2} --bf16 {steps_of(10)}"
    plain = train(tmp_path / "plain", flags, "installed")
    options = "--standby 1 --inject kill@replica=1:step=4:rank=1:phase=backward"
    done = train(tmp_path / "run", f"{flags} --ft-hot-swap", "installed", options=options)
    check(plain, 10, 0)
    check(done, 10, 0)
    assert done.of(1, events.STATE_RESTORED) and logged_by(done, 0) == logged_by(plain, 0), done.explain()


@pytest.mark.long
def test_replicas_of_fsdp2_train_and_save_as_torchrun_does(tmp_path):
    saving = f"--ckpt-format torch_dcp --save {tmp_path / 'save'} --save-interval 4"  # core saves none as torch_dist
    done = train(tmp_path / "run", f"{FSDP2} {steps_of(10)} {saving}", "installed")
    check(done, 10, 0)
    written = sorted(path.name for path in (tmp_path / "save").glob("iter_*"))
    assert written == [f"iter_{step:07d}" for step in (4, 8, 10)], done.explain()
    plain, _ = checkouts.plain(
        checkouts.script_of("0.19"), f"{FSDP2} {steps_of(10)}", tmp_path / "plain", CUDA_DEVICE_MAX_CONNECTIONS="8"
    )
    wanted = {line["step"]: float.fromhex(line["losses"]["lm loss"]) for line in plain if "step" in line}
    found = {step: float.fromhex(loss) for step, loss, *_ in logged_by(done, 0)}
    assert found == pytest.approx(wanted, rel=1e-5)  # sums have another order


@pytest.mark.long
@pytest.mark.parametrize("release", ["0.16", "0.19", "installed"])
def test_replicas_train_as_torchrun_does_bit_for_bit(tmp_path, release):
    """With two replicas the sum of gradients is the same in any order, and halves are exact.

    Evaluations are not divided among replicas, so their sums are rounded in another order.
    """
    flags = f"{TWO_STAGES} {steps_of(8)} --eval-interval 4"
    done = train(tmp_path / "run", flags, release)
    check(done, 8, 0)
    nvidias = checkouts.script_of("0.19" if release == "installed" else release)
    plain, _ = checkouts.plain(nvidias, flags, tmp_path / "plain")
    wanted = {line["step"]: (line["losses"]["lm loss"], line["grad_norm"]) for line in plain if "step" in line}
    evaluated = [float.fromhex(line["evaluation"]["lm loss"]) for line in plain if "evaluation" in line]
    found = logged_by(done, 0)
    assert {step: (loss, norm) for step, loss, norm, _ in found} == wanted
    assert [float.fromhex(loss) for *_, loss in found if loss] == pytest.approx(evaluated[:2], rel=1e-6)


@pytest.mark.long
def test_a_sharded_optimizer_overlap_real_data_and_asynchronous_saves(tmp_path):
    steps = 20
    corpus = checkouts.write_corpus(tmp_path / "corpus")
    flags = SHARDED.format(data=corpus, cache=tmp_path / "cache", save=tmp_path / "save")
    faults = (
        "kill@replica=1:step=4:rank=1:phase=backward",
        "kill@replica=0:step=13:rank=0:phase=optimizer",
        SLOWLY,
    )
    done = train(tmp_path / "run", f"{flags} {steps_of(steps)}", options=f"--inject {','.join(faults)}")
    check(done, steps, 2)
    written = sorted(path.name for path in (tmp_path / "save").glob("iter_*"))
    assert written == [f"iter_{step:07d}" for step in (6, 12, 18, 20)], done.explain()


@pytest.mark.long
def test_all_replicas_lost_go_on_from_the_checkpoint_and_another_run_from_its_end(tmp_path):
    lost = ",".join(f"kill@replica={replica}:step=7:rank=0:phase=forward" for replica in range(2))
    away = "kill@replica=1:step=2:rank=0:phase=forward"  # its samples are still to come
    saving = f"--save {tmp_path / 'save'} --save-interval 4"
    first = train(tmp_path / "first", f"{ONE_RANK} {saving} {steps_of(10)}", nproc=2, options=f"--inject {away},{lost}")
    check(first, 10, 4)
    assert {commit.step for commit in first.proof.lines[0] if commit.before == 0} == {1, 5}, first.explain()

    going_on = f"{saving} --load {tmp_path / 'save'} --override-opt_param-scheduler {steps_of(14)}"
    second = train(tmp_path / "second", f"{ONE_RANK} {going_on}", nproc=2)
    assert second.code == 0, second.explain()
    after, last = second.proof, first.proof.lineage.steps[-1].commit
    assert after.steps == [11, 12, 13, 14] and not after.unequal() and after.audit.is_clean, second.explain()
    begin = after.lineage.steps[0].commit
    taken = last.assignment.taken(last.positions).tolist()
    assert begin.assignment.taken(lineage.before_of(begin)).tolist() == taken, "samples are lost or seen again"


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "release", "nproc"), [(ONE_RANK, "0.16", 3), (ONE_RANK, "installed", 3), (FSDP2, "installed", 6)]
)
def test_groups_of_spare_train_the_samples_of_a_lost_one_in_the_same_step(tmp_path, flags, release, nproc):
    steps = 14
    flags = f"{flags.replace('--global-batch-size 8', '--global-batch-size 12')} {steps_of(steps)}"
    options = f"--ft-spare-redundancy 2 --inject kill@replica=1:step=4:rank=0:phase=backward,{SLOWLY}"
    done = train(tmp_path / "run", flags, release, replicas=3, nproc=nproc, options=options)
    check(done, steps, 1)
    commits = [step.commit for step in done.proof.lineage.steps]
    assert {commit.streams for commit in commits} == {(0, 1, 2)}, "a step that has not trained all shard types"
    assert [commit.patch for commit in commits if commit.patch] == [(1,)], done.explain()
    assert done.of(1, events.CAUGHT_UP), done.explain()
