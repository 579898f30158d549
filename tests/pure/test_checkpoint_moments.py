"""A checkpoint is taken for one without moments only if it has none, whatever they are called."""

import pytest

from megatron.ft_trainer.checkpointing.content import has_moments, without_moments

MODEL = ["decoder.layers.mlp.linear_fc1.weight", "optimizer.state.fp32_param.decoder.final_layernorm.weight"]


def test_main_weights_alone_are_no_moments():
    assert not has_moments(MODEL)


@pytest.mark.parametrize("key", ["optimizer.state.exp_avg.w", "optimizer.state.momentum_buffer.w", "optimizer.x.gbuf"])
def test_the_state_of_any_optimizer_counts(key):
    assert has_moments([*MODEL, key])


def test_only_the_moments_are_left_out():
    part = {"optimizer": {"state": {0: {"exp_avg": 1}}, "param_groups": [{"lr": 1}]}, "fp32_from_fp16_params": [[2]]}
    bare = {"optimizer": {"state": {}, "param_groups": [{"lr": 1}]}, "fp32_from_fp16_params": [[2]]}
    assert without_moments({0: part, 1: part}) == {0: bare, 1: bare}
    assert part["optimizer"]["state"] == {0: {"exp_avg": 1}}
