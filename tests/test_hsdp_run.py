"""FT-HSDP with the real trainer: without faults it is data parallelism, with them nobody stops, no sample is lost."""

import os
import signal

import pytest
import replica_runs
import small_runs
from replica_runs import Done, Replicas, train

from ft import events
from ft.hsdp.report import lineage

DISTRIBUTED = "--use-distributed-optimizer"
SLOWLY = "slow@replica=0:step=2:rank=0:factor=2:for=300s"
"""Steps long enough, by sleeping, that a replica is back after a few of them."""


@pytest.fixture
def data_parallel(ranks, corpus, tmp_path):
    """Losses of ordinary data parallelism on as many ranks and the same global batch."""

    def losses(nproc: int, extra: str, steps: int, batch: int) -> list[float]:
        file = tmp_path / "reference.jsonl"
        flags = replica_runs.flags(corpus, f"{extra} --metrics-file {file}", steps, batch)
        ranks(small_runs.run, nproc, flags, timeout=120)
        return small_runs.losses(file)

    return losses


def check(done: Done, steps: int, failures: int) -> None:
    """All that has to be true of every run: see :meth:`replica_runs.Proof.problems`."""
    problems = done.proof.problems(steps, failures)
    assert done.code == 0 and not problems, f"{problems}\n{done.explain()}"


def happened(done: Done, *faults: str) -> None:
    """All of the planned faults were injected."""
    found = [event.detail["kind"] for event in done.injected()]
    assert sorted(found) == sorted(spec.partition("@")[0] for spec in faults), done.explain()


# --- without faults ---------------------------------------------------------------------------------------------------

