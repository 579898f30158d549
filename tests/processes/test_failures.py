"""What goes wrong is said once, clearly, and ends every rank within seconds."""

import signal
from pathlib import Path

import pytest
import small_runs as runs

PIPELINE = "--pipeline-model-parallel-size 2 --use-distributed-optimizer"


def fail_on_rank_2(flags: str) -> int:
    """``launch`` on ranks of which the third one's model cannot be built."""
    import os

    from megatron.ft_trainer import model

    if os.environ["RANK"] == "2":

        def broken(*arguments, **keywords):
            raise IndexError("no such layer")

        model.build_model = broken
    return runs.launch(flags)


def outputs(handle, world_size: int) -> str:
    return "\n".join(handle.output(rank) for rank in range(world_size))


def test_a_rank_that_fails_at_start_up_ends_all_and_is_the_only_one_heard(ranks, corpus):
    handle = ranks.start(fail_on_rank_2, 4, f"{runs.BASE} {PIPELINE} --data-path {corpus}", init=False)
    outcomes = handle.wait(timeout=180)
    assert [o.exitcode for o in outcomes] == [1, 1, 1, 1]
    text = outputs(handle, 4)
    assert text.count("Traceback") == 1
    assert "rank 2 failed: IndexError: no such layer" in text


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_killed_in_mid_run_ends_the_others(victim, ranks, corpus):
    command = f"{runs.BASE} {PIPELINE} --data-path {corpus} --train-iters 100000 --log-interval 1"
    handle = ranks.start(runs.launch, 4, command, init=False)
    handle.wait_for_output(3, "iteration       3")
    handle.kill(victim, signal.SIGKILL)
    outcomes = handle.wait(timeout=180)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    assert all(o.exitcode == 1 for o in outcomes if o.rank != victim)
    assert outputs(handle, 4).count("failed: ") <= 1


def test_bad_data_is_refused_by_one_voice(ranks, tmp_path):
    """What can be bad about data: ``tests/pure/test_data_indexed.py`` and ``tests/pure/test_data_datasets.py``."""
    corpus = runs.make_corpus(tmp_path, documents=12)
    index = Path(f"{corpus}.idx")
    index.write_bytes(index.read_bytes()[:50])
    handle = ranks.start(runs.launch, 4, f"{runs.BASE} {PIPELINE} --data-path {corpus}", init=False)
    outcomes = handle.wait(timeout=180)
    text = outputs(handle, 4)
    assert text.count("error: ") == 1 and "corpus.idx" in text and "fix: " in text, text
    assert "Traceback" not in text and all(o.value != 0 for o in outcomes)


def test_resuming_with_another_schedule_asks_which_one_is_meant(ranks, corpus, tmp_path):
    command = f"{runs.BASE} --data-path {corpus} --save {tmp_path}/ck --load {tmp_path}/ck"
    ranks(runs.run, 1, f"{command} --exit-interval 2")
    handle = ranks.start(runs.launch, 1, f"{command} --train-iters 9", init=False)
    assert [o.value for o in handle.wait(timeout=180)] != [0]
    assert "--override-opt-param-scheduler" in handle.output(0)
    assert "Traceback" not in handle.output(0)
    kept = ranks(runs.run, 1, f"{command} --train-iters 9 --use-checkpoint-opt-param-scheduler")
    assert kept[0]["step"] == 9


def test_a_diverged_run_says_so(ranks, corpus):
    handle = ranks.start(runs.launch, 2, f"{runs.BASE} --data-path {corpus} --lr 1e30 --clip-grad 0", init=False)
    handle.wait(timeout=180)
    text = outputs(handle, 2)
    assert text.count("failed: ") == 1
    assert "NonFiniteLossError" in text or "nan" in text.lower()
