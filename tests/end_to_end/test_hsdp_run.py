"""FT-HSDP with the real trainer: without faults it is data parallelism, with them nobody stops, no sample is lost."""

import os
import re
import signal
import time

import pytest
import replica_runs
import slow_fetch_gpt
import small_runs
from replica_runs import Done, Replicas, all_injected, together, train
from stored_tensors import Tensors, equal, furthest, tensors_of, weights_of

from ft.base import events
from ft.base.errors import ENDED_EARLY, NOT_SAVED
from ft.observe.report import lineage, record
from ft.observe.report.status import as_text, status

DISTRIBUTED = "--use-distributed-optimizer"
SLOWLY = "slow@replica=0:step=2:rank=0:factor=2:for=300s"
"""Steps long enough, by sleeping, that a replica is back after a few of them."""


@pytest.fixture
def data_parallel(ranks, corpus, tmp_path):
    """Ordinary data parallelism on as many ranks, with the same global batch: losses, and what is saved at the end."""

    def trained(nproc: int, extra: str, steps: int, batch: int) -> tuple[list[float], Tensors]:
        file, saved = tmp_path / "reference.jsonl", tmp_path / "reference"
        extra = f"{extra} --metrics-file {file} --save {saved} --save-interval {steps}"
        ranks(small_runs.run, nproc, replica_runs.flags(corpus, extra, steps, batch))
        return small_runs.losses(file), tensors_of(saved, steps)

    return trained


PLANNED = re.compile(r"([\w-]+)@replica=(\d+):step=(\d+):rank=(\d+):phase=(\w+)")


def happened(done: Done, faults: str) -> None:
    """Each planned fault of a phase was injected, unless its replica was not in the step: away, or too slow for it."""
    in_step, planned = {step.number: step.commit.healthy for step in done.proof.lineage.steps}, PLANNED.findall(faults)
    missed = 0
    for kind, replica, step, rank, phase in planned:
        text = f"{kind} of rank {rank} at step {step} ({phase})"
        if text not in {event.detail.get("fault") for event in done.of(int(replica), events.FAULT_INJECTED)}:
            missed += 1
            is_away = int(replica) not in in_step[int(step)] or phase == "restore"  # that may have nothing to restore
            assert is_away, f"{text} of replica {replica}: not injected\n{done.explain()}"
    assert missed < len(planned), done.explain()


# --- without faults ---------------------------------------------------------------------------------------------------

EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear --moe-token-dispatcher-type alltoall"
STAGES = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel --calculate-per-token-loss --eod-mask-loss"
LONG = pytest.mark.long
FURTHEST = 0.02 * 1e-2
"""A weight may be so far from that of data parallelism where the gradients of more than two ranks are added up in
another order: 2 % of the learning rate, which is about what a step changes (seen: 0.15 %)."""
LAYOUTS = [
    pytest.param(3, 6, 12, f"{DISTRIBUTED} --overlap-grad-reduce", FURTHEST, id="DP2 of 3, sharded", marks=LONG),
    pytest.param(2, 4, 8, f"{DISTRIBUTED} --overlap-grad-reduce {EXPERTS}", FURTHEST, id="EP2 x DP2, sharded"),
    pytest.param(2, 4, 8, SPLIT, 0.0, id="TP2, loss per token", marks=LONG),
    pytest.param(2, 4, 8, STAGES, 0.0, id="PP2, interleaved", marks=LONG),
    pytest.param(2, 8, 8, f"{SPLIT} {STAGES}", 0.0, id="TP2 x PP2, loss per token, interleaved"),
]


@pytest.mark.parametrize(("replicas", "nproc", "batch", "extra", "bound"), LAYOUTS)
def test_replicas_train_as_data_parallelism_does(replicas, nproc, batch, extra, bound, corpus, data_parallel, tmp_path):
    steps = 6
    saving = f"{extra} --save {tmp_path}/saved --save-interval {steps}"
    how = {"replicas": replicas, "nproc": nproc, "good": together(steps)}
    done = train(tmp_path / "run", replica_runs.flags(corpus, saving, steps, batch), **how)
    done.check(steps, 0)
    losses, wanted = data_parallel(nproc, extra, steps, batch)
    found = tensors_of(tmp_path / "saved", steps)
    if bound:
        apart = furthest(weights_of(found), weights_of(wanted))
        print("furthest apart:", apart)
        assert apart[0] <= bound, done.explain()
    else:  # the sum of two is the same in any order, and halves and quarters are exact
        assert equal(found, wanted) and len(found) > len(weights_of(found)), done.explain()
    for replica in range(replicas):
        assert done.losses_of(replica) == pytest.approx(losses, rel=1e-5 if bound else 0.0, abs=0.0), done.explain()


