"""``ft diagnose compare`` on real checkpoints in which single bits are flipped: step, parameter, rank and outlier."""

import json
import pickle
import random
import shutil

import pytest
import small_runs as runs
import torch
from checkpoint_flips import flip, places, poison, put, resign, tensor

from ft import cli
from ft.observe.diagnose import compare, stored

# Two stages of two replicas; every rank stores its own shard of the optimizer's state.
FLAGS = (
    f"{runs.BASE} --train-iters 4 --save-interval 1 --mock-data --deterministic-mode --bf16 --hidden-dropout 0.1 "
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer --no-dist-ckpt-optim-fully-reshardable "
)
FC1 = "decoder.layers.mlp.linear_fc1.weight"
STATE = "optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"


@pytest.fixture(scope="module")
def saved(tmp_path_factory, _warm_ranks):
    """A run of three steps, and one in which rank 3 flips a bit at the end of step 2."""
    folder = tmp_path_factory.mktemp("saved")
    assert _warm_ranks(runs.launch, 4, f"{FLAGS} --save {folder}/sound", init=False, timeout=120) == [0] * 4
    faulty = f"{FLAGS} --save {folder}/faulty"
    assert _warm_ranks(runs.launch_with_flip, 4, faulty, 3, 2, 22, init=False, timeout=120) == [0] * 4
    return folder


@pytest.fixture
def three(saved, tmp_path):
    """Copies of the sound run, to break."""
    return [shutil.copytree(saved / "sound", tmp_path / name) for name in "abc"]


def at(run, step):
    return run / f"iter_{step:07d}"


