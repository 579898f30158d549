"""Workers that hang or are busy, in real runs: who is replaced, and who is not."""

import contextlib
import random
import signal
import time

import megatron_lm_trees as checkouts
import psutil
import pytest
import replica_runs
from agent_jobs import ROOT, Job
from ft_runs import Running, flags, ft_run
from test_megatron_lm import TWO_STAGES, of_run, of_steps

from ft.base.errors import ENDED_EARLY
from ft.record.recoveries import recoveries

LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2"
LONG = pytest.mark.long
DEVICE_LIKE = "--preload tests.helpers.device_like"
"""Makes collectives look like NCCL's: no worker says that it waits."""


def test_who_holds_the_interpreter_lock_for_seconds_is_not_replaced(corpus, reference, tmp_path):
    done = ft_run(tmp_path / "run", flags(corpus, LAYOUT, 12), options="--inject gil@step=6:rank=1:for=5s")
    assert done.code == 0 and done.named("fault_injected"), done.explain()
    assert not done.named("fault_detected"), done.explain()
    assert done.losses == reference(4, LAYOUT, 12)


def pause(run, seconds, whom=lambda process: True):
    """Stop processes of the run for ``seconds`` and let them go on, in random order, as ``scontrol suspend`` does."""
    chosen = []
    for process in of_the_run(run):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that only starts others may have ended
            chosen += [process] if whom(process) else []
    assert chosen
    for signum, wait_s in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
        random.shuffle(chosen)
        for process in chosen:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was replaced meanwhile
                process.send_signal(signum)
        time.sleep(wait_s)


def of_the_run(run):
    root = psutil.Process(run.process.pid)
    return [root, *root.children(recursive=True)]


@pytest.mark.parametrize(
    "who", [pytest.param("all", marks=LONG), pytest.param("the agent", marks=LONG), "the control plane"]
)
def test_a_pause_costs_nothing_but_its_time(corpus, reference, tmp_path, who):
    run = Running(tmp_path / "run", "pretrain_gpt.py", flags(corpus, LAYOUT, 150))
    run.wait_for(lambda: run.step() >= 5)
    whom = {
        "all": lambda process: True,
        "the agent": lambda process: process.pid == run.process.pid,
        "the control plane": lambda process: process.name() == "ft-control",
    }
    try:
        pause(run, 24.0 if who == "all" else 16.0, whom[who])
        done = run.wait()
    finally:
        run.stop()
    assert done.code == 0, done.explain()
    assert not recoveries(done.events) and not done.named("fault_detected"), done.explain()
    assert not done.named("worker_lost"), done.explain()
    assert bool(done.named("control_back")) == (who == "the control plane"), done.explain()
    assert done.losses == reference(4, LAYOUT, 150)


def test_a_hang_on_a_device_is_a_stall_of_the_worker_that_is_not_there(corpus, reference, quick, tmp_path):
    options = f"{DEVICE_LIKE} {quick} --inject stall@step=6:rank=1"
    done = ft_run(tmp_path / "run", flags(corpus, LAYOUT, 12), options=options)
    assert done.code == 0, done.explain()
    (recovery,) = recoveries(done.events)
    assert (recovery.outcome, recovery.signal) == ("replaced", "stall"), done.explain()
    assert [event.rank for event in done.named("fault_detected")] == [1], done.explain()
    assert done.losses == reference(4, LAYOUT, 12)


TP = "--use-distributed-optimizer --tensor-model-parallel-size 2"
OUT_OF_STEP = "--inject out-of-step@step=6:rank=1:phase=optimizer"
"""Ranks 1 and 3 hang in the optimizer step; ranks 0 and 2 go on, and wait for them in a collective of what follows."""


def check_mismatch(done):
    """Rank 1 is known for the mismatch, and nobody was replaced for it."""
    (recovery,) = recoveries(done.events)
    assert (recovery.outcome, recovery.signal, recovery.seats) == ("in place", "standstill", []), done.explain()
    (fault,) = done.named("fault_detected")
    assert fault.rank == 1 and "mismatch: rank 1" in fault.detail["reason"], fault


