"""Replicas' streams under the real loaders: without faults the same samples on the same ranks as ordinary DP."""

# ruff: noqa: E402 - megatron-core is imported after the patches

import pytest
import small_runs as runs
import torch

from ft.base.errors import UserError
from ft.protection.contract import StreamView
from ft.systems.hsdp.layer import Follower, Share
from ft.systems.hsdp.samples import Past, SampleAssignment
from megatron import patches

patches.apply()

from small_datasets import SEQ, write_dataset

from megatron.ft_trainer.arguments.topics import DataOptions
from megatron.ft_trainer.data.datasets import build_datasets
from megatron.ft_trainer.data.loader import MicrobatchLoader
from megatron.ft_trainer.data.tokenizer import ByteLevelTokenizer


def view_of(share, dataset):
    """``dataset`` as a replica reads it."""
    return StreamView(dataset, share.stream)


class Numbers(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        assert 0 <= i < self.size
        return {"tokens": torch.tensor([i])}


def loader(dataset, rows, rank, size, **options):
    return MicrobatchLoader(dataset, micro_batch_size=rows, data_parallel_rank=rank, data_parallel_size=size, **options)


def take(loader, count=1):
    return [next(loader)["tokens"][:, 0].tolist() for _ in range(count)]


@pytest.mark.parametrize(("replicas", "size", "rows", "microbatches"), [(2, 1, 2, 1), (3, 2, 2, 4), (4, 1, 1, 3)])
def test_every_rank_gets_what_it_would_get_from_ordinary_data_parallelism(replicas, size, rows, microbatches):
    steps, block = 4, rows * size
    data = Numbers(replicas * block * microbatches * steps)
    share = Share(0, SampleAssignment(replicas, block), {})
    for replica in range(replicas):
        view = view_of(Share(replica, share.assignment, {}), data)
        for rank in range(size):
            ordinary = loader(data, rows, replica * size + rank, replicas * size)
            ours = loader(view, rows, rank, size)
            assert take(ours, steps * microbatches) == take(ordinary, steps * microbatches)


def test_a_loader_goes_over_to_another_stream():
    assignment = SampleAssignment(2, 2)
    view = view_of(Share(1, assignment, {}), Numbers(40))
    ours = loader(view, 2, 0, 1)
    follow = Follower([None, ours], 1)
    assert take(ours, 2) == [[2, 3], [6, 7]]
    follow(assignment, 2)
    assert follow.position == 2
    assert take(ours) == [[6, 7]]
    later, positions = assignment.after({0: 8, 1: 4}, 4, 3, 2)
    follow(later, positions[1])
    assert take(ours, 2) == [[14, 15], [20, 21]]
    assert follow.position == 4
    assert take(ours, 3) == [[26, 27], [32, 33], [38, 39]]
    with pytest.raises(UserError, match="the dataset has 10 samples; after 10"):
        next(ours)
    assert Follower([None], 0).position is None


def test_the_view_ends_where_the_data_do():
    view = StreamView(Numbers(11), SampleAssignment(3, 2).stream(1))
    assert len(view) == 4
    assert view[3]["tokens"].item() == 9
    for position in (-1, 4):
        with pytest.raises(IndexError, match=f"sample {position} of the 4 of SampleStream"):
            view[position]


def test_passes_through_real_data_are_assigned_as_one_order(tmp_path):
    """Several passes: the data reach as far as the furthest stream, and every stream has its samples."""
    prefix = write_dataset(tmp_path / "a", 60)
    data = DataOptions(data_path=[prefix], split="8,1,1", seq_length=SEQ)
    assignment = SampleAssignment(3, 4)
    steps, batch = 60, 8
    wanted = assignment.needed(steps, batch)
    train, *_ = build_datasets(data, ByteLevelTokenizer(), 3, (wanted, 0, 0))
    assert len(train.one_pass) < wanted == 3 * steps * batch
    ordinary = [train[i]["tokens"] for i in range(wanted)]
    for replica in range(3):
        view = view_of(Share(replica, assignment, {}), train)
        assert len(view) >= steps * batch
        assert all(torch.equal(view[p]["tokens"], ordinary[view.stream.index(p)]) for p in range(0, steps * batch, 7))


def samples_read(flags: str, replicas: int, past: tuple = (), position: int = 0, steps: int = 3) -> dict:
    """The samples that a world's own trainer loaders give on this rank, for each replica that it could be."""
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.ft_trainer import model
    from megatron.ft_trainer.arguments import check, parse
    from megatron.ft_trainer.checkpointing.content import TrainState
    from megatron.ft_trainer.data.loader import make_loaders
    from megatron.ft_trainer.data.tokenizer import build_tokenizer, padded_vocab_size
    from megatron.ft_trainer.initialize import init_model_parallel, seed_everything

    options = parse(flags)
    layout = check(options, dist.get_world_size(), has_te=False)
    init_model_parallel(options.core, layout)
    seed_everything(options)
    tokenizer = build_tokenizer(options.tokenizer)
    chunks = model.build(options, layout, padded_vocab_size(options.tokenizer, tokenizer.vocab_size, layout.tp)).chunks
    block = options.training.micro_batch_size * layout.dp
    found = {}
    for replica in range(replicas):
        share = Share(replica, SampleAssignment(replicas, block, past), {replica: position}) if replicas > 1 else None
        train, *_ = make_loaders(options, layout, tokenizer, chunks, TrainState(), share)
        count = steps * options.training.global_batch_size // (replicas * block)
        rank = parallel_state.get_data_parallel_rank()
        found[replica, rank] = [next(train[0])["tokens"] for _ in range(count)]
    return found


def test_the_trainers_own_loaders(ranks, tmp_path):
    """Two replicas of two ranks read what four ranks of one world do; 3 steps of 2 microbatches."""
    corpus = runs.make_corpus(tmp_path)
    flags = f"{runs.BASE} --data-path {corpus}"
    ordinary = ranks(samples_read, 4, f"{flags} --global-batch-size 16", 1)
    replicas = ranks(samples_read, 2, f"{flags} --global-batch-size 16", 2)
    expected = {rank: batches for found in ordinary for (_, rank), batches in found.items()}
    for found in replicas:
        for (replica, rank), batches in found.items():
            assert len(batches) == 6
            assert all(map(torch.equal, batches, expected[2 * replica + rank]))
    # After a change of their number: one replica of three had been away for two steps.
    past = (Past(3, 4, (16, 0, 16), 2),)
    later = ranks(samples_read, 2, f"{flags} --global-batch-size 16", 2, past, 4, 2)
    stream = SampleAssignment(2, 4, past).streams()
    assert [stream[0].index(p) for p in (0, 4, 8)] == [4, 28, 48]
    everything = torch.cat([expected[rank][m] for m in range(6) for rank in range(4)])
    assert torch.equal(later[1][0, 1][0], everything[30:32])
