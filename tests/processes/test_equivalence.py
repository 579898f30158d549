"""With nothing enabled the trainer computes what a plain megatron-core loop does, bit for bit."""

import math

import plain_loop
import pytest
import small_runs as runs

DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.01,
    "moe_ffn_hidden_size": 128,
    "moe_router_load_balancing_type": "aux_loss",
}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}

CASES = {
    "tp1-pp1-dp1": (1, "", {}),
    "tp2-pp2-dp1": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", {"tp": 2, "pp": 2}),
    "tp1-pp2-dp2": (
        4,
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer",
        {"pp": 2, "ddp": DISTRIBUTED},
    ),
    "tp2-pp1-dp2-overlapped": (
        4,
        "--tensor-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce",
        {"tp": 2, "ddp": OVERLAPPED},
    ),
    "tp2-pp1-dp2-sequence-parallel-bf16": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --bf16",
        {"tp": 2, "config": {"sequence_parallel": True, "bf16": True, **NO_DROPOUT}},
    ),
    "moe-ep2-dp2": (
        2,
        "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2",
        {"ep": 2, "config": {**MOE, **NO_DROPOUT}},
    ),
    "interleaved-pp2-dp2": (
        4,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer",
        {"pp": 2, "vpp": 2, "ddp": DISTRIBUTED},
    ),
    "dropout-recompute-tp2": (
        2,
        "--tensor-model-parallel-size 2 --attention-dropout 0.1 --hidden-dropout 0.1 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        {
            "tp": 2,
            "config": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
                "attention_dropout": 0.1,
                "hidden_dropout": 0.1,
            },
        },
    ),
}


@pytest.mark.newest
@pytest.mark.parametrize("name", CASES)
def test_losses_equal_those_of_the_plain_loop(name, ranks, corpus, tmp_path):
    world_size, flags, changes = CASES[name]
    changes = {"config": NO_DROPOUT, **changes}
    plain = ranks(plain_loop.train, world_size, plain_loop.Setting(corpus, **changes))[-1]
    metrics = tmp_path / "metrics.jsonl"
    ranks(runs.run, world_size, f"{runs.BASE} {flags} --data-path {corpus} --metrics-file {metrics}")
    ours = runs.metrics(metrics)
    assert len(set(plain["losses"])) == len(plain["losses"]), "the plain loop does not learn"
    assert not any(map(math.isnan, plain["losses"]))
    assert [step["loss"] for step in ours] == plain["losses"]
    assert [step["grad_norm"] for step in ours] == plain["grad_norms"]