# --- with faults ------------------------------------------------------------------------------------------------------


@pytest.mark.newest
def test_a_worker_killed_anywhere_costs_the_others_one_step_at_most(corpus, tmp_path):
    steps = 70
    faults = (
        "kill@replica=0:step=5:rank=0:phase=forward",  # the leader of the first replica
        "kill@replica=1:step=20:rank=1:phase=backward",
        "kill@replica=1:step=20:rank=0:phase=restore",  # while it catches up
        "kill@replica=2:step=35:rank=1:phase=reduce",
        "kill@replica=1:step=35:rank=1:phase=restore",  # a healthy one, while another one catches up
        "kill@replica=2:step=50:rank=1:phase=optimizer",  # between vote and step
        SLOWLY.replace("replica=0", "replica=2"),  # until the others are back
    )
    flags = replica_runs.flags(corpus, DISTRIBUTED, steps)
    done = train(tmp_path / "run", flags, replicas=3, nproc=6, options=f"--inject {','.join(faults)}")
    done.check(steps, len(faults) - 1)
    happened(done, ",".join(faults))
    assert any(done.of(replica, events.CAUGHT_UP) for replica in range(3)), done.explain()


def test_hangs_broken_rings_and_lost_agents_control_planes_and_quorum_servers_are_survived(corpus, tmp_path):
    steps = 70
    faults = (
        "kill-control@replica=1:step=5",
        "drop@replica=2:step=8:rank=1:phase=backward",
        "hang@replica=1:step=14:rank=1:phase=reduce",
        "kill@replica=1:step=32:rank=0:phase=backward",  # two at once
        "kill@replica=2:step=32:rank=1:phase=reduce",
        "kill-agent@replica=2:step=52",  # another one begins with the imports: it may come too late
        SLOWLY,
    )
    flags = replica_runs.flags(corpus, DISTRIBUTED, steps)
    run = Replicas(tmp_path / "run", flags, replicas=3, nproc=6, options=f"--inject {','.join(faults)}")
    run.wait_for(lambda: run.step() >= 10)
    os.kill(run.server(), signal.SIGKILL)
    done = run.wait()
    done.check(steps, len(faults))
    happened(done, ",".join(faults))


def test_with_dropout_in_bf16_a_fetch_longer_than_steps_is_cut_and_tried_again_and_all_are_equal(corpus, tmp_path):
    steps = 25
    extra = f"{DISTRIBUTED} --bf16 --attention-dropout 0.1 --hidden-dropout 0.1"
    done = train(
        tmp_path / "run",
        replica_runs.flags(corpus, extra, steps, 8),
        replicas=2,
        nproc=4,
        options=f"--ft-hsdp-wait 100ms --inject kill@replica=1:step=5:rank=1:phase=backward,{SLOWLY}",
        script="tests/helpers/slow_fetch_gpt.py",
    )
    done.check(steps, 1)
    back = done.of(1, events.CAUGHT_UP)
    assert len(back) >= 2 and all(event.detail["fetch_s"] >= slow_fetch_gpt.FETCH_S for event in back), done.explain()
    assert "the state was withdrawn during the transfer" in done.logs_of(1), done.explain()
    ours, theirs = ({step["step"]: step["loss"] for step in done.metrics_of(replica)} for replica in range(2))
    assert all(ours[step] == theirs[step] for step in ours.keys() & theirs.keys()) and len(theirs) < steps
    assert len(done.losses()) == steps and done.losses()[-1] < done.losses()[0], done.explain()
    # Before anyone waits for a replica that returns, it computes a step of which nothing is left; nobody else does.
    happenings = events.read(done.folder / "events.jsonl")
    online = [e.wall for e in happenings if e.name == events.REPLICA_ONLINE and e.detail["life"]]
    rehearsed = [float(line.split()[-1]) for line in done.logs_of(1).splitlines() if slow_fetch_gpt.REHEARSED in line]
    assert len(rehearsed) >= 2 and min(rehearsed) < online[0], done.explain()  # its leader reports after it
    assert slow_fetch_gpt.REHEARSED not in done.logs_of(0)


