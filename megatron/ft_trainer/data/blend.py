"""Parses the data flags: the datasets of a run, their weights, and the split into train, validation and test parts."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.topics import DataOptions

PARTS = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"

_NUMBER = re.compile(r"\d+\.?\d*|\.\d+")


@dataclass(frozen=True)
class Blend:
    """A mixture of datasets. Without weights, each dataset is read once, so that its share is its size.

    Attributes:
        flag: the flag that specified the blend.
        prefixes: paths of the datasets without suffix.
        weights: one positive number for each dataset, or None.
    """

    flag: str
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Recipe:
    """The data of a run: one blend whose documents are split into train, validation and test part, or a blend per part.

    Attributes:
        blends: the blends of the train, validation and test part; None for a part without data. With ``split`` all
            three are the same.
        split: shares of the documents for the three parts in megatron-core's format; None if each part has its own
            blend.
    """

    blends: tuple[Blend | None, Blend | None, Blend | None]
    split: str | None

    @property
    def prefixes(self) -> list[str]:
        """Return the prefixes of all datasets, each once, in the order of the flags."""
        return list(dict.fromkeys(prefix for blend in self.blends if blend for prefix in blend.prefixes))


def parse_recipe(data: DataOptions) -> Recipe:
    """Parse the data flags. Nothing is read from disk.

    Raises:
        UserError: there is no data, or a blend or split is invalid.
    """
    if data.data_path:
        blend = parse_blend("--data-path", data.data_path)
        return Recipe((blend, blend, blend), parse_split(data.split or DEFAULT_SPLIT))
    words = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if not any(words):
        raise UserError("no data to train on", "add --data-path PREFIX, or --mock-data for synthetic samples")
    blends = [parse_blend(f"--{part}-data-path", w) if w else None for part, w in zip(PARTS, words, strict=True)]
    return Recipe(tuple(blends), None)


def dataset_prefixes(data: DataOptions) -> list[str]:
    """Return the datasets that a run reads, each once; none with --mock-data."""
    return [] if data.mock_data else parse_recipe(data).prefixes


def parse_blend(flag: str, words: Sequence[str]) -> Blend:
    """Parse the words of a flag: prefixes only, or weights and prefixes in turn.

    Raises:
        UserError: weights and prefixes do not alternate, or a weight is not a positive finite number.
    """
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return Blend(flag, tuple(word.strip() for word in words))
    weights, prefixes = numbers[::2], words[1::2]
    if len(words) % 2 or None in weights:
        at = next((2 * i for i, weight in enumerate(weights) if weight is None), len(words) - 1)
        raise UserError(
            f"{flag} mixes weights and prefixes: word {at + 1} of {len(words)} is {words[at]!r}",
            "give weight prefix weight prefix ..., or prefixes alone",
        )
    for weight, prefix in zip(weights, prefixes, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"{flag} gives {prefix} the weight {weight}", "give a weight above 0, or drop the dataset")
    return Blend(flag, tuple(prefix.strip() for prefix in prefixes), tuple(weights))


def parse_split(text: str) -> str:
    """Check --split and return it in a form that megatron-core reads correctly (it silently drops signs and exponents).

    Raises:
        UserError: there are not one to three shares >= 0, or their sum is 0.
    """
    shares = [share.strip() for share in text.split(",")]
    if not 1 <= len(shares) <= 3 or not all(_NUMBER.fullmatch(share) for share in shares):
        raise UserError(f"--split is {text!r}", "give up to three shares, for train, valid and test: 969,30,1")
    if not sum(map(float, shares)):
        raise UserError(f"--split {text} gives no part any documents", "give train a share above 0")
    return ",".join(shares)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