LAYOUTS = {
    "DP2 with the distributed optimizer, overlapped": (3, 6, 12, f"{DISTRIBUTED} --overlap-grad-reduce"),
    "TP2, loss per token": (
        2,
        4,
        8,
        "--tensor-model-parallel-size 2 --sequence-parallel --calculate-per-token-loss --eod-mask-loss",
    ),
    "PP2, interleaved": (2, 4, 8, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_replicas_train_as_data_parallelism_does(name, corpus, data_parallel, tmp_path):
    replicas, nproc, batch, extra = LAYOUTS[name]
    steps = 6
    flags = replica_runs.flags(corpus, extra, steps, batch)
    done = train(tmp_path / "run", flags, replicas=replicas, nproc=nproc)
    check(done, steps, 0)
    wanted = data_parallel(nproc, extra, steps, batch)
    for replica in range(replicas):
        assert done.losses_of(replica) == pytest.approx(wanted, rel=1e-5), done.explain()


def test_replicas_with_dropout_in_bf16_stay_equal(corpus, tmp_path):
    steps = 6
    extra = f"{DISTRIBUTED} --bf16 --attention-dropout 0.1 --hidden-dropout 0.1"
    flags = replica_runs.flags(corpus, extra, steps, 8)
    done = train(tmp_path / "run", flags, replicas=2, nproc=4)
    check(done, steps, 0)
    assert done.losses_of(0) == done.losses_of(1)
    assert done.losses_of(0)[-1] < done.losses_of(0)[0]


# --- with faults ------------------------------------------------------------------------------------------------------


def test_a_worker_killed_anywhere_costs_the_others_one_step_at_most(corpus, tmp_path):
    steps = 70
    faults = (
        "kill@replica=0:step=5:rank=0:phase=forward",  # the leader of the first replica
        "kill@replica=1:step=20:rank=1:phase=backward",
        "kill@replica=1:step=20:rank=0:phase=restore",  # while it catches up
        "kill@replica=2:step=35:rank=1:phase=reduce",
        "kill@replica=1:step=35:rank=1:phase=restore",  # a healthy one, while another one catches up
        "kill@replica=2:step=50:rank=1:phase=optimizer",  # between vote and step
        SLOWLY,
    )
    flags = replica_runs.flags(corpus, DISTRIBUTED, steps)
    done = train(tmp_path / "run", flags, replicas=3, nproc=6, options=f"--inject {','.join(faults)}")
    check(done, steps, len(faults) - 1)
    happened(done, *faults)
    assert any(done.of(replica, events.CAUGHT_UP) for replica in range(3)), done.explain()


def test_hangs_broken_rings_and_lost_agents_control_planes_and_quorum_servers_are_survived(corpus, tmp_path):
    steps = 70
    faults = (
        "kill-control@replica=1:step=5",
        "drop@replica=2:step=8:rank=1:phase=backward",
        "hang@replica=1:step=14:rank=1:phase=reduce",
        "kill-agent@replica=2:step=30",
        "kill@replica=1:step=50:rank=0:phase=backward",  # two at once
        "kill@replica=2:step=50:rank=1:phase=reduce",
        SLOWLY,
    )
    flags = replica_runs.flags(corpus, DISTRIBUTED, steps)
    run = Replicas(tmp_path / "run", flags, replicas=3, nproc=6, options=f"--inject {','.join(faults)}")
    run.wait_for(lambda: run.step() >= 10)
    os.kill(run.server(), signal.SIGKILL)
    done = run.wait()
    check(done, steps, len(faults))
    happened(done, *faults)


# --- all replicas lost ------------------------------------------------------------------------------------------------


def all_lost(step: int) -> str:
    return ",".join(f"kill@replica={replica}:step={step}:rank=0:phase=forward" for replica in range(2))


def test_all_replicas_lost_go_on_from_the_checkpoint_or_begin_anew(corpus, tmp_path):
    saving = f"--save {tmp_path}/saved --save-interval 5"
    flags = replica_runs.flags(corpus, saving, 14, 8)
    done = train(tmp_path / "saving", flags, replicas=2, nproc=2, options=f"--inject {all_lost(9)}")
    check(done, 14, 3)
    assert {commit.step for commit in done.proof.lines[0] if commit.before == 0} == {1, 6}, done.explain()
    assert len(done.losses_of(0)) >= 14

    flags = replica_runs.flags(corpus, "", 10, 8)
    done = train(tmp_path / "not-saving", flags, replicas=2, nproc=2, options=f"--inject {all_lost(5)}")
    check(done, 10, 4)
    assert [commit.step for commit in done.proof.lines[0] if commit.before == 0] == [1, 1], done.explain()


def test_a_checkpoint_of_three_replicas_goes_on_with_two_and_every_sample_is_seen_once(corpus, tmp_path):
    saving = f"--save {tmp_path}/saved --save-interval 4"
    lost = "kill@replica=2:step=3:rank=0:phase=forward"  # its samples are still to come at the end
    first = train(
        tmp_path / "three",
        replica_runs.flags(corpus, saving, 8, 12),
        replicas=3,
        nproc=3,
        options=f"--inject {lost}",
    )
    check(first, 8, 1)
    second = train(
        tmp_path / "two",
        replica_runs.flags(corpus, f"{saving} --load {tmp_path}/saved", 16, 12),
        replicas=2,
        nproc=2,
    )
    assert second.code == 0, second.explain()
    after = second.proof
    assert after.steps == list(range(9, 17)) and not after.unequal() and after.audit.is_clean, second.explain()
    last, begin = first.proof.lineage.steps[-1].commit, after.lineage.steps[0].commit
    taken = last.deal.taken(last.positions).tolist()
    assert begin.deal.taken(lineage.before_of(begin)).tolist() == taken, "samples are lost or seen again"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "extra, batch, says",
    [("", 10, "--global-batch-size 10"), ("--rampup-batch-size 4 4 40", 8, "--rampup-batch-size")],
)
def test_a_batch_that_replicas_cannot_share_is_refused_by_name(extra, batch, says, corpus, tmp_path):
    flags = replica_runs.flags(corpus, extra, 4, batch)
    done = train(tmp_path / "run", flags, replicas=2, nproc=2)
    assert done.code == 2 and says in done.output, done.explain()


def test_hot_swap_inside_replicas_is_refused(corpus, tmp_path):
    flags = replica_runs.flags(corpus, "--ft-hot-swap", 4)
    done = train(tmp_path / "run", flags, replicas=2, nproc=2)
    assert done.code == 2 and "--ft-hot-swap and --ft-hsdp-replicas" in done.output, done.explain()
