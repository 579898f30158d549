"""Loading from folders in every state of disrepair, and what users are told."""

import os
import shutil
from pathlib import Path

import pytest
from checkpoint_flips import poison
from checkpoint_gpt import Run, Shape
from torch.distributed.checkpoint.metadata import TensorProperties

from ft.base.errors import UserError
from megatron.core import package_info
from megatron.ft_trainer.checkpointing import commit
from megatron.ft_trainer.checkpointing.__main__ import main
from megatron.ft_trainer.checkpointing.inventory import scan


def _save_steps(folder: str, steps: int, options: dict) -> list:
    run = Run(Shape(), save=folder, **options)
    saved = []
    for _ in range(steps):
        run.train(1)
        saved.append(run.save())
    run.close()
    return saved


def _load_each(cases: dict) -> dict:
    """By name of case: the step loaded and what was passed over, or the error's class and text."""
    results = {}
    for name, case in cases.items():
        case = dict(case)
        messages: list[str] = []
        run = Run(case.pop("shape", Shape()), log=messages.append, **case)
        try:
            report = run.load()
            results[name] = (report and report.step, report and report.rejected, messages)
        except Exception as error:
            results[name] = (type(error).__name__, str(error), messages)
        run.close()
    return results


def _check_each(ranks, cases: dict) -> list[dict]:
    """Load each case on two ranks, and compare; return what each rank says.

    Args:
        cases: name -> (folder, options, the step loaded or the error's class, what is in the error's text).
    """
    said = ranks(_load_each, 2, {name: {"load": str(folder), **how} for name, (folder, how, *_) in cases.items()})
    for result in said:
        for name, (*_, found, text) in cases.items():
            assert result[name][0] == found and (not text or text in result[name][1]), (name, result[name])
    return said


@pytest.fixture(scope="module")
def saved(tmp_path_factory, _warm_ranks):
    folder = tmp_path_factory.mktemp("saved")
    assert _warm_ranks(_save_steps, 2, str(folder), 2, {}) == [[True, True]] * 2
    return folder


def _flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": (lambda c: _flip(c / "__0_0.distcp"), "__0_0.distcp is corrupt"),
    "truncated": (lambda c: os.truncate(c / "__1_0.distcp", 1000), "__1_0.distcp has 1000 bytes instead of"),
    "shard-deleted": (lambda c: (c / "__1_0.distcp").unlink(), "__1_0.distcp is missing"),
    "metadata-deleted": (lambda c: (c / ".metadata").unlink(), ".metadata is missing"),
    "common-deleted": (lambda c: (c / "common.pt").unlink(), "common.pt is missing"),
    "config-flipped": (lambda c: _flip(c / "metadata.json"), "metadata.json is corrupt"),
    "manifest-garbage": (lambda c: (c / "manifest.json").write_bytes(b"\xff\x00 nonsense"), "manifest.json: it is not"),
    "manifest-flipped": (lambda c: _flip(c / "manifest.json"), "manifest.json: it"),
    "manifest-deleted": (lambda c: (c / "manifest.json").unlink(), "manifest.json: there is none"),
    "wrong-folder": (lambda c: shutil.copy(c.parent / "iter_0000001/manifest.json", c), "it is that of step 1"),
}


def test_damage_is_named_and_the_previous_one_loaded(ranks, tmp_path, saved):
    for name, (damage, _) in DAMAGES.items():
        shutil.copytree(saved, tmp_path / name)
        damage(tmp_path / name / "iter_0000002")
    results = ranks(_load_each, 2, {name: {"load": str(tmp_path / name)} for name in DAMAGES})
    for name, (_, said) in DAMAGES.items():
        for result in results:
            step, rejected, _ = result[name]
            assert step == 1, name
            assert len(rejected) == 1 and rejected[0].startswith("iter_0000002: ") and said in rejected[0], rejected
        (message,) = results[0][name][2]
        assert said in message and "iter_0000002" in message and "iter_0000001" in message
        assert results[1][name][2] == []


