"""Fill-in-the-middle samples (--fim-data): the middle of a text is moved behind its end, marked by special tokens.

A model that has learnt such samples can complete a text between two given parts. What happens to a sample is drawn from
the seed and the sample's index alone. A worker that takes the place of another, and a run that is resumed, thus read
the same samples; in Megatron-LM they depend on what the reading process has drawn before.
"""

import warnings
from collections.abc import Callable

import numpy

from ft.base.errors import UserError
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.ft_trainer.arguments.data import DataOptions
from megatron.ft_trainer.data.tokenizer import Tokenizer


def fill_in_the_middle(data: DataOptions) -> type[GPTDataset]:
    """Return a subclass of megatron-core's dataset whose samples are rearranged.

    Args:
        data: the --fim flags.
    """

    class FillInTheMiddleDataset(GPTDataset):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self._rearrange = Rearranged(data, self.config.tokenizer)

        def _query_document_sample_shuffle_indices(self, idx):
            ids, documents, *lengths = super()._query_document_sample_shuffle_indices(idx)
            random = numpy.random.default_rng([self.config.random_seed, self.index_split.value, int(idx)])
            # Releases from 0.17 on return the tokens of each document, too; documents are no longer apart.
            return (self._rearrange(ids, random), documents, *([len(ids)] for _ in lengths))

    return FillInTheMiddleDataset


class Rearranged:
    """Turns the documents of a sample into fill-in-the-middle documents, each with the probability --fim-rate.

    Args:
        data: the --fim flags.
        tokenizer: the tokenizer of the ids.

    Raises:
        UserError: the tokenizer lacks a token that the flags name.
    """

    def __init__(self, data: DataOptions, tokenizer: Tokenizer):
        self._data, self._tokenizer = data, tokenizer
        self._prefix, self._middle, self._suffix, self._pad, self._eod = (
            self._id(f"--fim-{name}-token", getattr(data, f"fim_{name}_token"))
            for name in ("prefix", "middle", "suffix", "pad", "eod")
        )
        if len({self._prefix, self._middle, self._suffix}) < 3:
            warnings.warn(
                f"the {tokenizer.kind} has one id for several of {data.fim_prefix_token}, {data.fim_middle_token}, "
                f"{data.fim_suffix_token}, so a model cannot tell them apart: name tokens of its vocabulary with "
                "--fim-prefix-token, ..., or add them with --tokenizer-special-tokens",
                stacklevel=2,
            )
        self._split = self._id("--fim-split-sample", data.fim_split_sample) if data.fim_split_sample else None

    def _id(self, flag: str, token: str) -> int:
        found = self._tokenizer.token_id(token)
        if found is None:
            raise UserError(
                f"{flag} {token}: the {self._tokenizer.kind} has no such token",
                f"give a token of its vocabulary with {flag}, or another tokenizer",
            )
        return found

    def __call__(self, ids: numpy.ndarray, random: numpy.random.Generator) -> numpy.ndarray:
        """Return the sample with rearranged documents, cut or padded to its old length: int64, of the shape of ``ids``.

        Args:
            ids: token ids of a sample, 1-D; documents are separated by the end-of-document token.
            random: generator that decides which documents are rearranged, and where they are cut.
        """
        found = _each(ids, self._eod, lambda part: self._document(part, random))[: len(ids)]
        padding = numpy.full(len(ids) - len(found), self._pad)
        return numpy.concatenate([found, padding]).astype(numpy.int64)

    def _document(self, ids: numpy.ndarray, random: numpy.random.Generator) -> numpy.ndarray:
        rate, fragment_rate = self._data.fim_rate, self._data.fim_fragment_rate
        if self._split is None or fragment_rate is None or self._split not in ids:
            return self._text(ids, rate, random)
        if random.random() >= rate:
            return ids
        return _each(ids, self._split, lambda part: self._text(part, fragment_rate, random))

    def _text(self, ids: numpy.ndarray, rate: float, random: numpy.random.Generator) -> numpy.ndarray:
        if random.random() >= rate:
            return ids
        text = self._tokenizer.detokenize(ids)
        if self._data.fim_no_prefix is not None and text.startswith(self._data.fim_no_prefix):
            return ids
        start, end = sorted(random.integers(0, len(text) + 1, 2))
        prefix, middle, suffix = (
            self._tokenizer.tokenize(part) for part in (text[:start], text[start:end], text[end:])
        )
        if random.random() < self._data.fim_spm_rate:
            parts = [[self._prefix, self._suffix], suffix, [self._middle], prefix, middle]
        else:
            parts = [[self._prefix], prefix, [self._suffix], suffix, [self._middle], middle]
        return numpy.concatenate([numpy.array(part, dtype=numpy.int64) for part in parts])


def _each(ids: numpy.ndarray, separator: int, change: Callable[[numpy.ndarray], numpy.ndarray]) -> numpy.ndarray:
    """Apply ``change`` to each non-empty part of ``ids`` between separators, and return all parts with the separators.

    Args:
        ids: token ids, 1-D.
        separator: the id that separates parts.
        change: function that returns the new ids of a part.
    """
    found = []
    for index, part in enumerate(numpy.split(ids, numpy.flatnonzero(ids == separator))):
        if index:
            found.append(part[:1])
            part = part[1:]
        if len(part):
            found.append(change(part))
    return numpy.concatenate(found)