def compared(capsys, folders, *flags) -> dict:
    capsys.readouterr()
    code = cli.main(["diagnose", "compare", *map(str, folders), *flags, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["equal"] else 1)
    return found


def printed(capsys, folders, *flags) -> str:
    capsys.readouterr()
    cli.main(["diagnose", "compare", *map(str, folders), *flags])
    return capsys.readouterr().out


def test_equal_runs_are_equal(capsys, three):
    found = compared(capsys, three)
    assert found["equal"] and found["steps"] == [1, 2, 3, 4] and found["differences"] == found["outliers"] == []
    assert printed(capsys, three).startswith("equal, bit for bit: 3 runs, 4 steps (1, 2, 3, 4), ")


def test_a_fault_in_training_is_found_at_its_step_and_rank(capsys, saved, three):
    found = compared(capsys, [three[0], saved / "faulty", three[1]])
    assert found["first_different_step"] == 2 and found["last_equal_step"] == 1 and found["steps_not_reached"] == [3, 4]
    assert found["outliers"] == [str(saved / "faulty")] and found["majority"]
    (row,) = found["differences"]
    assert (row["kind"], row["differing"], row["bit"], row["ulp"]) == ("master weight", 1, 22, 1 << 22)
    assert row["ranks"] == [3]
    text = printed(capsys, [three[0], saved / "faulty", three[1]])
    assert "first difference: step 2; step 1 is equal, so it happened in step 2: 1 of " in text
    assert f"outlier: {saved / 'faulty'} (the other 2 agree on all of it)" in text
    assert f"rank: 3 (tp 0 cp 0 dp 1 pp 1) in {saved / 'faulty'}\n" in text
    spread = compared(capsys, [three[0], saved / "faulty"], "--step", "4")
    assert {rank for row in spread["differences"] for rank in row["ranks"]} == {0, 1, 2, 3}
    assert len(spread["differences"]) > 20
    text = printed(capsys, [three[0], saved / "faulty"], "--step", "4", "--show", "2")
    assert "more lines (--show, --json)" in text and "rank: " not in text


def test_without_manifests_as_nvidias_trainer_saves_the_arguments_describe_a_checkpoint(capsys, saved, three):
    runs = [three[0], shutil.copytree(saved / "faulty", three[1], dirs_exist_ok=True), three[2]]
    expected = compared(capsys, runs)
    for manifest in (file for run in runs for file in run.glob("*/manifest.json")):
        manifest.unlink()
    found = compared(capsys, runs)
    assert found["suspects"] == {str(three[1]): [3]} and found["differences"] == expected["differences"]
    assert compared(capsys, [three[0], three[2]])["equal"] and not found["notes"]


def test_parameters_that_others_computed_leave_their_ranks_suspect(capsys, three):
    rank = flip(at(three[1], 1), "decoder.final_layernorm.weight", (0,), 1, 8)
    found = compared(capsys, three)
    assert found["suspects"] == {str(three[1]): [2, 3]} and found["differences"][0]["ranks"] == [rank]
    assert f"rank: one or more of 2, 3 (tp 0 cp 0 pp 1) in {three[1]}\n" in printed(capsys, three)
    last = max(offsets for name, offsets in places(at(three[1], 1)) if name == STATE)
    assert flip(at(three[1], 1), STATE, last, 0, 8) == 3
    assert compared(capsys, three)["suspects"] == {str(three[1]): [3]}
    for run in three:
        resign(at(run, 1), optimizer="fully_reshardable")
    assert compared(capsys, three)["suspects"] == {str(three[1]): [2, 3]}
    assert "with --no-dist-ckpt-optim-fully-reshardable), the rank of each state is known" in printed(capsys, three)


def test_padding_of_the_optimizers_shards_is_no_difference(capsys, three):
    """With --deterministic-mode memory that nothing has set is NaN, so that padding is known by what it holds."""
    checkpoint = at(three[1], 3)
    shards = {key for key in places(checkpoint) if "bucket_idx" in key[0]}
    unset = {key for key in shards if tensor(checkpoint, *key).isnan().all()}
    assert unset and unset < shards and unset == stored.padding(stored.read(checkpoint))
    for name, offsets in unset:
        flip(checkpoint, name, offsets, 0, 1)
    assert compared(capsys, three)["equal"]


def test_any_single_bit_is_found_wherever_it_flips(capsys, three, seed):
    chance = random.Random(seed)
    unset = stored.padding(stored.read(at(three[0], 1)))
    tensors = [key for key in places(at(three[0], 1)) if "shard_" not in key[0] and key not in unset]
    for _ in range(12):
        victim, step, (name, offsets) = chance.randrange(3), chance.randint(1, 3), chance.choice(tensors)
        shard = tensor(at(three[0], step), name, offsets)
        element, bit = chance.randrange(shard.numel()), chance.randrange(8 * shard.itemsize)
        rank = flip(at(three[victim], step), name, offsets, element, bit)
        found = compared(capsys, three)
        assert found["first_different_step"] == step and found["outliers"] == [str(three[victim])]
        (row,) = found["differences"]
        assert (row["differing"], row["bit"], row["ranks"]) == (1, bit, [rank])
        assert row["run"] == str(three[victim]) != row["reference"]
        assert (row["ulp"] is None) == bool(row["not_finite"])
        # The first dimension of a stacked tensor is the layer, which is in the name.
        place = torch.unravel_index(torch.tensor(element), shard.shape)
        index = [int(i) + offset for i, offset in zip(place, offsets, strict=True)]
        if name.startswith("decoder.layers."):
            assert row["name"] == name.replace("layers", f"layers.{index.pop(0)}")
        assert row["first"] == index
        flip(at(three[victim], step), name, offsets, element, bit)
    assert compared(capsys, three)["equal"]


def test_the_first_step_counts_and_shards_of_one_parameter_are_one_line(capsys, three):
    flip(at(three[1], 3), FC1, (0, 0, 0), 5, 1)
    for layer, element in ((2, 7), (2, 8), (3, 9)):
        flip(at(three[1], 2), FC1, (layer, 0, 0), element, 4)
    found = compared(capsys, three)
    assert found["first_different_step"] == 2
    lines = {row["name"]: row for row in found["differences"]}
    assert sorted(lines) == [FC1.replace("layers", f"layers.{layer}") for layer in (2, 3)]
    two = lines[FC1.replace("layers", "layers.2")]
    assert (two["differing"], two["consecutive"], two["first"], two["elements"]) == (2, True, [0, 7], 128 * 32)
    assert "(those of rank 2 are also on 3)" in printed(capsys, three) or "(those of rank 3 are also on 2)" in printed(
        capsys, three
    )


def test_nan_is_equal_to_itself_and_to_no_other(capsys, three):
    for run in three:
        shard = tensor(at(run, 1), STATE, (0,))
        shard[3] = float("nan")
        put(at(run, 1), STATE, (0,), shard)
    assert compared(capsys, three)["equal"]
    flip(at(three[2], 1), STATE, (0,), 3, 0)
    (row,) = compared(capsys, three)["differences"]
    assert (row["kind"], row["not_finite"], row["ulp"], row["values"]) == ("exp_avg", 1, None, ["nan", "nan"])
    assert "1 not finite" in printed(capsys, three)


def test_without_a_majority_no_run_is_accused(capsys, three, saved, tmp_path):
    flip(at(three[1], 1), FC1, (0, 0, 0), 5, 1)
    assert compared(capsys, three[:2])["outliers"] == []
    assert "two runs have no majority; a third run would show which of them is wrong" in printed(capsys, three[:2])
    flip(at(three[2], 1), FC1, (0, 0, 0), 5, 2)
    found = compared(capsys, three)
    assert found["outliers"] == [] and not found["majority"] and len(found["differences"]) == 2
    assert "no majority: 2 lines below, in which no more than half of the runs agree" in printed(capsys, three)
    fourth = shutil.copytree(three[1], tmp_path / "d")
    assert compared(capsys, [*three[:2], saved / "sound", fourth])["outliers"] == []  # two against two
    assert compared(capsys, [three[1], saved / "sound", fourth])["outliers"] == [str(saved / "sound")]


def test_generators_and_counters_are_compared_by_value(capsys, three):
    (key,) = [key for key in places(at(three[0], 1)) if key[0] == "rng_state/shard_1.0_2.1"]
    file, start, length = places(at(three[0], 1))[key]
    data = (at(three[0], 1) / file).read_bytes()[start : start + length]
    (at(three[0], 1) / "state").write_bytes(data)
    ((states,),) = torch.load(at(three[0], 1) / "state", weights_only=False)
    (at(three[0], 1) / "state").unlink()
    put(at(three[1], 1), *key, [[dict(reversed(states.items()))]])  # other bytes, the same values
    assert compared(capsys, three)["equal"]
    states["torch_rng_state"][40] ^= 1
    states["np_rng_state"][1][7] ^= 1
    put(at(three[1], 1), *key, [[states]])
    (row,) = compared(capsys, three)["differences"]
    assert (row["kind"], row["name"], row["differing"]) == ("generators", "rng_state", 2)
    common = torch.load(at(three[1], 1) / "common.pt", weights_only=False)
    common["opt_param_scheduler"]["num_steps"] += 8
    torch.save(common, at(three[1], 1) / "common.pt")
    resign(at(three[1], 1))
    rows = compared(capsys, three)["differences"]
    assert ("value", "opt_param_scheduler.num_steps", 8.0) in [(r["kind"], r["name"], r["absolute"]) for r in rows]


def test_only_files_that_differ_are_read(capsys, three, monkeypatch):
    rank = flip(at(three[0], 2), FC1, (1, 0, 0), 5, 1)
    held, whole = [], stored.Stored.whole
    monkeypatch.setattr(stored.Stored, "whole", lambda self, piece: held.append(piece.file) or whole(self, piece))
    (row,) = compared(capsys, three)["differences"]
    assert row["ranks"] == [rank] and set(held) == {f"__{rank}_0.distcp"}


def test_pieces_are_found_wherever_the_other_run_put_them(capsys, three, monkeypatch):
    flip(at(three[2], 1), STATE, (0,), 3, 9)
    expected, reads = compared(capsys, three), compare.read

    def other_way_round(path):
        checkpoint = reads(path)
        if path.parent == three[1]:
            checkpoint.pieces = dict(reversed(checkpoint.pieces.items()))
        return checkpoint

    monkeypatch.setattr(compare, "read", other_way_round)
    assert (
        compared(capsys, [three[1], three[0], three[2]])["differences"][0]["name"] == expected["differences"][0]["name"]
    )


def test_what_was_started_otherwise_is_said(capsys, three):
    manifest = json.loads((at(three[1], 1) / "manifest.json").read_text())
    options = manifest["run"]["options"]
    options["training"]["seed"], options["core"]["deterministic_mode"] = 99, False
    resign(at(three[1], 1), run=manifest["run"])
    notes = compared(capsys, three)["notes"]
    unsafe = next(note for note in notes if note.startswith("without --deterministic-mode, differences may be due to"))
    assert unsafe.endswith(f": {three[1]}")
    assert any(note.startswith(f"--seed differs: 1234 in {three[0]}, 99 in {three[1]}") for note in notes)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def _corrupt(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _corrupt_tensor(checkpoint):
    """Remove the manifests, and flip a bit of a tensor as if a disk had done it."""
    for manifest in checkpoint.parent.parent.glob(f"*/{checkpoint.name}/manifest.json"):
        manifest.unlink()
    file, start, length = places(checkpoint)[FC1, (0, 0, 0)]
    data = bytearray((checkpoint / file).read_bytes())
    at = data.index(tensor(checkpoint, FC1, (0, 0, 0)).view(torch.uint8).numpy().tobytes(), start, start + length)
    data[at] ^= 1
    (checkpoint / file).write_bytes(data)


def _without_arguments(checkpoint):
    common = torch.load(checkpoint / "common.pt", weights_only=False)
    del common["args"]
    torch.save(common, checkpoint / "common.pt")
    (checkpoint / "manifest.json").unlink()


def _garbage(path):
    path.write_bytes(pickle.dumps({"state_dict_metadata": {}}))


def _other(checkpoint, **changes):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    resign(checkpoint, **{name: {**manifest[name], **change} for name, change in changes.items()})


BAD = {
    "truncated": (lambda c: _cut(c / "__1_0.distcp"), "__1_0.distcp has "),
    "missing": (lambda c: (c / "__1_0.distcp").unlink(), "__1_0.distcp: No such file"),
    "corrupt": (lambda c: _corrupt(c / f"__{flip(c, FC1, (0, 0, 0), 5, 1)}_0.distcp"), ".distcp is corrupt: checksum "),
    "corrupt-common": (lambda c: _corrupt(c / "common.pt"), "common.pt is corrupt: checksum "),
    "corrupt-metadata": (lambda c: _corrupt(c / ".metadata"), ".metadata is corrupt: checksum "),
    "neither manifest nor arguments": (
        lambda c: [(c / name).unlink() for name in ("manifest.json", "common.pt")],
        "has neither common.pt nor an object common_state: it is not complete",
    ),
    "neither manifest nor a run's arguments": (_without_arguments, "has neither a manifest.json nor the arguments of"),
    "no-manifest": (lambda c: (c / "manifest.json").unlink(), "are of different trainers"),
    "corrupt without a manifest": (_corrupt_tensor, f"{FC1} was damaged on disk"),
    "metadata-of-another-kind": (lambda c: (_garbage(c / ".metadata"), resign(c)), ".metadata does not have"),
    "other-layout": (lambda c: _other(c, layout={"tp": 2, "dp": 1}), "different layouts:\n    dp: 2 and 1\n    tp: 1"),
    "other-model": (lambda c: _other(c, run={"model": {"num_layers": 8}}), "are of different models:"),
    "other-data": (lambda c: _other(c, run={"fingerprints": {"tokenizer": "x"}}), "on different inputs:"),
    "other-content": (lambda c: resign(c, optimizer=None), "optimizer: dp_reshardable and None"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compared_is_refused(name, capsys, three):
    damage, said = BAD[name]
    damage(at(three[1], 2))
    capsys.readouterr()
    assert cli.main(["diagnose", "compare", *map(str, three)]) == 2
    told = capsys.readouterr()
    assert said in told.err and str(three[1]) in told.err and "fix: " in told.err and not told.out


@pytest.mark.parametrize("where", [".metadata", "object", "common.pt"])
def test_nothing_in_a_checkpoint_is_executed(where, capsys, three, tmp_path):
    poison(at(three[1], 2), where, tmp_path / "was-executed")
    capsys.readouterr()
    assert cli.main(["diagnose", "compare", *map(str, three)]) == 2
    assert "mkdir" in capsys.readouterr().err
    assert not (tmp_path / "was-executed").exists()


def test_folders_that_are_no_runs_are_refused(capsys, three, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.rmtree(at(three[2], 1))
    (lone := tmp_path / "lone").mkdir()
    shutil.copytree(at(three[0], 3), at(lone, 30))
    for words, said in {
        (three[0],): "a comparison needs at least two runs",
        (three[0], three[0]): "are the same folder",
        (three[0], tmp_path / "nowhere"): "nowhere: No such file",
        (three[0], tmp_path / "empty"): "empty holds no checkpoints",
        (three[0], at(three[1], 2)): f"give {three[1]} and --step 2",
        (three[0], lone): "no step has a checkpoint in every run",
        (three[0], three[2], "--step", "1"): "c has no checkpoint of step 1",
    }.items():
        assert cli.main(["diagnose", "compare", *map(str, words)]) == 2
        assert said in capsys.readouterr().err
    found = compared(capsys, three)
    assert (
        found["equal"]
        and found["steps"] == [2, 3, 4]
        and f"{three[0]} has steps that not every run has: 1" in found["notes"]
    )
    assert cli.main(["diagnose"]) == 2