def test_a_run_never_starts_afresh_because_all_its_checkpoints_are_broken(ranks, tmp_path, saved):
    both, gone, legacy, empty = (tmp_path / name for name in ("both", "gone", "legacy", "empty"))
    shutil.copytree(saved, both)
    _flip(both / "iter_0000001" / "__0_0.distcp")
    (both / "iter_0000002" / "manifest.json").unlink()
    gone.mkdir()
    (gone / "latest_checkpointed_iteration.txt").write_text("100\n")
    (legacy / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    (empty / "iter_0000003.partial").mkdir(parents=True)
    rolled_back = shutil.copytree(saved, tmp_path / "rolled-back")
    (rolled_back / "latest_checkpointed_iteration.txt").write_text("1\n")
    a_file = tmp_path / "file"
    a_file.write_text("")
    corrupt, no_folder = "iter_0000001: __0_0.distcp is corrupt", "it is a file, not a folder"
    cases = {
        "both": (both, {}, "NoUsableCheckpoint", corrupt),
        "gone": (gone, {}, "NoUsableCheckpoint", "names step 100"),
        "legacy": (legacy, {}, "NoUsableCheckpoint", "there is none, as in checkpoints of NVIDIA's trainer"),
        "file": (a_file, {}, "UserError", no_folder),
        "below-file": (a_file / "below", {}, "UserError", no_folder),
        "step-missing": (saved, {"ckpt_step": 7}, "NoUsableCheckpoint", "complete ones are of steps: 1, 2"),
        "step-broken": (both, {"ckpt_step": 1}, "NoUsableCheckpoint", corrupt),
        "step": (saved, {"ckpt_step": 1}, 1, ""),
        "rolled-back": (rolled_back, {}, 2, ""),
        "empty": (empty, {}, None, ""),
        "absent": (tmp_path / "absent", {}, None, ""),
        "must-exist": (empty, {"exit_on_missing_checkpoint": True}, "UserError", "--exit-on-missing-checkpoint"),
    }
    for rank, result in enumerate(_check_each(ranks, cases)):
        assert rank != 0 or "random weights" in result["empty"][2][0]
        assert rank != 0 or "--ckpt-step 1" in result["rolled-back"][2][0]


def test_what_does_not_fit_is_said(ranks, saved):
    replicated = Shape(distributed_optimizer=False)
    cases = {
        "hidden": ({"model": {"hidden_size": 64}}, "UserError", "hidden_size: 32 in the checkpoint, 64 in this run"),
        "vocabulary": ({"model": {"vocab_size": 91}}, "UserError", "vocab_size: 90 in the checkpoint, 91 in this run"),
        "layers": ({"model": {"num_layers": 6}}, "UserError", "num_layers: 4 in the checkpoint, 6 in this run"),
        "shapes": ({"shape": Shape(experts=4)}, "UserError", "does not fit this model"),
        "replicated": ({"shape": replicated}, "UserError", "--use-distributed-optimizer"),
        "weights-only": ({"shape": replicated, "finetune": True}, 2, ""),
        "tokenizer": ({"fingerprints": {"tokenizer": "b"}}, 2, ""),
        "finetune": ({"finetune": True}, 2, ""),
    }
    _check_each(ranks, {name: (saved, *case) for name, case in cases.items()})


@pytest.mark.on_ranks(2)
def test_finetune_takes_the_weights_only(saved):
    import torch

    run = Run(Shape(), load=str(saved), seed=5, finetune=True)
    before = torch.get_rng_state()
    report = run.load()
    kept = torch.equal(before, torch.get_rng_state())
    found = run.state.step, report.optimizer, report.rng, kept, run.scheduler.num_steps
    run.close()
    assert found == (0, False, "untouched", True, 0), found


@pytest.mark.skipif(
    hasattr(TensorProperties(), "strides") and (package_info.MAJOR, package_info.MINOR) <= (0, 19),
    reason="megatron-core up to 0.19 cannot itself list the tensors of a checkpoint with torch 2.15",
)
@pytest.mark.on_ranks(1)
def test_core_reads_it_without_us(saved):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    checkpoint = str(saved / "iter_0000002")
    common, tensors = dist_checkpointing.load_common_state_dict(checkpoint), load_plain_tensors(checkpoint)
    assert common["iteration"] == 2 and list(tensors["embedding.word_embeddings.weight"].shape) == [96, 32]
    args = vars(common["args"])
    assert args["hidden_size"] == 32 and args["world_size"] == 2 and args["consumed_train_samples"] == 8


def _as_nobody(cases: list[dict]) -> list[str]:
    """What users are told who may not; root may do everything, so it becomes somebody else for the while."""
    import torch.distributed as dist

    from ft.base.errors import UserError
    from megatron.ft_trainer.arguments.topics import CheckpointOptions
    from megatron.ft_trainer.checkpointing.checkpointer import Checkpointer

    # A store in memory: the harness's is a file, which only its owner may open.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = Run(Shape())
    said = []
    if os.getuid() == 0:
        os.seteuid(65534)
    try:
        for options in cases:
            try:
                checkpointer = Checkpointer(CheckpointOptions(**options), layout={}, run_info={})
                checkpointer.load(run.state, run.chunks, run.optimizer, run.scheduler, run.reseed)
            except UserError as error:
                said.append(str(error))
    finally:
        os.seteuid(os.getuid())
    return said


def test_permissions(ranks, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    ((load, save),) = ranks(_as_nobody, 1, [{"load": str(closed)}, {"save": str(closed / "below")}], init=False)
    closed.chmod(0o700)
    assert "--load" in load and "Permission denied" in load and str(closed) in load
    assert "--save" in save and "Permission denied" in save
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file is where the folder should be"):
        commit.take(tmp_path / "file", {})


def test_keep_last_and_what_the_command_says(ranks, tmp_path, capsys):
    ranks(_save_steps, 2, str(tmp_path), 4, {"keep_last": 2})
    assert sorted(os.listdir(tmp_path)) == ["iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt"]
    assert [(e.step, e.serial, e.problem) for e in scan(tmp_path)] == [(3, 3, None), (4, 4, None)]
    assert main(["verify", str(tmp_path)]) == 0
    assert "iter_0000004: ok" in capsys.readouterr().out
    _flip(tmp_path / "iter_0000003" / "__0_0.distcp")
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "iter_0000003: BROKEN" in out and "__0_0.distcp is corrupt" in out
    assert main(["verify", str(tmp_path / "none")]) == 2
    (result, _) = ranks(_load_each, 2, {"newest": {"load": str(tmp_path)}})
    assert result["newest"][0] == 4


def test_nothing_in_a_checkpoint_is_executed(ranks, tmp_path, saved):
    cases = {}
    for where in (".metadata", "object", "common.pt"):
        name = where.strip(".")
        folder = shutil.copytree(saved, tmp_path / name)
        shutil.rmtree(folder / "iter_0000001")
        poison(folder / "iter_0000002", where, tmp_path / f"{name}-was-executed")
        cases[name] = {"load": str(folder)}
    found = ranks(_load_each, 2, cases)[0]
    assert [path.name for path in tmp_path.glob("*-was-executed")] == []
    for name, (kind, text, _) in found.items():
        assert kind == "UserError", (name, kind, text)
        assert str(tmp_path / name) in text and "mkdir" in text, name