# --- all replicas lost ------------------------------------------------------------------------------------------------


def all_lost(step: int) -> str:
    return ",".join(f"kill@replica={replica}:step={step}:rank=0:phase=forward" for replica in range(2))


def test_all_replicas_lost_go_on_from_the_checkpoint_or_begin_anew(corpus, tmp_path):
    saving = f"--save {tmp_path}/saved --save-interval 5"
    flags = replica_runs.flags(corpus, saving, 14, 8)
    how = {"replicas": 2, "nproc": 2, "good": all_injected(2)}
    done = train(tmp_path / "saving", flags, options=f"--inject {all_lost(9)}", **how)
    done.check(14, 3)
    assert {commit.step for commit in done.proof.lines[0] if commit.before == 0} == {1, 6}, done.explain()
    assert len(done.losses()) == 14

    # weights of position embeddings are drawn from the generator that the compilation before them uses, too
    flags = replica_runs.flags(corpus, "--max-position-embeddings 32", 10, 8).replace(" rope ", " learned_absolute ")
    done = train(tmp_path / "not-saving", flags, options=f"--inject {all_lost(5)}", **how)
    done.check(10, 4)
    begun = [commit for commit in done.proof.lines[0] if commit.before == 0]
    assert [commit.step for commit in begun] == [1, 1], done.explain()
    assert begun[0].digest == begun[1].digest, f"other initial weights than the first time\n{done.explain()}"


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
    first.check(8, 1)
    second = train(
        tmp_path / "two",
        replica_runs.flags(corpus, f"{saving} --load {tmp_path}/saved --override-opt-param-scheduler", 16, 12),
        replicas=2,
        nproc=2,
    )
    assert second.code == 0, second.explain()
    after = second.proof
    assert after.steps == list(range(9, 17)) and not after.unequal() and after.audit.is_clean, second.explain()
    last, begin = first.proof.lineage.steps[-1].commit, after.lineage.steps[0].commit
    taken = last.assignment.taken(last.positions).tolist()
    assert begin.assignment.taken(lineage.before_of(begin)).tolist() == taken, "samples are lost or seen again"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
@pytest.mark.parametrize(("hot_swap", "nproc"), [("", 2), pytest.param("--ft-hot-swap", 4, marks=LONG)])
def test_the_last_checkpoint_of_replicas_that_cannot_be_saved(small_disk, hot_swap, nproc, corpus, tmp_path):
    saving = f"{hot_swap} --save {small_disk} --save-interval 4"
    done = train(tmp_path / "run", replica_runs.flags(corpus, saving, 6, 8), replicas=2, nproc=nproc)
    assert done.code == NOT_SAVED and done.proof.steps == list(range(1, 7)), done.explain()
    history = record.load(done.folder)
    assert history.state == "finished, not saved", done.explain()
    assert {event.step for _, event in history.history if event.name == events.SAVE_FAILED} == {4, 6}
    text = as_text(status(history, time.time()), "run")
    assert "THE LAST SAVE FAILED (step 6, " in text and "none was saved" in text


def test_replicas_that_sigterm_ends_early(corpus, tmp_path):
    flags = replica_runs.flags(corpus, f"--save {tmp_path}/save", 100_000, 8)
    run = Replicas(tmp_path / "run", flags, replicas=2, nproc=2)
    run.wait_for(lambda: run.step() >= 3)
    run.process.send_signal(signal.SIGTERM)
    done = run.wait()
    assert done.code == ENDED_EARLY, done.explain()
    assert re.fullmatch(r"ended early \(SIGTERM\) at \d+ of 100000", record.load(done.folder).state), done.explain()
    assert {path.read_text() for path in (done.folder / "ended").iterdir()} == {"ended early"}
