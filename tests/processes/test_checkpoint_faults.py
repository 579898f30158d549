"""What a save leaves behind when ranks die, disks fill up and writers are killed in the middle of it."""

import os
import signal
import time
from pathlib import Path

from checkpoint_gpt import Run, Shape
from test_checkpoint_load import _load_each
from waiting import eventually

from megatron.ft_trainer.checkpointing.inventory import (
    MANIFEST,
    TRACKER,
    newest_complete,
    problems,
    read_manifest,
    scan,
)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(point: str) -> None:
    """Arranges that this process is killed when a save gets to ``point``."""
    from torch.distributed.checkpoint import filesystem

    from megatron.ft_trainer.checkpointing import commit

    def dying(function, before: bool):
        def replaced(*args, **kwargs):
            if not before:
                function(*args, **kwargs)
            _die()

        return replaced

    if point == "half-written-file":
        whole, written = filesystem._write_item, []

        def half(*args):
            if len(written) == 4:
                _die()
            written.append(whole(*args))
            return written[-1]

        filesystem._write_item = half
    elif point in ("before-manifest", "before-tracker"):
        file = {"before-manifest": MANIFEST, "before-tracker": TRACKER}[point]
        replace = commit.files.replace
        commit.files.replace = lambda path, *args, **kwargs: (
            _die() if path.name == file else replace(path, *args, **kwargs)
        )
    else:
        owner, name = {
            "before-metadata": (filesystem.FileSystemWriter, "finish"),
            "before-rename": (commit, "move_folder"),
            "after-rename": (commit, "move_folder"),
            "while-retiring": (commit.shutil, "rmtree"),
        }[point]
        setattr(owner, name, dying(getattr(owner, name), before=point != "after-rename"))


def _save_and_die(folder: str, point: str, victim: int) -> None:
    import torch.distributed as dist

    run = Run(Shape(), save=folder, keep_last=1 if point == "while-retiring" else None)
    run.train(1)
    assert run.save()
    run.train(1)
    if dist.get_rank() == victim:
        _die_at(point)
    run.save()


# (point, the rank that dies, the newest complete checkpoint afterwards)
DEATHS = [
    ("half-written-file", 0, 1),
    ("half-written-file", 1, 1),
    ("before-metadata", 0, 1),
    ("before-manifest", 0, 1),
    ("before-rename", 0, 1),
    ("after-rename", 0, 2),
    ("before-tracker", 0, 2),
    ("while-retiring", 0, 2),
]


def test_kill_9_at_any_point_leaves_a_sound_checkpoint(ranks, tmp_path):
    names = [f"{point}-{victim}" for point, victim, _ in DEATHS]
    for name, (point, victim, _) in zip(names, DEATHS, strict=True):
        with ranks.start(_save_and_die, 2, str(tmp_path / name), point, victim) as handle:
            _wait_for_death(handle, victim)
    (loaded,) = ranks(_load_each, 1, {name: {"load": str(tmp_path / name)} for name in names})
    for name, (*_, step) in zip(names, DEATHS, strict=True):
        assert loaded[name][0] == step, name
        newest = newest_complete(scan(tmp_path / name))
        assert problems(tmp_path / name / newest.name, read_manifest(tmp_path / name / newest.name).files) == []
    # The same folder is then saved into: what the dead left is cleared away.
    again = tmp_path / "before-rename-0"
    assert list(again.glob("iter_0000002.*.partial"))
    ranks(_resume_and_save, 1, str(again))
    assert sorted(os.listdir(again)) == ["iter_0000001", "iter_0000002", "latest_checkpointed_iteration.txt"]


def _resume_and_save(folder: str) -> None:
    run = Run(Shape(), save=folder, load=folder)
    assert run.load().step == 1
    run.train(1)
    assert run.save()
    run.close()


def _wait_for_death(handle, rank: int) -> None:
    eventually(lambda: handle.exitcode(rank) is not None, "the rank was to be killed")
    assert handle.exitcode(rank) == -signal.SIGKILL


def _fill_disk(folder: str) -> dict:
    run = Run(Shape(), save=folder)
    saved = []
    for _ in range(3):
        run.train(1)
        saved.append(run.save())
    error, left = run.checkpointer.last_outcome.error, sorted(os.listdir(folder))
    losses = run.train(1)
    run.close()
    return {"saved": saved, "error": error, "left": left, "trained": len(losses), "said": run.messages}


def test_a_full_disk(ranks, small_disk):
    """The disk has room for one checkpoint, not for two."""
    results = ranks(_fill_disk, 2, str(small_disk))
    for result in results:
        assert result["saved"][0] and not result["saved"][-1]
        assert "full" in result["error"] and str(small_disk) in result["error"] and "free" in result["error"]
        complete = [name for name in result["left"] if name.startswith("iter_")]
        assert complete and not any("partial" in name for name in complete)
        assert result["trained"] > 0
    said = [r["said"] for r in results]
    assert any("FAILED" in line and "training goes on" in line for line in said[0]) and not said[1]
    newest = newest_complete(scan(small_disk))
    assert problems(small_disk / newest.name, read_manifest(small_disk / newest.name).files) == []


def _limit_one_rank(folder: str) -> list:
    import resource

    import torch.distributed as dist

    run = Run(Shape(), save=folder)
    run.train(1)
    assert run.save()
    run.train(1)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    saved = run.save()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.train(1)
    out = [saved, run.checkpointer.last_outcome.error, run.save(), sorted(os.listdir(folder))]
    run.close()
    return out


def test_one_rank_that_cannot_write_fails_the_save_everywhere(ranks, tmp_path):
    for saved, error, next_saved, left in ranks(_limit_one_rank, 2, str(tmp_path)):
        assert not saved and "rank 1" in error and "__1_0.distcp: the file is too big" in error
        assert next_saved
        assert left == ["iter_0000001", "iter_0000003", "latest_checkpointed_iteration.txt"]


def _save_in_turn(folder: str, arrived: str, go: str) -> str | None:
    """Saves step 1; makes ``arrived`` when all is written and waits for ``go``. Returns what went wrong."""
    from megatron.ft_trainer.checkpointing import commit

    whole = commit.commit

    def in_turn(*args):
        Path(arrived).touch()
        while not os.path.exists(go):
            time.sleep(0.01)
        return whole(*args)

    commit.commit = in_turn
    run = Run(Shape(), save=folder)
    run.train(1)
    run.save()
    error = run.checkpointer.last_outcome.error
    run.close()
    return error


def test_a_save_of_workers_that_were_given_up_cannot_get_into_their_successors(ranks, tmp_path):
    """A node that was cut off, or paused, in the middle of a save goes on with it while others save that step anew."""
    folder, signs = tmp_path / "saved", {name: tmp_path / name for name in ("old", "old go", "new", "new go")}

    def start(who: str):
        handle = ranks.start(_save_in_turn, 1, str(folder), str(signs[who]), str(signs[f"{who} go"]))
        eventually(signs[who].exists)
        return handle

    with start("old") as old, start("new") as new:
        signs["old go"].touch()
        assert "partial" in old.wait()[0].value
        signs["new go"].touch()
        assert new.wait()[0].value is None
    assert sorted(os.listdir(folder)) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert problems(folder / "iter_0000001", read_manifest(folder / "iter_0000001").files) == []
