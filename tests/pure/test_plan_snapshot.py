"""`ft plan snapshot`: sizes against megatron-core's own objects, probabilities against enumeration and chance."""

import itertools
import json
import math

import pytest
from closed_forms import formula_1

from ft.cli import main
from ft.lab.plan.snapshot.answer import Failures, risk
from ft.lab.plan.snapshot.command import data_parallel_groups
from ft.lab.plan.snapshot.shards import from_flags, shards
from ft.state.placement.assign import place
from megatron.ft_trainer.arguments import layout, parse

MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 500 --seq-length 32 "
ZERO = "--use-distributed-optimizer "
SIZES = {
    "pp2, tied, learned positions": "--pipeline-model-parallel-size 2 " + ZERO,
    "tp2, gqa, swiglu, rmsnorm, untied, no biases": (
        "--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm "
        "--untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope " + ZERO
    ),
    "bf16, replicated optimizer": "--pipeline-model-parallel-size 2 --bf16",
    "experts, ep2, pp2": "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear "
    "--pipeline-model-parallel-size 2 --moe-layer-freq [0,1,0,1] " + ZERO,
    "experts, replicated optimizer": "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear",
    "interleaved, query norms": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--qk-layernorm --bf16 " + ZERO,
    "no data parallelism": "--pipeline-model-parallel-size 4",
}


# --- sizes -----------------------------------------------------------------------------------------------------------


def snapshot_bytes(flags: str) -> dict:
    """What a real rank's snapshot is made of."""
    import torch.distributed as dist

    from ft.state.snapshot.capture import Capture
    from megatron.core import parallel_state
    from megatron.ft_trainer import model
    from megatron.ft_trainer.arguments import check, parse
    from megatron.ft_trainer.initialize import init_model_parallel, seed_everything

    options = parse(f"{flags} --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 1 --mock-data")
    grid = check(options, dist.get_world_size(), has_te=False)
    init_model_parallel(options.core, grid)
    seed_everything(options)
    trainee = model.build(options, grid, 512)
    alone = parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1
    state = Capture(trainee.chunks, trainee.optimizer, trainee.scheduler, alone=alone).state({})
    sizes = [sum(t.numel() * t.element_size() for t in part.values()) for part in (state.owned, state.replicated)]
    parallel_state.destroy_model_parallel()
    return {"stage": 0 if grid.pp == 1 else parallel_stage(grid), "owned": sizes[0], "replicated": sizes[1]}


def parallel_stage(grid) -> int:
    import torch.distributed as dist

    return dist.get_rank() // (grid.world_size // grid.pp)


@pytest.mark.parametrize("name", SIZES)
def test_bytes_are_those_of_real_snapshots(name, ranks):
    flags = MODEL + SIZES[name]
    options = parse(flags + "--padded-vocab-size 512" if flags.endswith(" ") else flags + " --padded-vocab-size 512")
    grid = layout(options.core, options.core.num_layers, 4)
    predicted = shards(from_flags(options, grid), options, grid)
    real = ranks(snapshot_bytes, 4, flags, timeout=120)
    for stage, expected in enumerate(predicted):
        here = [rank for rank in real if rank["stage"] == stage]
        small = 4 * 100  # step counters
        assert sum(rank["owned"] for rank in here) == pytest.approx(len(here) * expected.owned, abs=small * len(here))
        assert all(rank["replicated"] == pytest.approx(expected.replicated, abs=small) for rank in here)


def test_groups_are_megatron_cores():
    from megatron.core.parallel_state import RankGenerator

    for tp, cp, dp, pp in itertools.product((1, 2), (1, 2), (1, 3), (1, 2)):
        for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
            options = parse(f"--tensor-model-parallel-size {tp} --context-parallel-size {cp}").core
            options.pipeline_model_parallel_size = pp
            grid = layout(options, pp, tp * cp * dp * pp)
            core = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
            found = data_parallel_groups(grid, order.endswith("dp"))
            assert found.reshape(-1, dp * cp).tolist() == core.get_ranks("dp-cp")
            for pipeline in core.get_ranks("pp"):
                assert all(rank in found[stage] for stage, rank in enumerate(pipeline))


# --- probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2])
def test_formula_1_bounds_what_enumeration_finds(k):
    """All states of nodes that fail independently: the bound holds, and is close where failures are rare."""
    size = 8
    holders = {rank: [(rank + d) % size for d in range(1, k + 1)] for rank in range(size)}
    for p in (1e-3, 0.05, 0.3):
        exact = 0.0
        for down in itertools.product((False, True), repeat=size):
            if any(down[owner] and all(down[h] for h in held) for owner, held in holders.items()):
                exact += math.prod(p if d else 1 - p for d in down)
        bound = formula_1(size, p, k)
        assert exact <= bound
        if p == 1e-3:
            assert exact == pytest.approx(bound, rel=0.02)


