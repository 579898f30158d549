"""With every operator executed twice, training computes what it computes without, bit for bit; and what is computed
wrongly once is computed once more."""

import dmr_jobs
import pytest
import small_runs as runs

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 "
LAYOUTS = {
    "recomputed": (1, FULL + DROPOUT),
    "pp2": (2, "--pipeline-model-parallel-size 2 " + FULL),
    "pp2-interleaved-bf16": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --bf16 " + DROPOUT,
    ),
    "tp2-sequence-parallel-selective": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity selective " + DROPOUT,
    ),
    "dp2-overlapped-bf16": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 " + FULL,
    ),
    "dp2-replicated": (2, "--clip-grad 0.5 " + FULL),
    "experts": (
        2,
        "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 2 "
        "--disable-bias-linear --use-distributed-optimizer " + DROPOUT,
    ),
    "sgd-tied": (1, "--optimizer sgd --position-embedding-type learned_absolute " + FULL),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return runs.make_corpus(tmp_path_factory.mktemp("dmr"))


def in_every_way(flags: str) -> dict:
    """How a step comes out without DMR, naively, and with piggybacking, from the same state; two steps each."""
    job = dmr_jobs.assemble(flags)
    again = dmr_jobs.Again(job)
    found = {"off": (again.step(), again.step())}
    for way in ("naive", "piggyback"):
        dmr_jobs.protection(job, way)
        found[way] = (again.step(), again.step())
        counts = job.dmr.engine.coverage()
        found[way + " covers"] = counts
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_is_the_same_bit_for_bit(name, ranks, corpus):
    world, flags = LAYOUTS[name]
    for found in ranks(in_every_way, world, f"{runs.BASE} {flags} --data-path {corpus}", timeout=120):
        first = found["off"][0]
        for way in ("off", "naive", "piggyback"):
            for step in found[way]:
                assert (step.state, step.grad_norm) == (first.state, first.grad_norm), way
        assert set(found["naive covers"]) <= {"naive", "in windows", "early", "late", "unverified"}
        assert ("P" in found["piggyback covers"]) == ("recompute" in flags)
        assert not found["piggyback covers"]["unverified"]


class Flip:
    """Flips a bit in the result of one execution, ``times`` times."""

    def __init__(self, execution: str, phase: str, operator: str, times: int = 1):
        self.wanted, self.times, self.hit = (execution, phase, operator), times, []

    def falsify(self, execution, operator, course, tensors):
        import torch

        if self.times and (execution, course.unit.phase, operator) == self.wanted and tensors[0].numel():
            self.times -= 1
            flat = tensors[0].view(-1).view(torch.uint8)
            flat[3 % flat.numel()].bitwise_xor_(64)
            self.hit.append((course.unit.microbatch, course.layer))


def a_flip_on_one_rank(flags: str, way: str, wanted: tuple, hit_rank: int) -> dict:
    import torch.distributed as dist

    job = dmr_jobs.assemble(flags)
    again = dmr_jobs.Again(job)
    clean = again.step()
    protection = dmr_jobs.protection(job, way)
    flip = Flip(*wanted, times=1 if dist.get_rank() == hit_rank else 0)
    protection.engine.mode._disturbance = flip
    told = []
    protection._witness.mismatch = lambda step, attempt, reports, outcome: told.append((reports, outcome))
    return {"clean": clean, "after": again.step(), "told": told, "hit": flip.hit}


FLIPS = {
    "forward at once": ("naive", ("primary", "forward", "mm")),
    "forward, found by the recomputation": ("piggyback", ("primary", "forward", "native_layer_norm")),
    "the recomputation itself": ("piggyback", ("checker", "recompute", "mm")),
    "backward": ("piggyback", ("primary", "backward", "mm")),
    "gradients accumulated": ("piggyback", ("primary", "backward", "add_.Tensor")),
    "optimizer": ("piggyback", ("primary", "optimizer", "addcdiv_")),
}


@pytest.mark.parametrize("name", FLIPS)
def test_a_step_with_a_flip_is_taken_once_more_by_everybody(name, ranks, corpus):
    way, wanted = FLIPS[name]
    flags = f"{runs.BASE} {FULL} --pipeline-model-parallel-size 2 --data-path {corpus}"
    for found in ranks(a_flip_on_one_rank, 2, flags, way, wanted, 1, timeout=120):
        assert (found["after"].state, found["after"].grad_norm) == (found["clean"].state, found["clean"].grad_norm)
        ((reports, outcome),) = found["told"]
        assert set(reports) == {1} and outcome.action == "retry"
        assert any(one.at.operator == wanted[2] for one in reports[1])
