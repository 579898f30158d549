"""DMR with context parallelism, whose attention communicates within a function (a planted one: no GPU is needed)."""

import dmr_jobs
import planted_context
import pytest
import small_runs as runs

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
FLAGS = f"{runs.BASE} --mock-data --num-layers 2 --global-batch-size 4 --group-query-attention --num-query-groups 2 "


def steps(more: str) -> dict:
    planted_context.plant()
    job = dmr_jobs.assemble(FLAGS + more, has_te=True)
    again = dmr_jobs.Again(job)
    found = {"off": again.step()}
    for way in ("naive", "piggyback"):
        verifier = dmr_jobs.protection(job, way)
        found[way] = [again.step() for _ in range(3)]
        found[f"{way} covers"] = verifier.engine.coverage()
    return found


@pytest.mark.parametrize("more", ["", "--tensor-model-parallel-size 2 --sequence-parallel --bf16 ", FULL])
def test_a_step_is_the_same_bit_for_bit(more, ranks):
    world = 4 if "tensor" in more else 2
    halves = ranks(steps, world, f"--context-parallel-size 2 {more}", timeout=240)
    for found in halves:
        for way in ("naive", "piggyback"):
            for step in found[way]:
                assert (step.state, step.loss, step.grad_norm) == tuple(
                    getattr(found["off"], name) for name in ("state", "loss", "grad_norm")
                ), way
            assert found[f"{way} covers"]["opaque"] and not found[f"{way} covers"]["unverified"]
    if not more:  # the planted attention is right
        [whole] = ranks(steps, 1, "")
        for half in halves:
            assert half["off"].loss == pytest.approx(whole["off"].loss, rel=1e-5)
            assert half["off"].grad_norm == pytest.approx(whole["off"].grad_norm, rel=1e-4)
