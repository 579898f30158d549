"""The decisions about checkpoints, which need no disk; and the manifest."""

# ruff: noqa: E402 - megatron-core is imported after the patches

import json

import pytest

from megatron import patches

patches.apply()

from megatron.ft_trainer.checkpointing import commit, inventory
from megatron.ft_trainer.checkpointing.inventory import Entry, FileRecord, Manifest, ManifestError, scan, share_of


def entries(*steps_and_serials, broken=()):
    return [
        Entry(inventory.checkpoint_name(step), step, serial, "broken" if step in broken else None)
        for step, serial in steps_and_serials
    ]


def test_names():
    assert inventory.checkpoint_name(100) == "iter_0000100"
    assert inventory.step_of("iter_0000100") == 100
    assert inventory.step_of("iter_12345678") == 12345678
    for name in ("iter_100", "iter_0000100.partial", "release", inventory.TRACKER, "iter_0000100.removed"):
        assert inventory.step_of(name) is None
    assert inventory.is_leftover(inventory.partial_name(7)) and inventory.is_leftover(
        inventory.removed_name("iter_0000007")
    )
    assert inventory.is_leftover("iter_0000007.partial") and inventory.is_leftover(
        inventory.replaced_name(inventory.partial_name(7))
    )
    assert not inventory.is_leftover("iter_0000007") and not inventory.is_leftover("my.partial")


def test_two_saves_of_one_step_never_share_a_folder():
    assert inventory.partial_name(7) != inventory.partial_name(7)
    one = inventory.partial_name(7)
    assert inventory.replaced_name(one) not in (one, inventory.removed_name("iter_0000007"))


def test_newest_is_the_one_saved_last_not_the_highest_step():
    found = entries((500, 1), (1000, 2), (600, 3))
    assert inventory.newest_complete(found).step == 600
    assert [e.step for e in inventory.newest_first(found)] == [600, 1000, 500]
    assert inventory.next_serial(found) == 4


def test_broken_ones_are_never_the_newest():
    assert inventory.newest_complete(entries((1, 1), (2, 2), broken=(2,))).step == 1
    assert inventory.newest_complete(entries((1, 1), broken=(1,))) is None
    assert inventory.newest_complete([]) is None
    assert inventory.next_serial([Entry("iter_0000001", 1, None, "broken")]) == 1


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
    assert [e.step for e in inventory.to_remove(found, keep_last, distrusted)] == removed


def test_broken_ones_are_not_removed():
    assert inventory.to_remove(entries((1, 1), (2, 2), (3, 3), broken=(1,)), 1) == entries((2, 2))


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
