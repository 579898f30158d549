"""Flags of CheckFree: what it needs is said before anything starts."""

from types import SimpleNamespace

import pytest
import torch

from ft.base.errors import UserError
from ft.systems.checkfree.layer import settings_of
from ft.systems.checkfree.plus.ends import ReplicatedEnds
from ft.systems.checkfree.plus.pipeline import install
from megatron.ft_trainer.arguments import check, parse

GOOD = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3 "
    "--train-iters 4 --mock-data --ft-hot-swap --ft-checkfree --pipeline-model-parallel-size 4 "
)
PLUS = "--ft-checkfree-plus --global-batch-size 8"


def test_by_default_the_neighbours_are_weighted_by_their_raw_norms_and_the_rate_stays_boosted():
    def settings(extra: str):
        options = parse(f"{GOOD} {extra}")
        check(options, 4, has_te=False)
        trainer = SimpleNamespace(clip_grad=options.core.clip_grad, reseed=None, seed=1, extra={}, draws_apart=False)
        return settings_of(options.fault_tolerance, trainer)

    by_default = settings("")
    assert (by_default.strategy, by_default.norm_limit) == ("weighted", None)
    assert (by_default.boost.factor, by_default.boost.decay_steps) == (1.1, 0)
    clipped = settings("--ft-checkfree-norms clipped --clip-grad 0.5 --ft-checkfree-strategy uniform")
    assert (clipped.norm_limit, clipped.strategy) == (0.5, "uniform")


@pytest.mark.parametrize(
    ("change", "world", "problem"),
    [
        (("--ft-hot-swap", ""), 4, "--ft-checkfree needs hot-swap"),
        (("size 4", "size 2"), 2, "with 2 pipeline stage(s) of the same number of layers: none has two such"),
        (("size 4", "size 3 --decoder-first-pipeline-num-layers 2"), 3, "with 2 pipeline stage(s) of the same number"),
        (("size 4", f"size 4 {PLUS} --num-layers-per-virtual-pipeline-stage 1"), 4, "no interleaved schedule"),
        (("size 4", f"size 4 {PLUS} --decoder-first-pipeline-num-layers 2"), 4, "the same number of layers"),
        (("--ft-checkfree", "--ft-snapshot-peers 0"), 4, "--ft-snapshot-peers is 0"),
        (("size 4", "size 4 --ft-snapshot-peers -1"), 4, "--ft-snapshot-peers is -1"),
        (("size 4", "size 4 --ft-checkfree-lr-factor 0"), 4, "--ft-checkfree-lr-factor is 0"),
        (("size 4", "size 4 --ft-checkfree-lr-decay-iters -1"), 4, "--ft-checkfree-lr-decay-iters is -1"),
        (("size 4", "size 4 --ft-checkfree-most-in-flight 4"), 4, "the schedule of --ft-checkfree-plus"),
        (("size 4", f"size 4 {PLUS} --ft-checkfree-most-in-flight 3"), 4, "some stage holds 4 microbatches at once"),
        (("size 4", f"size 4 {PLUS} --bf16 --optimizer-cpu-offload"), 4, "does not set the weights of"),
        (("size 4", f"size 4 {PLUS} --mtp-num-layers 1"), 4, "--mtp-num-layers has layers behind the output layer"),
        (("size 4", f"size 4 {PLUS} --pipeline-model-parallel-layout Et|tt|tt|tttL"), 4, "the same number of layers"),
        (("size 4", "size 4 --clip-grad 0"), 4, "needs gradient norms, which are computed for clipping only"),
    ],
)
def test_what_cannot_work_is_refused(change, world, problem):
    with pytest.raises(UserError) as error:
        check(parse(GOOD.replace(*change)), world, has_te=False)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("change", "world"),
    [
        (("size 4", "size 4 --ft-snapshot-peers 0"), 4),
        (("size 4", "size 2 --ft-snapshot-peers 0"), 4),
        (("size 4", "size 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8"), 4),
        (("size 4", "size 4 --decoder-first-pipeline-num-layers 2"), 4),
    ],
    ids=["no copies", "two stages with data parallelism", "interleaved", "a first stage with fewer layers"],
)
def test_what_can_work_is_not_refused(change, world):
    check(parse(GOOD.replace(*change)), world, has_te=False)


@pytest.mark.parametrize(
    "reports",
    [
        [torch.ones(1)],
        [{"lm loss": torch.ones(2), "z loss": torch.ones(2)}],
        [{"lm loss": torch.ones(2)}, {"another loss": torch.ones(2)}],
    ],
)
def test_losses_that_swapped_ends_cannot_add_up_are_refused(reports):
    ends = object.__new__(ReplicatedEnds)
    ends.stage, ends.stages = 3, 4
    with pytest.raises(UserError, match="adds up one loss, a tensor"):
        ends.sum_losses(reports)


def test_a_model_that_is_not_built_with_swapped_ends_is_refused():
    model = torch.nn.Linear(1, 1)
    model.pre_process = True
    with pytest.raises(UserError, match="core's GPTModel, and the model is a Linear"):
        install(model, ends=None, plan=None)
