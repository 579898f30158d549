"""Saving while training goes on: the checkpoint is that of the step it was asked for, and costs training little."""

import time
from pathlib import Path

import pytest
from test_checkpoint_faults import _slow_writer
from test_checkpoint_gpt import Run, Shape

from megatron.ft_trainer.checkpointing import inventory
from megatron.ft_trainer.checkpointing.channel import InThread, Progress, finish


def _save_both_ways(folder: str, shape: Shape) -> dict:
    """Saves the same step in the foreground and, while 3 more steps are trained, in the background."""
    from megatron.ft_trainer.arguments.topics import CheckpointOptions
    from megatron.ft_trainer.checkpointing.checkpointer import Checkpointer

    run = Run(shape, save=f"{folder}/sync")
    layout, run_info = run.checkpointer._layout, run.checkpointer._run
    options = CheckpointOptions(save=f"{folder}/async", async_save=True)
    background = Checkpointer(options, layout=layout, run_info=run_info, log=lambda text: None)
    run.train(2)
    assert run.save()
    before = run.digest()
    _slow_writer(1.0)
    assert background.save(run.state, run.chunks, run.optimizer, run.scheduler)
    run.train(3)
    running = background.last_outcome is None
    started = time.perf_counter()
    background.maybe_finalize()
    polled = time.perf_counter() - started
    background.close()
    started = time.perf_counter()
    for _ in range(100):
        run.checkpointer.maybe_finalize()
    idle = (time.perf_counter() - started) / 100
    changed = run.digest() != before
    run.close()
    return {"running": running, "changed": changed, "polled": polled, "idle": idle}


@pytest.mark.alone
def test_async_equals_sync_bit_for_bit(ranks, tmp_path):
    for shape in (Shape(pp=2), Shape(bf16=True)):
        folder = tmp_path / str(hash(shape))
        for result in ranks(_save_both_ways, 2, str(folder), shape):
            assert result["running"] and result["changed"]
            assert result["polled"] < 0.1 and result["idle"] < 1e-4
        sync, background = (_tensors(folder / name / "iter_0000002") for name in ("sync", "async"))
        assert background == sync and len(sync) >= 3


def _tensors(checkpoint: Path) -> dict:
    files = inventory.read_manifest(checkpoint).files
    assert inventory.problems(checkpoint, files) == []
    return {name: record for name, record in files.items() if name.endswith(".distcp") or name == "common.pt"}


def _save_every_step(folder: str) -> list:
    run = Run(Shape(), save=folder, async_save=True, keep_last=2)
    for _ in range(4):
        run.train(1)
        assert run.save()
        assert run.save(), "a step that is already being saved is not saved again"
        run.checkpointer.maybe_finalize()
    run.close()
    return run.messages


def test_saves_that_overtake_each_other_are_finished_in_order(ranks, tmp_path):
    messages, _ = ranks(_save_every_step, 2, str(tmp_path))
    assert [m.split(" saved")[0] for m in messages] == [f"checkpoint: step {i}" for i in (1, 2, 3, 4)]
    assert [e.step for e in inventory.scan(tmp_path)] == [3, 4]


def _abort(folder: str) -> int:
    run = Run(Shape(), save=folder, async_save=True)
    run.train(1)
    _slow_writer(60)
    run.save()
    started = time.monotonic()
    run.checkpointer.close(abort=True)
    assert time.monotonic() - started < 5
    return len(list(Path(folder).glob("*.partial")))


def test_abort_waits_for_nobody_and_leaves_no_process(ranks, tmp_path):
    assert ranks(_abort, 2, str(tmp_path)) == [1, 1]


def test_progress_waits_only_when_it_may():
    gate = []

    def steps():
        work = InThread(lambda: time.sleep(0.2) or "slept")
        yield work
        gate.append(work.result)
        return len(gate)

    progress = Progress(steps())
    assert not progress.advance(blocking=False) and gate == []
    assert progress.advance(blocking=True) and gate == ["slept"] and progress.result == 1
    assert finish(steps()) == 2
