"""CheckFree+: two stages have the embedding, and two the head: the same bits after every rebuild and every step."""

import math

import pytest
import small_runs as runs
from checkfree_jobs import Keeper, assemble

SHAPE = (
    "--pipeline-model-parallel-size 4 --num-layers 4 --global-batch-size 8 --micro-batch-size 1 --ft-hot-swap "
    "--ft-checkfree-plus "
)


def every_stage_in_turn(flags: str) -> list[dict]:
    """Loses and rebuilds one stage after the other; what this rank has of the ends after each rebuild and each step."""
    import torch.distributed as dist

    from ft.job.messages import Repair
    from ft.job.parts import Neighbours
    from megatron.ft_trainer.loop import train_step

    job, doubles = assemble(flags)
    kept, seen = Keeper(job, doubles), []
    trainee, rank, subject, keeper, position = job.trainee, dist.get_rank(), kept.subject, kept.rebuilder, kept.position

    def note(when: str) -> None:
        ends = {name: p.detach().float().numpy().tobytes() for name, p in doubles.params(trainee.chunks[0])}
        seen.append({"when": when, "ends": ends, "loss": None})

    def step() -> None:
        loss = train_step(job).loss
        keeper.committed(job.state.step)
        note(f"step {job.state.step}")
        seen[-1]["loss"] = loss

    step()
    step()
    per, last = dist.get_world_size() // 4, 3
    for lost in (0, 3, 1, 2):
        ranks = range(lost * per, (lost + 1) * per)
        before, after = (-per if lost > 0 else None), (per if lost < last else None)
        beside = {
            r: Neighbours(None if before is None else r + before, None if after is None else r + after) for r in ranks
        }
        order = Repair(1, job.state.step, [], [], {}, {}, beside)
        subject.abandon_step()
        if rank in ranks:
            for parameter in trainee.chunks[0].parameters():
                parameter.data.fill_(float("nan"))
            for group in trainee.optimizer.param_groups:
                group["lr"] = 0.0  # a new worker's, in whose schedule no step was done
            at, _ = keeper.rebuild(job.state.step, beside[rank])
        else:
            at = position.get()
            keeper.lend(order, subject.state(at).envelope)
        subject.publish_parameters()
        position.set(at)
        keeper.learn(order)
        note(f"stage {lost} rebuilt")
        step()
        step()
    return {"seen": seen, "saved": saved_and_loaded(job)}


def saved_and_loaded(job) -> dict:
    """A checkpoint of stages whose optimizers have counted differently, loaded anew: what became of the moments."""
    import torch.distributed as dist

    from ft.protection.stack import Protections
    from megatron.ft_trainer import pretrain

    trainee = job.trainee
    before = moments(trainee.optimizer)
    saved = job.checkpointer.save(job.state, trainee.chunks, trainee.optimizer, trainee.scheduler)
    assert moments(trainee.optimizer) == before, "to save changes nothing"
    again = pretrain.assemble(job.options, job.layout, 0.0, Protections.of(job.options.fault_tolerance, {}))
    dist.barrier()  # a rank that ends would cut the connections that others still make to it
    assert again.state.extra["checkfree"]["rebuilt_at"] == {"0": 2, "3": 4, "1": 6, "2": 8}
    after = moments(again.trainee.optimizer)
    off = max(
        abs(a - b) / b
        for was, now in zip(before, after, strict=True)
        for b, a in zip(was[1:], now[1:], strict=True)
        if b
    )
    return {"ok": saved, "off": off, "counted": [{was[0] for was in before}, {now[0] for now in after}]}


def moments(optimizer) -> list[tuple[float, ...]]:
    """(steps, corrected first moment, corrected second moment), as norms, of each parameter."""
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for held in (part.optimizer.state[p] for p in group["params"]):
                k, (b1, b2) = float(held["step"]), group["betas"]
                mean, square = (float(held[key].double().norm()) for key in ("exp_avg", "exp_avg_sq"))
                found.append((k, mean / (1 - b1**k), square / (1 - b2**k)))
    return found


@pytest.mark.parametrize(
    ("nproc", "extra"),
    [
        (4, "--bf16 --position-embedding-type learned_absolute"),
        (8, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (8, "--use-distributed-optimizer --bf16 --ft-checkfree-most-in-flight 4"),
    ],
    ids=["tied, replicated optimizer", "tensor parallel", "data parallel, sharded optimizer"],
)
def test_both_copies_of_embedding_and_head_stay_the_same_bits(nproc, extra, ranks, tmp_path, tmp_path_factory):
    corpus = runs.make_corpus(tmp_path_factory.mktemp("ends"))
    base = runs.BASE.replace("--untie-embeddings-and-output-weights ", "") if "learned" in extra else runs.BASE
    saving = f"--save {tmp_path}/save --load {tmp_path}/save"
    found = ranks(every_stage_in_turn, nproc, f"{base} --data-path {corpus} {SHAPE} {extra} {saving}")
    seen = [one["seen"] for one in found]
    per = nproc // 4
    for rank in range(nproc):
        stage = rank // per
        twin = rank + (per if stage in (0, 2) else -per)
        for mine, theirs in zip(seen[rank], seen[twin], strict=True):
            assert mine["ends"] and mine["ends"].keys() == theirs["ends"].keys()
            for name, held in mine["ends"].items():
                assert held == theirs["ends"][name], f"{name} of ranks {rank} and {twin}, {mine['when']}"
    if "learned" in extra:
        for one, other in zip(seen[0], seen[-1], strict=True):
            (tied,) = (held for name, held in one["ends"].items() if "word_embeddings" in name)
            assert tied in other["ends"].values(), f"embedding and head are one weight, {one['when']}"
    assert all(one["saved"]["ok"] and one["saved"]["off"] < 1e-5 for one in found), [one["saved"] for one in found]
    assert {count for one in found for count in one["saved"]["counted"][1]} == {8.0}
    assert len({count for one in found for count in one["saved"]["counted"][0]}) > 2
    losses = [one["loss"] for one in seen[-1] if one["loss"] is not None]
    assert len(losses) == 10 and all(map(math.isfinite, losses))
