"""A lost stage's parameters, optimizer, schedule and position, made from its neighbours on a real model of core."""

import math

import numpy
import pytest
import small_runs as runs
from checkfree_jobs import Keeper, assemble

STEPS = 2


def rebuilt_in_the_middle(flags: str) -> dict:
    """Trains, loses the middle stage's state, rebuilds it and trains on; what this rank has seen of it."""
    import torch
    import torch.distributed as dist

    from ft.job.messages import Repair
    from ft.job.parts import Neighbours
    from megatron.core import parallel_state
    from megatron.ft_trainer.loop import train_step

    job, _ = assemble(flags)
    kept = Keeper(job)
    trainee, subject, keeper, position = job.trainee, kept.subject, kept.rebuilder, kept.position
    for _ in range(STEPS):
        report = train_step(job)
        keeper.committed(job.state.step)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    beside = dist.get_world_size() // job.layout.pp
    lost = {r: Neighbours(r - beside, r + beside) for r in range(beside, 2 * beside)}
    order = Repair(1, STEPS, [], [], {}, {}, lost)
    lr = trainee.optimizer.param_groups[0]["lr"]
    seen = {"stage": stage, "norms": keeper.kept["norms"], "grad_norm": report.grad_norm}

    def blocks():
        return [{name: t.float().numpy().copy() for name, t in b.items()} for b in keeper._blocks.get()]

    subject.publish_parameters()  # as in a recovery: with --overlap-param-gather they are on their way
    seen["neighbour"] = blocks()
    for _ in range(2):  # a second time, because the first was interrupted
        subject.abandon_step()
        if stage == 1:
            for parameter in trainee.chunks[0].parameters():
                parameter.data.fill_(float("nan"))
            job.state.step = 0
            at, how = keeper.rebuild(STEPS, lost[dist.get_rank()])
            subject.publish_parameters()
            position.set(at)
            seen |= {"how": how, "event": [event for event in kept.told if event[0] == "stage_rebuilt"]}
        else:
            envelope = subject.state(position.get()).envelope
            keeper.lend(order, envelope)
        keeper.learn(order)
    seen["rebuilt_at"] = job.state.extra["checkfree"]
    seen["rebuilt"], seen["step"], seen["kept"] = blocks(), job.state.step, keeper.kept
    group = trainee.optimizer.param_groups[0]
    seen["lr"] = [lr, group["lr"]]
    seen["moments"] = max(
        float(value.abs().max())
        for part in getattr(trainee.optimizer, "chained_optimizers", [trainee.optimizer])
        for held in part.optimizer.state.values()
        for key, value in held.items()
        if isinstance(value, torch.Tensor)
    )
    seen["loss"] = train_step(job).loss
    seen["after"] = blocks()
    group["max_lr"] = trainee.scheduler.max_lr  # as rank 0's, which a checkpoint has for all
    kept.another().begins(job.state.step)
    seen["resumed"] = group["max_lr"] / trainee.scheduler.max_lr
    return seen


SHAPE = "--num-layers 6 --pipeline-model-parallel-size 3 --ft-hot-swap --ft-checkfree"


LAYOUTS = {
    "float32": (3, "--ft-checkfree-lr-factor 1.5"),
    "tensor parallel": (6, "--use-distributed-optimizer --bf16 --tensor-model-parallel-size 2 --sequence-parallel"),
    "data parallel": (6, "--use-distributed-optimizer --bf16 --overlap-grad-reduce --overlap-param-gather"),
    "interleaved": (3, "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 12"),
    "experts": (
        6,
        "--use-distributed-optimizer --num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear "
        "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    ),
}


@pytest.mark.parametrize(("nproc", "extra"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_middle_stage_is_its_neighbours_mean_and_stays_so_at_the_next_step(nproc, extra, ranks, corpus):
    flags = f"{runs.BASE} --data-path {corpus} {SHAPE} {extra}"
    seen = ranks(rebuilt_in_the_middle, nproc, flags)
    per = nproc // 3
    assert any("expert_bias" in name for name in seen[0]["neighbour"][0]) == ("expert-bias" in extra)
    norms = seen[0]["norms"]
    assert all(one["norms"] == norms for one in seen), "every rank knows every stage's norm"
    assert math.sqrt(sum(n * n for n in norms)) == pytest.approx(seen[0]["grad_norm"], rel=1e-5)
    share = (norms[2] + 1e-4) / (norms[0] + norms[2] + 2e-4)
    factor = 1.5 if "factor" in extra else 1.1
    rounding = 2**-8 if "bf16" in extra else 1e-6
    for rank in range(per, 2 * per):
        one, before, after = seen[rank], seen[rank - per]["neighbour"], seen[rank + per]["neighbour"]
        assert len(one["rebuilt"]) == 2 and one["step"] == STEPS
        for made, a, b in zip(one["rebuilt"], before, after, strict=True):
            for name in made:
                numpy.testing.assert_allclose(
                    made[name], (1 - share) * a[name] + share * b[name], rtol=rounding, atol=1e-7
                )
        assert one["how"] == {
            "owned": f"rebuilt:{rank - per}+{rank + per}",
            "replicated": f"rebuilt:{rank - per}+{rank + per}",
        }
        assert one["kept"] == {"norms": norms}
        assert one["moments"] == 0.0
        assert one["lr"][1] == pytest.approx(factor * one["lr"][0]), "a second rebuild does not compound"
        assert one["resumed"] == pytest.approx(factor), "a resumed run goes on with it"
        moved = [abs(x[n] - y[n]).max() for x, y in zip(one["rebuilt"], one["after"], strict=True) for n in x]
        assert 0 < max(moved) < 0.05, "a step of Adam moves what was rebuilt, not what was there before"
    assert all(one["rebuilt_at"] == {"stages": 3, "rebuilt_at": {"1": STEPS}} for one in seen)
    assert all(math.isfinite(one["loss"]) for one in seen if one["stage"] == 2)
    event = seen[per]["event"][0][1]
    assert (event["stage"], event["step"], event["strategy"]) == (1, STEPS, "weighted")
    assert event["weights"] == pytest.approx([1 - share, share])


@pytest.mark.on_ranks(3)
def test_what_is_lent_arrives_bit_for_bit(seed):
    import torch
    import torch.distributed as dist

    from ft.systems.checkfree.rebuilder import borrow, lend

    def made(rank):
        rng = torch.Generator().manual_seed(seed + rank)
        return [
            {
                "a": torch.randn(3, 5, generator=rng).to(torch.bfloat16),
                "b": torch.randn(7, generator=rng),
                "c": torch.randint(9, (1,), generator=rng),
                "none": torch.empty(0),
            }
            for _ in range(2)
        ]

    world, rank = dist.group.WORLD, dist.get_rank()
    if rank != 1:
        lend([1], world, made(rank), {"of": rank, "note": "é"})
        return
    for lender, (blocks, envelope) in zip((0, 2), borrow([0, 2], world, torch.device("cpu")), strict=True):
        assert envelope == {"of": lender, "note": "é"}
        for block, wanted in zip(blocks, made(lender), strict=True):
            assert block.keys() == wanted.keys() and all(torch.equal(block[n], wanted[n]) for n in wanted)
