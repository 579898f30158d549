"""Manifests and folders of checkpoints. Names, and which ones are removed: ``conversations/values/checkpoints.txt``."""

# ruff: noqa: E402 - megatron-core is imported after the patches

import json

import pytest

from megatron import patches

patches.apply()

from megatron.ft_trainer.checkpointing import commit
from megatron.ft_trainer.checkpointing.inventory import FileRecord, Manifest, ManifestError, scan


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


def test_a_checkpoint_without_a_manifest_is_not_complete(tmp_path):
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000002").touch()
    found = {e.step: e for e in scan(tmp_path)}
    assert not any(e.complete for e in found.values())
    assert "there is none, as in checkpoints of NVIDIA's trainer" in found[1].problem
    assert "not a folder" in found[2].problem
    assert scan(tmp_path / "absent", may_be_missing=True) == []
    with pytest.raises(FileNotFoundError):
        scan(tmp_path / "absent")


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_checkpoint_takes_the_place_of_another_one_and_what_was_there_is_removed(exchanges, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr(commit, "_swap", lambda a, b: False)
    for name in ("new", "iter_0000004"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "from").write_text(name)
    commit.move_folder(tmp_path / "new", tmp_path / "iter_0000004", tmp_path / "old.removed")
    assert (tmp_path / "iter_0000004" / "from").read_text() == "new"
    assert (tmp_path / "old.removed" / "from").read_text() == "iter_0000004"
    assert commit.retire(tmp_path, None, ()) == [] and not (tmp_path / "old.removed").exists()
