"""Datasets: megatron-core's own samples, found whole or refused before megatron-core sees them."""

# ruff: noqa: E402 - megatron-core is imported after the patches

import os

import numpy
import pytest

from ft.base.errors import UserError
from megatron import patches

patches.apply()

import torch
from small_datasets import SEQ, write_dataset

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.ft_trainer.arguments.topics import DataOptions
from megatron.ft_trainer.data import datasets
from megatron.ft_trainer.data.datasets import build_datasets, epoch_permutation
from megatron.ft_trainer.data.tokenizer import ByteLevelTokenizer, NullTokenizer


@pytest.fixture
def a(tmp_path):
    return write_dataset(tmp_path / "a", 60)


def build(*path, samples=(100, 10, 0), seed=7, tokenizer=None, **options):
    options = {"seq_length": SEQ, "data_path": list(path) or None, "split": "8,1,1"} | options
    return build_datasets(DataOptions(**options), tokenizer or ByteLevelTokenizer(), seed, samples)


def tokens(dataset):
    return torch.stack([dataset[i]["tokens"] for i in range(len(dataset))])


def cores_own(data, samples, folder):
    """The same datasets by megatron-core's builder."""
    config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=SEQ,
        tokenizer=ByteLevelTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        blend=([data.prefix], None),
        split=data.split,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()


def test_within_a_pass_samples_are_those_of_megatron_cores_builder(tmp_path, a):
    samples = (50, 5, 5)
    data = DataOptions(seq_length=SEQ, split="8,1,1", data_path=[a])
    mine = build_datasets(data, ByteLevelTokenizer(), 7, samples)
    theirs = cores_own(data, samples, tmp_path)
    for one, other in zip(mine, theirs, strict=True):
        assert len(one) >= min(len(other), 5)
        both = min(len(one), len(other))
        assert torch.equal(tokens(one)[:both], tokens(other)[:both])


def test_the_order_does_not_depend_on_how_long_the_run_is(a):
    short, long = (tokens(build(a, samples=(n, 0, 0))[0]) for n in (150, 900))
    assert torch.equal(short[:150], long[:150])


def test_permutations():
    one = epoch_permutation(1, 0, 1000)
    assert sorted(one) == list(range(1000))
    assert numpy.array_equal(one, epoch_permutation(1, 0, 1000))
    others = [epoch_permutation(*arguments, 1000) for arguments in ((1, 1), (2, 0), (1 << 40, 0), (1 + (1 << 32), 0))]
    assert all(not numpy.array_equal(one, other) for other in others)
    # The stream is part of the format of a run: a resumed run has to find it unchanged.
    assert epoch_permutation(1234, 7, 10).tolist() == [4, 8, 0, 3, 5, 1, 6, 2, 7, 9]


def test_a_sample_depends_on_its_position_alone(a):
    straight, jumping = (build(a, samples=(400, 0, 0))[0] for _ in range(2))
    expected = tokens(straight)
    for position in (399, 0, 200, 57, 398, 1):
        assert torch.equal(jumping[position]["tokens"], expected[position])


def test_every_pass_holds_the_same_samples_in_an_order_of_its_own(a):
    train = build(a, samples=(400, 0, 0))[0]
    size = len(train.one_pass)
    passes = [[tuple(s.tolist()) for s in tokens(train)[n * size : (n + 1) * size]] for n in range(3)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2])
    assert passes[0] != passes[1] != passes[2] != passes[0]
    with pytest.raises(IndexError):
        train[len(train)]


def test_samples(a):
    train, valid, test = build(a)
    assert len(train) >= 100 and len(valid) >= 10 and test is None
    sample = train[0]
    assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert torch.equal(sample["position_ids"], torch.arange(SEQ)) and sample["loss_mask"].all()
    assert torch.equal(tokens(build(a)[0]), tokens(train))
    assert not torch.equal(tokens(build(a, seed=8)[0])[:100], tokens(train)[:100])


def test_masks_where_they_are_asked_for(a):
    options = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}
    train = build(a, **options)[0]
    sample = next(s for s in (train[i] for i in range(100)) if 256 in s["tokens"][2:-2])
    end = sample["tokens"].tolist().index(256)
    mask = sample["attention_mask"]
    assert mask.shape == (1, SEQ, SEQ) and mask.dtype == torch.bool
    assert mask[0, end + 1, end] and not mask[0, end, 0] and mask[0, 0, 1]
    assert sample["position_ids"][end + 1] == 0 and sample["loss_mask"][end] == 0


