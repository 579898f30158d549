"""Workers that hang or are busy, in real runs: who is replaced, and who is not."""

import megatron_lm_trees as checkouts
import pytest
import replica_runs
from ft_runs import flags, ft_run
from test_megatron_lm import TWO_STAGES, of_run, of_steps

from ft.record.recoveries import recoveries

LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2"
DEVICE_LIKE = "--preload tests.helpers.device_like"
"""Makes collectives look like NCCL's: no worker says that it waits."""


@pytest.fixture
def quick(tmp_path):
    """Return the flag for limits with which hangs are noticed soon."""
    (tmp_path / "limits.yaml").write_text("stall_s: 2\nsilent_s: 30\ncollective_s: 4\n")
    return f"--limits {tmp_path}/limits.yaml"


def test_who_holds_the_interpreter_lock_for_seconds_is_not_replaced(corpus, reference, tmp_path):
    done = ft_run(tmp_path / "run", flags(corpus, LAYOUT, 12), options="--inject gil@step=6:rank=1:for=7s")
    assert done.code == 0 and done.named("fault_injected"), done.explain()
    assert not done.named("fault_detected"), done.explain()
    assert done.losses == reference(4, LAYOUT, 12)


def test_a_hang_on_a_device_is_a_stall_of_the_worker_that_is_not_there(corpus, reference, quick, tmp_path):
    options = f"{DEVICE_LIKE} {quick} --inject stall@step=6:rank=1"
    done = ft_run(tmp_path / "run", flags(corpus, LAYOUT, 12), options=options)
    assert done.code == 0, done.explain()
    (recovery,) = recoveries(done.events)
    assert (recovery.outcome, recovery.signal) == ("replaced", "stall"), done.explain()
    assert [event.rank for event in done.named("fault_detected")] == [1], done.explain()
    assert done.losses == reference(4, LAYOUT, 12)


@pytest.mark.long
def test_a_replica_that_hangs_on_its_devices_is_restarted_and_the_others_go_on(corpus, quick, tmp_path):
    slowly = "slow@replica=0:step=2:rank=0:factor=2:for=300s"
    options = f"{DEVICE_LIKE} {quick} --inject {slowly} --inject stall@replica=1:step=5:rank=1"
    train = replica_runs.flags(corpus, "--use-distributed-optimizer", 60, batch=8)
    done = replica_runs.train(tmp_path / "run", train, replicas=2, nproc=4, options=options)
    assert done.code == 0 and not done.proof.problems(60, 1), done.explain()
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
