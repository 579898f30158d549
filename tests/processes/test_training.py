"""The trainer end to end: resuming, resharding, ending early, what it writes."""

import contextlib
import signal
import time
from pathlib import Path

import pytest
import small_runs as runs

from ft.base.errors import ENDED_EARLY
from megatron.ft_trainer import exits


def flags(corpus: str, folder: Path, name: str, extra: str = "") -> str:
    return f"{runs.BASE} --data-path {corpus} --metrics-file {folder / name}.jsonl {extra}"


LAYOUTS = {
    "dp2-bf16-dropout": (2, "--use-distributed-optimizer --bf16 --attention-dropout 0.1 --hidden-dropout 0.1"),
    "interleaved-overlapped": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_resuming_continues_bit_for_bit(name, ranks, corpus, tmp_path):
    world_size, layout = LAYOUTS[name]
    layout += " --train-iters 6"
    ranks(runs.run, world_size, flags(corpus, tmp_path, "whole", layout))
    saved = f"{layout} --save {tmp_path}/ck --load {tmp_path}/ck"
    first = ranks(runs.run, world_size, flags(corpus, tmp_path, "parts", f"{saved} --exit-interval 3"))
    assert first[0] == {"step": 3, "consumed": 24}
    ranks(runs.run, world_size, flags(corpus, tmp_path, "parts", saved))
    assert runs.losses(tmp_path / "parts.jsonl") == runs.losses(tmp_path / "whole.jsonl")
    assert [s["step"] for s in runs.metrics(tmp_path / "parts.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer"], ids=["replicated", "distributed"])
def test_a_checkpoint_before_the_optimizers_first_step_is_resumed_from(optimizer, ranks, corpus, tmp_path):
    """With fp16 the loss scale first falls until the gradients are finite; until then all updates are skipped."""
    scaled = f"{optimizer} --fp16 --initial-loss-scale 16777216 --hysteresis 1 --train-iters 12 --log-interval 1"
    ranks(runs.run, 2, flags(corpus, tmp_path, "whole", scaled))
    saved = f"{scaled} --save {tmp_path}/ck --load {tmp_path}/ck"
    ranks(runs.run, 2, flags(corpus, tmp_path, "parts", f"{saved} --exit-interval 2"))
    ranks(runs.run, 2, flags(corpus, tmp_path, "parts", saved))
    skipped = [step["skipped"] for step in runs.metrics(tmp_path / "parts.jsonl")]
    assert all(skipped[:2]) and not skipped[-1]
    assert runs.losses(tmp_path / "parts.jsonl") == runs.losses(tmp_path / "whole.jsonl")


def test_evaluation_leaves_training_as_it_is(ranks, corpus, tmp_path):
    dropout = "--hidden-dropout 0.1 --overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer"
    ranks(runs.run, 2, flags(corpus, tmp_path, "without", dropout))
    ranks(runs.run, 2, flags(corpus, tmp_path, "with", f"{dropout} --eval-iters 1 --eval-interval 2"))
    assert runs.losses(tmp_path / "with.jsonl") == runs.losses(tmp_path / "without.jsonl")
    evaluated = [s["step"] for s in runs.metrics(tmp_path / "with.jsonl") if "validation_loss" in s]
    assert evaluated == [2, 4]


@pytest.mark.parametrize("victims", [[2], [0, 0, 1, 1, 2, 2, 3, 3]])
def test_sigterm_finishes_the_step_saves_and_exits_with_a_code_of_its_own(victims, ranks, corpus, tmp_path):
    grid = "--pipeline-model-parallel-size 2 --use-distributed-optimizer --train-iters 100000"
    command = flags(corpus, tmp_path, "m", f"{grid} --save {tmp_path}/ck --log-interval 1")
    handle = ranks.start(runs.launch, 4, command, init=False)
    handle.wait_for_output(3, "iteration")
    for rank in victims:
        with contextlib.suppress(ProcessLookupError):  # the signals before it have ended all already
            handle.kill(rank, signal.SIGTERM)
    outcomes = handle.wait(timeout=180)
    assert [o.value for o in outcomes] == [ENDED_EARLY] * 4
    assert "SIGTERM received" in handle.output(3)
    last = runs.metrics(tmp_path / "m.jsonl")[-1]["step"]
    assert (tmp_path / "ck/latest_checkpointed_iteration.txt").read_text().strip() == str(last)


def test_a_second_sigterm_exits_at_once(ranks, corpus, tmp_path):
    handle = ranks.start(runs.slow_launch, 1, flags(corpus, tmp_path, "m", "--log-interval 1"), init=False)
    handle.wait_for_output(0, "in a long step")
    handle.kill(0, signal.SIGTERM)
    handle.wait_for_output(0, "still in it")
    time.sleep(exits.REPEAT_S)
    handle.kill(0, signal.SIGTERM)
    handle.wait(timeout=180)
    assert handle.exitcode(0) == 128 + signal.SIGTERM


def test_time_and_interval_end_a_run_whose_metrics_say_everything_about_a_step(ranks, corpus, tmp_path):
    ends = "--train-iters 9 --exit-interval 2 --log-num-zeros-in-grad --log-interval 2"
    [end] = ranks(runs.run, 1, flags(corpus, tmp_path, "m", ends))
    assert end["step"] == 2
    first = runs.metrics(tmp_path / "m.jsonl")[0]
    assert {"loss", "grad_norm", "lr", "step_time_s", "tokens_per_s"} <= first.keys()
    assert (first["step"], first["consumed_samples"]) == (1, 8)
    assert "iteration        2/       9 | consumed samples:           16 |" in ranks.output(0)
    [end] = ranks(runs.run, 1, flags(corpus, tmp_path, "m", "--exit-duration-in-mins 0"))
    assert end["step"] == 1


@pytest.mark.on_ranks(1)
def test_random_numbers_are_drawn_by_a_tracker_of_the_kind_that_the_flags_ask_for():
    from megatron.core.tensor_parallel import random as core_random
    from megatron.ft_trainer.arguments import check, parse
    from megatron.ft_trainer.initialize import init_model_parallel, seed_everything

    make, asked = core_random.initialize_rng_tracker, []

    def noting(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng, **more):
        asked.append((use_te_rng_tracker, use_cudagraphable_rng))
        make(force_reset=True)  # one of Transformer Engine, or whose states can be captured, needs a GPU

    core_random.initialize_rng_tracker = noting
    for number, flags in enumerate(("", "--cuda-graph-impl local", "--enable-cuda-graph")):
        options = parse(f"{runs.BASE} --mock-data {flags}")
        layout = check(options, 1, has_te=True)
        if number == 0:
            init_model_parallel(options.core, layout)
        seed_everything(options)
    assert asked == [(False, False), (False, True), (False, True)], asked