def test_mock_data():
    options = {"mock_data": True, "split": None}
    train, valid, test = build(samples=(10, 5, 0), **options)
    assert isinstance(train, MockGPTDataset) and test is None
    assert len(train) >= 10 and len(valid) >= 5
    assert torch.equal(train[3]["tokens"], build(samples=(10, 5, 0), **options)[0][3]["tokens"])


def test_parts_without_enough_data(a, tmp_path):
    with pytest.raises(UserError, match=r"valid part of .*a \(--split 999,0.5,0.5\) gets 0 of 60 documents, 0 tokens"):
        build(a, split="999,0.5,0.5")
    tiny = write_dataset(tmp_path / "tiny", 3)
    with pytest.raises(UserError, match=r"gets 1 of 3 documents, \d+ tokens in all: fewer than one sample of 64 \+ 1"):
        build(tiny, split="2,1", seq_length=64)
    for options in ({"split": "1"}, {"split": "999,0.5,0.5", "samples": (10, 0, 0)}):
        train, valid, _ = build(a, **options)
        assert len(train) >= 10 and valid is None
    with pytest.raises(UserError, match="leaves no data for training"):
        build(a, split="0,1,1")
    with pytest.raises(UserError, match="no data to train on"):
        build()


def test_ids_beyond_the_vocabulary(a):
    with pytest.raises(UserError, match=r"a\.bin holds token id 2\d\d, NullTokenizer has ids 0 to 199"):
        tokens(build(a, tokenizer=NullTokenizer(200))[0])


def test_negative_ids(tmp_path):
    prefix = write_dataset(tmp_path / "n", 60, dtype="int32")
    with open(f"{prefix}.bin", "r+b") as file:
        file.write(numpy.int32(-3).tobytes())
    with pytest.raises(UserError, match="token id -3"):
        tokens(build(prefix)[0])


def cache_folder(root):
    (folder,) = [f for f in root.iterdir() if f.is_dir()]
    return folder


def test_indices_are_kept(a, tmp_path):
    root = tmp_path / "cache"
    first = tokens(build(a, data_cache_path=str(root))[0])
    folder = cache_folder(root)
    stamps = {f.name: f.stat().st_mtime_ns for f in folder.iterdir()}
    assert len([name for name in stamps if name.endswith(".npy")]) == 6
    assert torch.equal(tokens(build(a, data_cache_path=str(root))[0]), first)
    assert stamps == {f.name: f.stat().st_mtime_ns for f in folder.iterdir()}


def test_data_made_anew_gets_new_indices(a, tmp_path):
    before = tokens(build(a)[0])
    write_dataset(a, 40, seed=9)
    after = build(a)[0]
    assert not torch.equal(tokens(after)[:10], before[:10])
    assert after.one_pass.document_index.max() < 40


def test_crash_while_building_leaves_no_cache(a, tmp_path, monkeypatch):
    root = tmp_path / "cache"
    real = numpy.save

    def save(path, array, **kwargs):
        real(path, array, **kwargs)
        if "sample_index" in str(path):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(numpy, "save", save)
        patch.setattr(datasets.shutil, "rmtree", lambda *args, **kwargs: None)  # what a kill would not have done
        with pytest.raises(KeyboardInterrupt):
            build(a, data_cache_path=str(root))
    assert [f.name for f in root.iterdir() if f.is_dir() and not f.name.endswith(".partial")] == []
    assert len(build(a, data_cache_path=str(root))[0]) >= 100


def test_cache_that_can_not_be_written(a, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't write the index cache") as caught:
        build(a, data_cache_path=str(tmp_path / "file" / "cache"))
    assert "--data-cache-path" in caught.value.fix


def test_full_disk(a, tmp_path, monkeypatch):
    def save(path, array, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numpy, "save", save)
    with pytest.raises(UserError, match="No space left"):
        build(a, data_cache_path=str(tmp_path / "cache"))
    assert [f for f in (tmp_path / "cache").iterdir() if f.is_dir()] == []


def test_broken_files_are_refused(a):
    os.truncate(f"{a}.bin", 100)
    with pytest.raises(UserError, match=r"a\.bin has 100 bytes"):
        build(a)
    with pytest.raises(UserError, match="does not exist"):
        build("/nowhere/data")
