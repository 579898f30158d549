"""Data on several ranks: one builds, all read, and what is wrong is heard by all."""

# ruff: noqa: E402 - megatron-core is imported after the patches

from ft.base.errors import FtError, UserError
from megatron import patches

patches.apply()

import pytest
import torch.distributed as dist
from small_datasets import SEQ, write_dataset

from megatron.ft_trainer.agreement import from_rank_0
from megatron.ft_trainer.arguments.topics import DataOptions
from megatron.ft_trainer.data.datasets import build_datasets
from megatron.ft_trainer.data.tokenizer import ByteLevelTokenizer


def build(words, samples=(200, 20, 0), built=(0, 1, 2, 3), **options):
    data = DataOptions(data_path=words, split="8,1,1", seq_length=SEQ, **options)
    return build_datasets(data, ByteLevelTokenizer(), 3, samples, lambda: dist.get_rank() in built)


def read(words, built):
    """(samples of train, sums of their tokens) on a rank, or None where nothing is built."""
    train, valid, test = build(words, built=built)
    assert test is None and (valid is None) == (train is None)
    return train and (len(train), [int(train[i]["tokens"].sum()) for i in range(200)])


def test_all_ranks_read_what_rank_0_indexed(ranks, tmp_path):
    words = [write_dataset(tmp_path / "a", 60)]
    everywhere = ranks(read, 4, words, (0, 1, 2, 3))
    assert everywhere[0] and all(answer == everywhere[0] for answer in everywhere)
    # Rank 0 need not read samples itself.
    assert ranks(read, 4, words, (1, 3)) == [None, everywhere[0], None, everywhere[0]]


def error_of(words, **options):
    try:
        build(words, **options)
    except UserError as error:
        return error.problem, error.fix
    return None


def test_every_rank_hears_what_is_wrong(ranks, tmp_path):
    prefix = write_dataset(tmp_path / "tiny", 1)
    answers = ranks(error_of, 3, [prefix])
    assert "valid part" in answers[0][0] and answers == [answers[0]] * 3
    (tmp_path / "file").write_text("")
    answers = ranks(error_of, 2, [write_dataset(tmp_path / "a", 60)], data_cache_path=str(tmp_path / "file" / "c"))
    assert "can't write the index cache" in answers[0][0] and answers == [answers[0]] * 2


@pytest.mark.on_ranks(2)
def test_other_failures_are_heard_too():
    def fail():
        raise RuntimeError("a bug")

    assert from_rank_0(lambda: {"rank": dist.get_rank(), "list": [1, None]}) == {"rank": 0, "list": [1, None]}
    kind, text = (RuntimeError, "a bug") if dist.get_rank() == 0 else (FtError, "rank 0 failed: RuntimeError('a bug')")
    with pytest.raises(kind) as heard:
        from_rank_0(fail)
    assert str(heard.value) == text
