"""A Megatron-LM checkout's own trainer under ``ft run``: runs that end early, and the loss of a whole node.

The checkouts are found by ``megatron_lm_trees``; without them the tests are skipped.
"""

import os
import signal

import megatron_lm_trees as checkouts
import pytest
from ft_runs import Finished, Nodes, Running, ft_run
from test_megatron_lm import of_run, of_steps

from ft.base.errors import ENDED_EARLY, NOT_SAVED
from ft.record.run import load

TINY = (
    f"{checkouts.BASE} --num-layers 2 --use-distributed-optimizer --mock-data --global-batch-size 8 --eval-iters 1 "
    "--eval-interval 100000 --log-interval 1 --train-iters 5000 --lr-decay-iters 5000 --save-interval 100000"
)
"""Flags of a run that lasts longer than any test."""
NODES = (
    f"{checkouts.BASE} --num-layers 4 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --mock-data "
    "--use-distributed-optimizer --global-batch-size 8 --eval-iters 1 --eval-interval 100 --log-interval 1 "
    "--train-iters 40 --lr-decay-iters 40"
)
"""Data-parallel peers are on different nodes, so that no node holds a state and its only copy."""
LIMIT_S = 400.0


def start(folder, flags: str, options: str = "") -> Running:
    """Start a run of two ranks and a standby that saves into the folder ``save`` beside its own."""
    flags = f"{TINY} {flags} --save {folder.with_name('save')} --ft-hot-swap"
    return Running(folder, str(checkouts.tree("0.16") / "pretrain_gpt.py"), flags, nproc=2, options=options)


def check_end(done: Finished, recoveries: int, code: int = 0) -> None:
    """The run has ended with this code and a checkpoint of its last step, and says so."""
    assert done.code == code and done.output.count("-- recovery ") == recoveries, done.explain()
    (end,) = done.named("finished")
    saved = [path.name for path in done.folder.with_name("save").glob("iter_*")]
    assert saved == [f"iter_{end.step:07d}"] and len(done.losses) == end.step, done.explain()
    assert [event.step for event in done.named("saved")] == [end.step]


@pytest.mark.long
@pytest.mark.parametrize("ends", ["--exit-interval 4", "--exit-duration-in-mins 1"])
def test_a_run_that_the_trainer_ends_early_is_saved_after_a_recovery(tmp_path, ends):
    run = start(tmp_path / "run", ends, "--inject kill@step=3:rank=0:phase=backward")
    check_end(run.wait(LIMIT_S), recoveries=1)


@pytest.mark.long
def test_sigterm_ends_a_run_with_a_checkpoint(tmp_path):
    run = start(tmp_path / "run", "--exit-signal-handler")
    run.wait_for(lambda: run.step() >= 3, LIMIT_S)
    run.process.send_signal(signal.SIGTERM)
    done = run.wait(LIMIT_S)
    check_end(done, recoveries=0, code=ENDED_EARLY)
    assert "exiting program after receiving SIGTERM" in done.output
    assert load(done.folder).state == f"ended early (SIGTERM) at {len(done.losses)} of 5000"


@pytest.mark.long
@pytest.mark.parametrize("small_disk", ["200k"], indirect=True)
@pytest.mark.parametrize("how", ["", "--async-save"], ids=["sync", "async"])
def test_a_last_save_that_fails_ends_the_run_with_a_state_and_a_code(tmp_path, small_disk, how):
    script, shape = str(checkouts.tree("0.16") / "pretrain_gpt.py"), TINY.replace("5000", "4")
    done = ft_run(tmp_path / "run", f"{shape} {how} --save {small_disk} --ft-hot-swap", script=script, nproc=2)
    assert done.code == NOT_SAVED and not done.named("restarted"), done.explain()
    assert load(done.folder).state == "finished, not saved"
    assert {event.step for event in done.named("save_failed")} == {4} and not done.named("saved"), done.explain()


@pytest.mark.long
def test_a_standby_node_takes_a_lost_nodes_place(tmp_path):
    script = checkouts.tree("0.16") / "pretrain_gpt.py"
    plain, _ = checkouts.plain(script, NODES, tmp_path / "plain")
    with Nodes(tmp_path, f"{NODES} --ft-hot-swap", 3, script=str(script)) as nodes:
        nodes[0].wait_for(lambda: nodes[0].step() >= 3, LIMIT_S)
        os.kill(nodes[1].process.pid, signal.SIGKILL)
        done = nodes[0].wait(LIMIT_S)
        assert done.code == 0 and nodes[2].process.wait(180) == 0, done.explain()
    assert not done.named("restarted"), done.explain()
    seats = done.named("epoch_opened")[-1].detail["seats"].values()
    assert {seat.split(".")[0] for seat in seats} == {"n0", "n2"}, done.explain()
    assert of_run(done.folder) == of_steps(plain)
