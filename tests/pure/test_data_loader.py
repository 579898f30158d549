"""The microbatch loader: order from any position, errors where they belong."""

import pytest
import torch

from ft.base.errors import UserError
from megatron.ft_trainer.data.loader import MicrobatchLoader


class Numbers(torch.utils.data.Dataset):
    """Sample i is [i, i]; sample ``bad`` fails as often as ``failures`` says."""

    def __init__(self, size, bad=None, failures=0):
        self.size, self.bad, self.failures = size, bad, failures

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        if i == self.bad and self.failures:
            self.failures -= 1
            raise OSError(f"sample {i} can't be read")
        return {"tokens": torch.tensor([i, i]), "loss_mask": torch.ones(2), "dataset_id": 0}


def firsts(batch):
    return batch["tokens"][:, 0].tolist()


def take(loader, count):
    return [firsts(next(loader)) for _ in range(count)]


def test_any_position_gives_the_same_microbatches():
    dataset = Numbers(400)

    def loader(**options):
        return MicrobatchLoader(dataset, micro_batch_size=3, data_parallel_rank=1, data_parallel_size=2, **options)

    expected, jumping = take(loader(), 60), loader(consumed_samples=6 * 7)
    assert take(jumping, 5) == expected[7:12]
    assert jumping.consumed_samples == 6 * 12
    for start in (50, 0, 31, 32):
        jumping.seek(6 * start)
        assert take(jumping, 9) == expected[start : start + 9]


def test_samples_do_not_depend_on_the_number_of_ranks():
    def all_ranks(ranks, rows, steps):
        loaders = [
            MicrobatchLoader(Numbers(64), micro_batch_size=rows, data_parallel_rank=r, data_parallel_size=ranks)
            for r in range(ranks)
        ]
        return [i for _ in range(steps) for loader in loaders for i in firsts(next(loader))]

    assert all_ranks(1, 4, 12) == all_ranks(4, 1, 12) == all_ranks(2, 4, 6)


def test_batches_hold_what_the_dataset_makes_and_no_more():
    batch = next(MicrobatchLoader(Numbers(4), micro_batch_size=2))
    assert set(batch) == {"tokens", "loss_mask"} and batch["tokens"].shape == (2, 2)


def test_errors_reach_the_consumer_at_their_place_and_can_be_retried():
    loader = MicrobatchLoader(Numbers(40, bad=9, failures=1), micro_batch_size=2)
    assert take(loader, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(OSError, match="sample 9"):
        next(loader)
    assert loader.consumed_samples == 8
    assert take(loader, 2) == [[8, 9], [10, 11]]


def test_end_of_data_is_named():
    loader = MicrobatchLoader(Numbers(11), micro_batch_size=4)
    assert take(loader, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for _ in range(2):
        with pytest.raises(UserError, match="has 11 samples; after 8 samples a microbatch needs 4 more"):
            next(loader)
    loader.seek(0)
    assert take(loader, 1) == [[0, 1, 2, 3]]
    with pytest.raises(UserError):
        next(MicrobatchLoader(Numbers(0), micro_batch_size=1))