@pytest.mark.long
@pytest.mark.parametrize("what", ["evaluate", "save"])
def test_a_mismatch_that_others_meet_in_an_evaluation_or_a_save_is_recovered_in_place(
    corpus, reference, quick, tmp_path, what
):
    follows = "--eval-iters 2 --eval-interval 6" if what == "evaluate" else f"--save {tmp_path}/ck --save-interval 6"
    done = ft_run(tmp_path / "run", flags(corpus, f"{TP} {follows}", 12), options=f"{quick} {OUT_OF_STEP}")
    assert done.code == 0, done.explain()
    check_mismatch(done)
    assert done.losses == reference(4, TP, 12)


def test_sigterm_while_all_wait_because_of_a_mismatch_ends_the_run_with_a_checkpoint(corpus, quick, tmp_path):
    train = flags(corpus, f"{TP} --save {tmp_path}/ck --save-interval 6", 500)
    run = Running(tmp_path / "run", "pretrain_gpt.py", train, options=f"{quick} {OUT_OF_STEP}")
    run.wait_for(lambda: run.step() >= 5)
    run.process.send_signal(signal.SIGTERM)
    done = run.wait()
    assert done.code == ENDED_EARLY, done.explain()
    check_mismatch(done)
    assert len(done.losses) < 500 and done.named("saved")[-1].step == len(done.losses), done.explain()


def test_sigterm_to_a_run_that_gets_nowhere_ends_it_and_says_that_nothing_is_saved(corpus, tmp_path):
    (tmp_path / "limits.yaml").write_text("stall_s: 2\ncollective_s: 4\nexit_s: 5\n")
    options = f"--limits {tmp_path}/limits.yaml --inject stall@step=6:rank=0,stall@step=6:rank=1"
    run = Running(tmp_path / "run", "pretrain_gpt.py", flags(corpus, "", 12), nproc=2, standby=0, options=options)
    run.wait_for(lambda: run.step() >= 5)
    run.process.send_signal(signal.SIGTERM)
    done = run.wait()
    assert done.code == 128 + signal.SIGTERM, done.explain()
    assert "Nothing more could be saved. The last committed step is 5" in done.output, done.explain()
    assert [event.detail["code"] for event in done.named("stopped")] == [128 + signal.SIGTERM], done.explain()


@pytest.mark.long
def test_a_replica_that_hangs_on_its_devices_is_restarted_and_the_others_go_on(corpus, quick, tmp_path):
    slowly = "slow@replica=0:step=2:rank=0:factor=2:for=300s"
    options = f"{DEVICE_LIKE} {quick} --inject {slowly} --inject stall@replica=1:step=5:rank=1"
    train = replica_runs.flags(corpus, "--use-distributed-optimizer", 60, batch=8)
    done = replica_runs.train(tmp_path / "run", train, replicas=2, nproc=4, options=options)
    done.check(60, 1)
    assert not done.of(0, "restarted") and len(done.of(1, "restarted")) == 1, done.explain()
    assert [event.detail["signal"] for event in done.of(1, "fault_detected")] == ["stall"], done.explain()


@pytest.mark.long
def test_a_checkout_of_megatron_lm_is_protected_against_hangs_on_devices(quick, tmp_path):
    script = checkouts.tree("0.16") / "pretrain_gpt.py"
    plain, _ = checkouts.plain(script, TWO_STAGES, tmp_path / "plain")
    options = f"--standby 1 {DEVICE_LIKE} {quick} --inject stall@step=4:rank=2"
    done = checkouts.protected(script, TWO_STAGES, tmp_path / "run", options)
    assert done.returncode == 0 and done.stdout.count("-- recovery ") == 1, done.stdout[-5000:]
    assert of_run(tmp_path / "run") == of_steps(plain)


UNEVEN = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import own_trainer, torch
import torch.distributed as dist

real = own_trainer.train_step

def train_step(model, optimizer, step):
    if step == 3 and dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))  # nobody else calls it
    return real(model, optimizer, step)

own_trainer.train_step = train_step
own_trainer.main()
"""


@pytest.mark.long
def test_an_operation_that_only_some_ranks_call_ends_the_run(tmp_path, jobs):
    (tmp_path / "uneven.py").write_text(UNEVEN)
    jobs.append(job := Job(tmp_path, ["--run-dir", "run", "--nproc-per-node", "2", "uneven.py", "--steps", "6"]))
    assert job.wait(180) == 1
    said = job.text()
    assert "training has stopped 3 times after committed step 3" in said, said
    assert "waited in" in said and "all workers wait" in said
