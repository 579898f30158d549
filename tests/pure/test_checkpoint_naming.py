"""The decisions about checkpoints, which need no disk; and the manifest."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.checkpoint import CheckpointOptions
from megatron.ft_trainer.checkpointing import naming
from megatron.ft_trainer.checkpointing.manifest import FileRecord, Manifest, ManifestError
from megatron.ft_trainer.checkpointing.naming import Entry
from megatron.ft_trainer.checkpointing.verify import scan, scan_all, share_of


def entries(*steps_and_serials, broken=()):
    return [
        Entry(naming.checkpoint_name(step), step, serial, "broken" if step in broken else None)
        for step, serial in steps_and_serials
    ]


def test_names():
    assert naming.checkpoint_name(100) == "iter_0000100"
    assert naming.step_of("iter_0000100") == 100
    assert naming.step_of("iter_12345678") == 12345678
    for name in ("iter_100", "iter_0000100.partial", "release", naming.TRACKER, "iter_0000100.removed"):
        assert naming.step_of(name) is None
    assert naming.is_leftover(naming.partial_name(7)) and naming.is_leftover(naming.removed_name("iter_0000007"))
    assert naming.is_leftover("iter_0000007.partial") and naming.is_leftover(
        naming.replaced_name(naming.partial_name(7))
    )
    assert not naming.is_leftover("iter_0000007") and not naming.is_leftover("my.partial")


def test_two_saves_of_one_step_never_share_a_folder():
    assert naming.partial_name(7) != naming.partial_name(7)
    one = naming.partial_name(7)
    assert naming.replaced_name(one) not in (one, naming.removed_name("iter_0000007"))


def test_newest_is_the_one_saved_last_not_the_highest_step():
    found = entries((500, 1), (1000, 2), (600, 3))
    assert naming.newest_complete(found).step == 600
    assert [e.step for e in naming.newest_first(found)] == [600, 1000, 500]
    assert naming.next_serial(found) == 4


def test_broken_ones_are_never_the_newest():
    assert naming.newest_complete(entries((1, 1), (2, 2), broken=(2,))).step == 1
    assert naming.newest_complete(entries((1, 1), broken=(1,))) is None
    assert naming.newest_complete([]) is None
    assert naming.next_serial([Entry("iter_0000001", 1, None, "broken")]) == 1


@pytest.mark.parametrize(
    "keep_last, distrusted, removed",
    [
        (None, (), []),
        (3, (), []),
        (2, (), [1]),
        (1, (), [1, 2]),
        # One that failed verification keeps no sound one from staying, and stays as evidence.
        (1, ("iter_0000003",), [1]),
        (2, ("iter_0000003",), []),
    ],
)
def test_what_is_removed(keep_last, distrusted, removed):
    found = entries((1, 1), (2, 2), (3, 3))
    assert [e.step for e in naming.to_remove(found, keep_last, distrusted)] == removed


def test_broken_ones_are_not_removed():
    assert naming.to_remove(entries((1, 1), (2, 2), (3, 3), broken=(1,)), 1) == entries((2, 2))


def test_files_are_dealt_out_completely_and_evenly():
    files = {f"f{i}": FileRecord(100 - i, 0) for i in range(10)}
    dealt = [share_of(files, 4, rank) for rank in range(4)]
    assert sorted(name for names in dealt for name in names) == sorted(files)
    assert dealt[0] == ["f0", "f4", "f8"]
    assert [len(names) for names in dealt] == [3, 3, 2, 2]


def manifest() -> Manifest:
    return Manifest(
        step=5,
        serial=2,
        saved_at="2026-01-01T00:00:00Z",
        layout={"world_size": 4, "tp": 2},
        versions={"torch": "2"},
        optimizer="fully_reshardable",
        rng_grid=[2, 2],
        run={"model": {"hidden_size": 32}},
        files={"a": FileRecord(10, 123)},
    )


def test_manifest_survives_json():
    assert Manifest.from_json(manifest().to_json()) == manifest()


def test_any_change_of_a_manifest_is_noticed():
    body = json.loads(manifest().to_json())
    for change in ({"step": 6}, {"files": {}}, {"checksum": 1}, {"files": {"a": {"bytes": 10, "crc32": 124}}}):
        with pytest.raises(ManifestError, match="checksum"):
            Manifest.from_json(json.dumps(body | change))
    text = manifest().to_json()
    for torn in ("", "{", "[]", "null", "3", text[: len(text) // 2], '{"checksum": 0}', "\x00" * 100):
        with pytest.raises(ManifestError):
            Manifest.from_json(torn)


def foreign(step: int, tracked: bool = False, folder: str = "") -> Entry:
    return Entry(f"{folder}{naming.checkpoint_name(step)}", step, manifest="none", tracked=tracked)


def test_checkpoints_of_megatron_lm_have_their_place_in_the_order():
    """NVIDIA's trainer saved 4 and 8, this one went on to 12 and 16, NVIDIA's from 12 to 14."""
    found = [foreign(4), foreign(8), *entries((12, 1), (16, 2)), foreign(14, tracked=True)]
    assert [e.step for e in naming.newest_first(found)] == [14, 16, 12, 8, 4]
    found[-1] = foreign(14)
    assert [e.step for e in naming.newest_first(found)] == [16, 14, 12, 8, 4]
    assert naming.next_serial(found) == 3


def test_the_newer_of_persistent_and_non_persistent():
    kept, other = entries((4, 1), (8, 2)), replace(entries((8, 7))[0], name="/scratch/iter_0000008")
    assert naming.newest_complete([*kept, other]) == other
    assert naming.newest_complete([*entries((4, 1), (9, 2)), other]).step == 9
    assert naming.newest_complete([other]) == other
    assert [e.persistent for e in naming.newest_first([*kept, other])] == [False, True, True]


def sharded(folder: Path, step: int, common: dict) -> Path:
    """Make the files by which a checkpoint is recognised."""
    checkpoint = folder / naming.checkpoint_name(step)
    checkpoint.mkdir(parents=True)
    for name in naming.SHARDED:
        (checkpoint / name).touch()
    torch.save(common, checkpoint / naming.COMMON)
    return checkpoint


def test_what_a_checkpoint_without_a_manifest_is(tmp_path):
    sharded(tmp_path, 1, {"iteration": 1})
    sharded(tmp_path, 2, {"iteration": 2, naming.MARK: True})
    (sharded(tmp_path, 3, {"iteration": 3}) / "metadata.json").unlink()
    (tmp_path / "iter_0000004/mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000005/mp_rank_00").mkdir(parents=True)
    torch.save({"iteration": 5}, tmp_path / "iter_0000005/mp_rank_00" / naming.LEGACY)
    (tmp_path / naming.TRACKER).write_text("5\n")
    found = {e.step: e for e in scan(tmp_path)}
    assert [step for step, e in found.items() if e.complete] == [1, 5]
    assert [e.manifest for e in found.values()] == ["none", "lost", "none", "none", "none"]
    assert "metadata.json is missing" in found[3].problem and naming.LEGACY in found[4].problem
    assert [step for step, e in found.items() if e.tracked] == [5]
    options = CheckpointOptions(non_persistent_ckpt_type="global")
    sharded(tmp_path / "non_persistent", 6, {})
    assert [e.step for e in naming.newest_first(scan_all(options, tmp_path))] == [6, 5, 1]
    assert naming.newest_complete(scan_all(CheckpointOptions(), tmp_path)).step == 5
    assert scan_all(options, tmp_path / "absent") == []


@pytest.mark.parametrize(
    "given, said",
    [
        ({"non_persistent_ckpt_type": "local"}, "type local is not supported"),
        ({"non_persistent_save_interval": 2}, "add --non-persistent-ckpt-type"),
        ({"non_persistent_ckpt_type": "global", "non_persistent_save_interval": 0}, "at least 1"),
        ({"non_persistent_ckpt_type": "global", "ckpt_format": "torch"}, "torch_dist"),
    ],
)
def test_what_cannot_be_asked_of_non_persistent_checkpoints(given, said):
    with pytest.raises(UserError, match=said):
        CheckpointOptions(**given)
