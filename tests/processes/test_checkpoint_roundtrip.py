"""What comes back from a checkpoint: everything, bit for bit, in the same layout; the model in any other."""

import pytest
from checkpoint_gpt import Run, Shape


def _save_and_go_on(shape: Shape, folder: str, **options):
    run = Run(shape, save=folder, **options)
    run.train(2)
    assert run.save()
    saved = run.digest()
    losses = run.train(2)
    out = {"saved": saved, "losses": losses, "end": run.digest(), "evaluated": run.evaluate()}
    run.close()
    return out


def _resume(shape: Shape, folder: str):
    run = Run(shape, load=folder, seed=99)
    report = run.load()
    loaded = run.digest()
    losses = run.train(2)
    out = {"saved": loaded, "losses": losses, "end": run.digest(), "evaluated": run.evaluate()}
    run.close()
    return out, report.rng, report.optimizer


@pytest.mark.newest
@pytest.mark.parametrize(
    "shape", [Shape(tp=2, pp=2), pytest.param(Shape(pp=2), marks=pytest.mark.long)], ids=["tp2pp2", "pp2dp2"]
)
def test_resume_is_bit_exact(ranks, tmp_path, shape):
    before = ranks(_save_and_go_on, 4, shape, str(tmp_path))
    after = ranks(_resume, 4, shape, str(tmp_path))
    for uninterrupted, (resumed, rng, optimizer) in zip(before, after, strict=True):
        assert resumed == uninterrupted
        assert (rng, optimizer) == ("restored", True)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


@pytest.mark.parametrize(
    "shape, any_layout",
    [
        (Shape(), False),
        (Shape(distributed_optimizer=False), True),
        (Shape(tp=2, bf16=True), True),
        (Shape(tp=2, ep=2, experts=4), True),
        (Shape(bf16=True, offloaded=True), False),
        (Shape(bf16=True, offloaded=True), True),
    ],
    ids=["dp-reshardable", "replicated-optimizer", "bf16", "experts", "offloaded", "offloaded, any layout"],
)
def test_other_kinds_resume_bit_exactly(ranks, tmp_path, shape, any_layout):
    world_size = 4 if shape.experts else 2
    options = {"dist_ckpt_optim_fully_reshardable": any_layout}
    before = ranks(_save_and_go_on, world_size, shape, str(tmp_path), **options)
    after = ranks(_resume, world_size, shape, str(tmp_path))
    assert [resumed for resumed, *_ in after] == before


PLAIN = {"dropout": 0.0}


@pytest.mark.parametrize(
    "saved, loaded",
    [
        (Shape(tp=2, pp=2, **PLAIN), Shape(**PLAIN)),
        (Shape(**PLAIN), Shape(tp=2, pp=2, **PLAIN)),
        (Shape(pp=2, vpp=2, **PLAIN), Shape(tp=2, **PLAIN)),
        (Shape(ep=2, experts=4, **PLAIN), Shape(ep=1, experts=4, **PLAIN)),
        (Shape(tp=2, pp=2, distributed_optimizer=False, **PLAIN), Shape(distributed_optimizer=False, **PLAIN)),
    ],
    ids=["to-dp4", "from-dp4", "interleaved-to-tp2", "ep2-to-ep1", "replicated-optimizer"],
)
def test_resharding_keeps_the_loss(ranks, tmp_path, saved, loaded):
    before = ranks(_save_and_go_on, 4, saved, str(tmp_path))
    after = ranks(_resume, 4, loaded, str(tmp_path))
    expected = next(r["evaluated"] for r in before if r["evaluated"])
    assert {len(r["evaluated"]) for r, *_ in after} <= {0, 4}
    for resumed, rng, optimizer in after:
        assert optimizer
        assert rng == "reseeded"
        # Two training steps after the load: weights, optimizer state and schedule all have to be right.
        if resumed["evaluated"]:
            assert resumed["evaluated"] == pytest.approx(expected, rel=2e-5)
