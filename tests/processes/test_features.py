"""Every option that changes the computation trains: the loss is finite and falls."""

import math

import pytest
import small_runs as runs

FEATURES = {
    "gqa-qknorm-rmsnorm-swiglu": (
        2,
        "--group-query-attention --num-query-groups 2 --qk-layernorm --normalization RMSNorm --swiglu "
        "--disable-bias-linear --add-qkv-bias --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "learned-positions-tied-squared-relu": (
        2,
        "--position-embedding-type learned_absolute --squared-relu --pipeline-model-parallel-size 2 "
        "--use-cpu-initialization --apply-query-key-layer-scaling",
    ),
    "no-positions-geglu-masks": (
        1,
        "--position-embedding-type none --quick-geglu --reset-attention-mask --reset-position-ids --eod-mask-loss",
    ),
    "rope-scaled-interleaved": (1, "--use-rope-scaling --rotary-interleaved --rotary-percent 0.5 --rotary-base 5000"),
    "uneven-stages": (
        2,
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
    ),
    "embedding-counts-as-a-layer": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers 2 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
    ),
    "tp-pp-dp-order": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"),
    "two-optimizer-instances": (
        4,
        "--use-distributed-optimizer --overlap-grad-reduce --num-distributed-optimizer-instances 2 --bf16",
    ),
    "buckets": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-num-buckets 3 "
        "--no-align-grad-reduce",
    ),
    "per-token-loss": (2, "--calculate-per-token-loss --cross-entropy-loss-fusion"),
    "bf16-grads-in-bf16": (2, "--bf16 --grad-reduce-in-bf16 --attention-softmax-in-fp32"),
    "schedule": (1, "--lr-decay-style cosine --lr-warmup-iters 1 --decoupled-lr 5e-3 --decoupled-min-lr 0"),
    "sgd-deterministic": (1, "--optimizer sgd --lr 0.3 --deterministic-mode"),
    "selective-recompute": (2, "--recompute-activations --tensor-model-parallel-size 2 --hidden-dropout 0.1"),
    "block-recompute-distributed": (
        2,
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2 "
        "--distribute-saved-activations --tensor-model-parallel-size 2",
    ),
    "moe-alltoall-shared": (
        2,
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --swiglu "
        "--disable-bias-linear --moe-shared-expert-intermediate-size 32 --moe-z-loss-coeff 1e-3 "
        "--moe-aux-loss-coeff 1e-2 "
        "--moe-router-dtype fp32 --moe-layer-freq [0,1,0,1]",
    ),
    "moe-capacity-tp": (
        4,
        "--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity --moe-token-dispatcher-type alltoall "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --expert-tensor-parallel-size 1",
    ),
    "moe-sinkhorn": (
        1,
        "--num-experts 4 --disable-bias-linear --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
    ),
    "moe-expert-bias": (
        1,
        "--num-experts 4 --disable-bias-linear --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-load-balancing-type none",
    ),
    "interleaved-groups": (
        2,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
    ),
    "mock": (1, "--mock-data"),
}


EVERY_TIME = (
    *("gqa-qknorm-rmsnorm-swiglu", "uneven-stages", "two-optimizer-instances", "per-token-loss"),
    *("moe-alltoall-shared", "interleaved-groups"),
)
"""Features of the default tier: one each of attention, stages, optimizer, loss, experts and schedule."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.long) for name in FEATURES]
)
def test_it_trains(name, ranks, corpus, tmp_path):
    world_size, extra = FEATURES[name]
    data = "" if "--mock-data" in extra else f"--data-path {corpus}"
    command = f"{runs.BASE} --train-iters 8 {data} {extra} --metrics-file {tmp_path}/m.jsonl"
    ranks(runs.run, world_size, command)
    steps = runs.metrics(tmp_path / "m.jsonl")
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert min(step["loss"] for step in steps[4:]) < steps[0]["loss"]
