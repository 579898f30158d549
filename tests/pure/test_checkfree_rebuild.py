"""The rebuild of a lost stage by algebra, on planted parameters; its settings, and what swapped ends refuse."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from ft.base.errors import FallbackError, UserError
from ft.systems.checkfree.layer import settings_of
from ft.systems.checkfree.plus import ReplicatedEnds, install
from ft.systems.checkfree.rebuild import LEAST_WEIGHT, STRATEGIES, Boost, rebuild, scale, weights
from megatron.ft_trainer.arguments import check, parse


def stage(value, blocks=2, dtype=torch.float32):
    """Every parameter planted with a number that names its stage, block and name."""
    return [
        {
            "linear.weight": torch.full((3, 4), value + block, dtype=dtype),
            "linear.bias": torch.full((3,), 10 * value + block, dtype=dtype),
        }
        for block in range(blocks)
    ]


def noise(seed, blocks=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [{"w": torch.randn(16, 8, generator=generator).to(dtype)} for _ in range(blocks)]


# --- the average ------------------------------------------------------------------------------------------------------


def test_each_neighbour_is_weighted_by_its_own_norm_which_is_not_squared():
    """Norms 3 and 1: three quarters of the previous stage; squared it would be nine tenths, swapped one quarter."""
    found = rebuild(stage(8.0), stage(16.0), 3.0, 1.0)
    for block, held in enumerate(found.blocks):
        assert torch.allclose(held["linear.weight"], torch.full((3, 4), 10.0 + block), atol=1e-3)
        assert torch.allclose(held["linear.bias"], torch.full((3,), 100.0 + block), atol=1e-2)
    assert found.shares == pytest.approx((0.75, 0.25), abs=1e-4) and found.note == ""


def test_the_formula_holds_on_random_parameters_and_norms(seed):
    rng = random.Random(seed)
    for _ in range(50):
        before, after = noise(rng.randrange(1 << 31)), noise(rng.randrange(1 << 31))
        norms = rng.uniform(0, 5), 10 ** rng.uniform(-6, 6)
        a, b = norms[0] + LEAST_WEIGHT, norms[1] + LEAST_WEIGHT
        found = rebuild(before, after, *norms)
        for one, other, held in zip(before, after, found.blocks, strict=True):
            expected = (a * one["w"].double() + b * other["w"].double()) / (a + b)
            assert torch.allclose(held["w"].double(), expected, atol=1e-6)


@pytest.mark.parametrize("norms", [(math.inf, 1.0), (1.0, math.nan), (None, 1.0), (None, None)])
def test_a_norm_that_is_no_weight_makes_the_average_uniform_and_says_so(norms):
    found = rebuild(stage(8.0), stage(16.0), *norms)
    assert found.shares == (0.5, 0.5) and torch.equal(found.blocks[1]["linear.weight"], torch.full((3, 4), 13.0))
    assert "uniformly" in found.note and ("not known" if None in norms else "n") in found.note


def test_uniform_does_not_look_at_norms():
    found = rebuild(stage(8.0), stage(16.0), math.nan, 1e9, "uniform")
    assert torch.equal(found.blocks[0]["linear.bias"], torch.full((3,), 120.0)) and found.note == ""


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_it_is_rounded_once_to_the_dtype_of_the_parameter(dtype, seed):
    before, after = noise(seed, dtype=dtype), noise(seed + 1, dtype=dtype)
    share = weights(0.3, 1.1)[0][1]
    for one, other, held in zip(before, after, rebuild(before, after, 0.3, 1.1).blocks, strict=True):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert held["w"].dtype == dtype
        assert torch.equal(held["w"], torch.lerp(one["w"].to(wide), other["w"].to(wide), share).to(dtype))


def test_bfloat16_is_better_than_computed_in_bfloat16():
    before, after = noise(1, 8, torch.bfloat16), noise(2, 8, torch.bfloat16)
    share = weights(0.3, 1.1)[0]
    found = rebuild(before, after, 0.3, 1.1).blocks
    errors = {"once": 0.0, "narrow": 0.0}
    for one, other, held in zip(before, after, found, strict=True):
        exact = share[0] * one["w"].double() + share[1] * other["w"].double()
        narrow = one["w"] * share[0] + other["w"] * share[1]
        errors["once"] += (held["w"].double() - exact).abs().sum().item()
        errors["narrow"] += (narrow.double() - exact).abs().sum().item()
    assert errors["once"] < 0.8 * errors["narrow"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_both_neighbours_hold_alike_stays_bit_for_bit(strategy, seed):
    both = noise(seed, dtype=torch.bfloat16)
    for one, held in zip(both, rebuild(both, both, 0.3, 7.7, strategy).blocks, strict=True):
        assert torch.equal(one["w"], held["w"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_neighbours_stay_as_they_were_and_share_no_memory_with_the_rebuilt_stage(strategy):
    before, after = stage(8.0), stage(16.0)
    for block in rebuild(before, after, 1.0, 1.0, strategy).blocks:
        for held in block.values():
            held.fill_(-1.0)
    assert torch.equal(before[0]["linear.weight"], torch.full((3, 4), 8.0))
    assert torch.equal(after[1]["linear.bias"], torch.full((3,), 161.0))


def test_parameters_that_ask_for_gradients_are_read_without_a_graph():
    before, after = ([{"w": torch.nn.Parameter(torch.ones(2, 2))}] for _ in range(2))
    for strategy in STRATEGIES:
        assert not rebuild(before, after, 1.0, 1.0, strategy).blocks[0]["w"].requires_grad


def test_what_is_no_floating_point_number_is_the_previous_stages():
    before, after = ([{"steps": torch.tensor([count])}] for count in (3, 9))
    assert rebuild(before, after, 1.0, 1.0).blocks[0]["steps"].item() == 3


# --- a copy -----------------------------------------------------------------------------------------------------------


def test_a_copy_is_of_the_previous_stage_and_of_the_following_where_there_is_none():
    before, after = noise(1), noise(2)
    middle, first, last = (
        rebuild(*pair, None, None, "copy") for pair in [(before, after), (None, after), (before, None)]
    )
    assert torch.equal(middle.blocks[2]["w"], before[2]["w"]) and middle.shares == (1.0, 0.0)
    assert torch.equal(first.blocks[2]["w"], after[2]["w"]) and first.shares == (0.0, 1.0)
    assert torch.equal(last.blocks[2]["w"], before[2]["w"]) and last.shares == (1.0, 0.0)


# --- what cannot be rebuilt -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_adjacent_stages_lost_are_refused_with_what_is_left_to_try(strategy):
    with pytest.raises(UserError, match=r"(?s)neighbours are lost.*peer copy.*persistent checkpoint"):
        rebuild(None, None, 1.0, 1.0, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unequal_numbers_of_blocks_are_refused_with_what_is_left_to_try(strategy):
    with pytest.raises(UserError, match=r"(?s)2 and 3 transformer blocks.*peer copy.*persistent checkpoint"):
        rebuild(stage(8.0, 2), stage(16.0, 3), 1.0, 1.0, strategy)


@pytest.mark.parametrize("strategy", ["weighted", "uniform"])
def test_an_average_of_one_neighbour_is_refused(strategy):
    with pytest.raises(UserError, match=r"(?s)no previous stage.*copy"):
        rebuild(None, stage(16.0), 1.0, 1.0, strategy)
    with pytest.raises(UserError, match="no following stage"):
        rebuild(stage(16.0), None, 1.0, 1.0, strategy)


def test_blocks_that_are_not_alike_are_refused_by_name():
    before = stage(8.0)
    for change, said in (
        ({"extra": torch.ones(1)}, "extra"),
        ({"linear.bias": torch.ones(5)}, r"linear\.bias of block 1 is float32 \[3\] and float32 \[5\]"),
        ({"linear.bias": torch.ones(3, dtype=torch.bfloat16)}, "bfloat16"),
    ):
        after = stage(16.0)
        after[1] |= change
        with pytest.raises(UserError, match=said):
            rebuild(before, after, 1.0, 1.0)


def test_a_neighbour_that_is_not_finite_asks_for_the_next_source():
    after = stage(16.0)
    after[1]["linear.bias"][2] = math.nan
    with pytest.raises(FallbackError, match=r"linear\.bias of a neighbour's block 1"):
        rebuild(stage(8.0), after, 1.0, 1.0)
    assert rebuild(stage(8.0), after, 1.0, 1.0, "copy").blocks, "the other neighbour is not read"


# --- the learning rate ------------------------------------------------------------------------------------------------


def test_repeated_failures_do_not_compound():
    groups = [{"lr": 3e-4, "max_lr": 3e-4, "min_lr": 3e-5}]
    for rebuilt_at in (5, 6, 7):
        scale(groups, 3e-4, 3e-5, Boost().at(7, rebuilt_at))
    assert groups[0]["max_lr"] == pytest.approx(3.3e-4) and groups[0]["min_lr"] == pytest.approx(3.3e-5)
    assert groups[0]["lr"] == 3e-4, "the scheduler sets that itself"
    scale(groups, 3e-4, 3e-5, 1.0)
    assert groups == [{"lr": 3e-4, "max_lr": 3e-4, "min_lr": 3e-5}]


# --- settings, and what swapped ends refuse ---------------------------------------------------------------------------


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
