"""Flags of CheckFree: what it needs is said before anything starts."""

from types import SimpleNamespace

import pytest
import torch

from ft.base.errors import UserError
from ft.systems.checkfree.layer import settings_of
from ft.systems.checkfree.plus import ReplicatedEnds, install
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