def racks(nodes: int, per_rack: int, gpus: int = 1):
    return {r: {"node": f"n{r // gpus}", "rack": f"r{r // gpus // per_rack}"} for r in range(nodes * gpus)}


def test_rare_independent_failures_come_to_formula_1_times_who_may_be_first():
    where, window = racks(8, 1), 10.0
    where = {rank: {"node": kinds["node"]} for rank, kinds in where.items()}
    for k in (1, 2, 3):
        holders = place(where, [list(range(8))], k)
        found = risk(where, holders, Failures({"node": 1e6}, window))
        assert found.rate == pytest.approx(8 / 1e6)
        per_window = found.rate * window * found.per_failure
        assert per_window == pytest.approx((k + 1) * formula_1(len(sets(where, holders)), window / 1e6, k), rel=1e-3)


def sets(where, holders) -> set:
    return {frozenset(where[r]["node"] for r in (owner, *held)) for owner, held in holders.items()}


def test_ranks_of_one_node_with_holders_on_one_node_are_lost_together():
    where = racks(4, 1, gpus=4)
    groups = [[r, r + 4, r + 8, r + 12] for r in range(4)]
    where = {rank: {"node": kinds["node"]} for rank, kinds in where.items()}
    many = risk(where, place(where, groups, 1), Failures({"node": 1e6}, 10.0))
    one = {r: {"node": f"n{r}"} for r in range(4)}
    assert many.per_failure == pytest.approx(
        risk(one, place(one, [[0, 1, 2, 3]], 1), Failures({"node": 1e6}, 10.0)).per_failure
    )


def test_a_rack_with_owner_and_copy_loses_state_by_itself():
    where = racks(4, 2)
    failures = Failures({"node": 1e6, "rack": 1e6}, 10.0)
    careless = risk(where, {0: [1], 1: [0], 2: [3], 3: [2]}, failures)
    assert careless.by_kind["rack"] == 1.0 and careless.per_failure == pytest.approx(2 / 6, rel=1e-3)
    careful = risk(where, place(where, [[0, 1, 2, 3]], 1), failures)
    assert careful.by_kind["rack"] < 1e-4 and careful.per_failure < 1e-4


@pytest.mark.parametrize("k", [1, 2])
def test_correlated_failures_against_enumeration(k):
    """Given that one component fails: all states of all others within the window, against the model's bound."""
    where = racks(6, 2)
    holders = place(where, [list(range(6))], k)
    failures = Failures({"node": 4000.0, "rack": 9000.0}, 10.0)
    found = risk(where, holders, failures)
    components = [("node", n, {f"n{n}"}) for n in range(6)] + [
        ("rack", r, {f"n{2 * r}", f"n{2 * r + 1}"}) for r in range(3)
    ]
    expected = {}
    for first in components:
        rest = [c for c in components if c is not first]
        lost = 0.0
        for states in itertools.product((False, True), repeat=len(rest)):
            down = first[2].union(*(c[2] for c, fails in zip(rest, states, strict=True) if fails))
            if any(nodes <= down and nodes & first[2] for nodes in sets(where, holders)):
                lost += math.prod(
                    failures.within(c[0]) if fails else 1 - failures.within(c[0])
                    for c, fails in zip(rest, states, strict=True)
                )
        expected.setdefault(first[0], []).append(lost)
    for kind, losses in expected.items():
        exact = sum(losses) / len(losses)
        assert exact <= found.by_kind[kind] * (1 + 1e-9)
        assert found.by_kind[kind] == pytest.approx(exact, rel=0.03)


# --- the command -----------------------------------------------------------------------------------------------------


def test_programs_get_what_follows_from_the_sizes(capsys):
    """Text has the same answer: ``conversations/plan/snapshot.txt``."""
    flags = "--nodes 64 --nodes-per-rack 4 --step-time 10s --optimizer-time 300ms --params 70B pretrain_gpt.py "
    flags += "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --use-distributed-optimizer"
    assert main(["plan", "snapshot", "--json", *flags.split()]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["parameters"] == pytest.approx(70e9)
    shard = 70e9 * 12 / 512
    for k, found in enumerate(values["copies"], 1):
        assert found["k"] == k and found["fits"] and not found["problems"]
        assert found["memory"] == pytest.approx(8 * shard * (2 + 2 * k))
        assert found["sent"] == found["received"] == pytest.approx(8 * shard * k)
        assert found["d2h"] == pytest.approx(shard)
        assert found["transfer_s"] == pytest.approx(max(shard / 25e9, 8 * shard * k / 25e9))
    assert values["copies"][0]["loss_per_month"] > 1e4 * values["copies"][1]["loss_per_month"] > 0
    without, failures = values["without"], values["copies"][0]["failures_per_month"]
    assert without["loss_per_failure"] == 1.0
    assert without["loss_per_month"] == pytest.approx(1 - math.exp(-failures))
