"""--data-path, --split and the order of samples: pure functions of flags, seed and position."""

import numpy
import pytest

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.topics import DataOptions
from megatron.ft_trainer.data.blend import Blend, dataset_prefixes, parse_blend, parse_recipe, parse_split
from megatron.ft_trainer.data.order import CyclicOrder, epoch_permutation, sample_indices


def test_blends():
    assert parse_blend("--data-path", ["a"]) == Blend("--data-path", ("a",))
    assert parse_blend("--data-path", ["a", "b"]) == Blend("--data-path", ("a", "b"))
    assert parse_blend("--data-path", ["1", "a"]) == Blend("--data-path", ("a",), (1.0,))
    assert parse_blend("--data-path", ["0.3", "a", "7e-1", "b"]) == Blend("--data-path", ("a", "b"), (0.3, 0.7))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0.3", "a", "0.7"], r"mixes weights and prefixes: word 3 of 3 is '0.7'"),
        (["0.3", "a", "b"], r"mixes weights and prefixes: word 3 of 3 is 'b'"),
        (["0.3", "a", "b", "0.7"], r"mixes weights and prefixes: word 3 of 4 is 'b'"),
        (["a", "0.5"], r"mixes weights and prefixes: word 1 of 2 is 'a'"),
        (["0", "a", "1", "b"], r"gives a the weight 0.0"),
        (["-1", "a", "1", "b"], r"gives a the weight -1.0"),
        (["1", "a", "nan", "b"], r"gives b the weight nan"),
        (["inf", "a", "1", "b"], r"gives a the weight inf"),
    ],
)
def test_bad_blends(words, message):
    with pytest.raises(UserError, match=message):
        parse_blend("--data-path", words)


@pytest.mark.parametrize(("text", "split"), [("969, 30, 1", "969,30,1"), ("1", "1"), ("0.9,.1", "0.9,.1")])
def test_split(text, split):
    assert parse_split(text) == split


@pytest.mark.parametrize("text", ["", "90,-10", "1e3,1", "a,b", "1,2,3,4", "0,0,0", "1;2", "nan,1"])
def test_bad_split(text):
    with pytest.raises(UserError, match="--split"):
        parse_split(text)


def test_recipes():
    blended = parse_recipe(DataOptions(data_path=["1", "a", "2", "b", "1", "a"]))
    assert blended.split == "969,30,1" and blended.prefixes == ["a", "b"]
    per_part = DataOptions(train_data_path=["a"], valid_data_path=["b", "c"])
    assert parse_recipe(per_part).blends[2] is None and parse_recipe(per_part).split is None
    assert dataset_prefixes(per_part) == ["a", "b", "c"]
    assert dataset_prefixes(DataOptions(mock_data=True)) == []
    with pytest.raises(UserError, match="no data to train on"):
        parse_recipe(DataOptions())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_together_take_the_samples_in_order(ranks):
    taken = []
    for consumed in range(0, 48, 3 * ranks):
        for rank in range(ranks):
            taken += sample_indices(consumed, 3, rank, ranks)
    assert taken == list(range(48))


def test_permutations():
    one = epoch_permutation(1, 0, 1000)
    assert sorted(one) == list(range(1000))
    assert numpy.array_equal(one, epoch_permutation(1, 0, 1000))
    others = [epoch_permutation(*arguments, 1000) for arguments in ((1, 1), (2, 0), (1 << 40, 0), (1 + (1 << 32), 0))]
    assert all(not numpy.array_equal(one, other) for other in others)
    # The stream is part of the format of a run: a resumed run has to find it unchanged.
    assert epoch_permutation(1234, 7, 10).tolist() == [4, 8, 0, 3, 5, 1, 6, 2, 7, 9]


def test_cyclic_order_depends_on_position_alone():
    order, jumping = CyclicOrder(3, 10), CyclicOrder(3, 10)
    straight = order(range(50))
    for start in (45, 0, 17, 8, 33, 2):
        assert jumping(range(start, start + 5)) == straight[start : start + 5]
    for epoch in range(5):
        assert sorted(straight[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert straight[:10] != straight[10:20]
