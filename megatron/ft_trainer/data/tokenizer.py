"""Tokenizers: convert text to token ids and back, and have a fingerprint that datasets store.

Every tokenizer has the attributes that megatron-core's ``GPTDataset`` reads (``eod``, ``eos``, ``pad``, ``vocab_size``,
``unique_identifiers``). ``GPTDataset`` replaces tokens equal to ``pad`` by 0 and leaves them out of the loss. So
``pad`` differs from ``eod`` and from the id of every token that text can contain. It is -1 if the vocabulary has no
such token.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import msgspec

from ft.base import files
from ft.base.errors import UserError
from megatron.ft_trainer.arguments.topics import OF_CORE, TokenizerOptions

NO_TOKEN = -1

_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"),
)
"""Names of the files of a HuggingFaceTokenizer's folder from which the ids of a text follow."""


class DatasetMeta(msgspec.Struct):
    """What ``tools/preprocess_data.py`` writes beside a dataset into ``P.meta.json``: how it was made.

    Attributes:
        tokenizer_type: value of --tokenizer-type.
        tokenizer_model: absolute path of the tokenizer's file, or None.
        fingerprint: fingerprint of the tokenizer.
        vocab_size: number of token ids.
        unigram_entropy: entropy of the token frequencies in nats per token: the loss of a model that predicts from
            these frequencies alone.
    """

    tokenizer_type: str
    tokenizer_model: str | None
    fingerprint: str
    vocab_size: int
    unigram_entropy: float


def read_sidecar(prefix: str) -> DatasetMeta | None:
    """Return the sidecar of a dataset; None if it has none (because Megatron-LM's own tool made it).

    Raises:
        UserError: the sidecar is unreadable.
    """
    path = Path(f"{prefix}.meta.json")
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(files.read(path), type=DatasetMeta)
    except (OSError, msgspec.DecodeError) as error:
        fix = "make the dataset again with tools/preprocess_data.py, or remove the file if the dataset is sound"
        raise UserError(f"{path} can't be read: {error}", fix) from error


class Tokenizer:
    """Interface of all tokenizers.

    Attributes:
        vocab_size: number of token ids before padding; every id is in [0, vocab_size).
        eod: id of the end-of-document token.
        pad: id that fills up a sample, or -1 if the vocabulary has none.
        model: path of the file that the tokenizer was read from; None if there is no file.
    """

    vocab_size: int
    eod: int
    pad: int
    model: str | None = None

    @property
    def kind(self) -> str:
        """Return the value of --tokenizer-type."""
        return type(self).__name__

    @property
    def eos(self) -> int:
        return self.eod

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens around them."""
        raise NotImplementedError

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens."""
        raise NotImplementedError

    @cached_property
    def fingerprint(self) -> str:
        """Return a SHA-256 (hex) of everything that determines the ids of a text; it is equal in every process."""
        text = json.dumps([self.kind, self.vocab_size, self.eod, self.pad, self._segmentation()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def unique_identifiers(self) -> OrderedDict:
        """Return the values that megatron-core hashes into the names of its index caches."""
        return OrderedDict({"class": self.kind, "fingerprint": self.fingerprint})

    def _segmentation(self):
        """Return a description (JSON values) of the vocabulary and of how text is split."""
        return None


class ByteLevelTokenizer(Tokenizer):
    """UTF-8 bytes have ids 0..255; special tokens follow: 256 end of document, 257 padding, 258 begin of text.

    The special ids are above the bytes, so no text can contain one, and every text is restored unchanged.
    (Megatron-LM's tokenizer of this name uses bytes 0 and 1 for end of document and padding.)
    """

    vocab_size = 259
    eod = 256
    pad = 257
    bos = 258

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")

    def _segmentation(self):
        return {"bytes": "utf-8", "bos": self.bos}


class NullTokenizer(Tokenizer):
    """Text is token ids in decimal, separated by white space; for tokenised data and for benchmarks.

    As in Megatron-LM since 0.17, the vocabulary has exactly ``vocab_size`` ids, and the last one ends a document
    (earlier versions added one more id for it: give them ``vocab_size`` - 1 to get the same ids).
    """

    pad = NO_TOKEN

    def __init__(self, vocab_size: int):
        if vocab_size < 2:
            raise UserError(f"--vocab-size {vocab_size} leaves no id beside end of document", "give at least 2")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def tokenize(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise UserError(
                    f"NullTokenizer reads token ids in [0, {self.vocab_size}), found {word[:40]!r}",
                    "give text of ids separated by spaces, or another --tokenizer-type or --vocab-size",
                )
            ids.append(int(word))
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


class CoreTokenizer(Tokenizer):
    """A tokenizer of megatron-core's library, with the library's defaults.

    Args:
        options: flags of the tokenizer.
        kind: GPT2BPETokenizer, SentencePieceTokenizer, ..., a key of ``OF_CORE``.
        model: path of its file, or of a HuggingFaceTokenizer's folder; None for a GPT2BPETokenizer, which has two.

    Raises:
        UserError: its files or its package are missing, or megatron-core cannot read the files.
    """

    def __init__(self, options: TokenizerOptions, kind: str, model: str | None):
        from megatron.core.tokenizers import MegatronTokenizer

        self._kind, self.model = kind, str(Path(model).absolute()) if model else None
        self._files = [file for file in (model, options.vocab_file, options.merge_file) if file is not None]
        for file in self._files:
            if not Path(file).exists():
                raise UserError(f"no tokenizer file at {file}", "check --tokenizer-model, --vocab-file, --merge-file")
        self._given, library = _given_to_core(options, kind), {"library": OF_CORE[kind]}
        path = kind if OF_CORE[kind] == "megatron" else model
        try:
            self._tokenizer = MegatronTokenizer.from_pretrained(path, library, **self._given)
            self.vocab_size, self.eod = self._tokenizer.vocab_size, self._tokenizer.eod
        except Exception as error:  # the libraries raise exceptions of many kinds
            fixes = {
                # megatron-core passes the merges under a name that the library does not know: it takes the hub's
                "GPT2BPETokenizer": "; without a network, the Hugging Face cache or a folder gpt2 has to hold it",
                "HuggingFaceTokenizer": ": give the folder that save_pretrained of its transformers tokenizer writes",
            }
            fix = f"check the tokenizer's files{fixes.get(kind, '')}"
            raise UserError(f"megatron-core cannot build {kind}: {error}", fix) from error
        pad = self._tokenizer.pad
        self.pad = NO_TOKEN if pad is None or pad == self.eod or not 0 <= pad < self.vocab_size else pad

    @property
    def kind(self) -> str:
        return self._kind

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.tokenize(text)

    def detokenize(self, ids: Iterable[int]) -> str:
        return self._tokenizer.detokenize([int(i) for i in ids])

    def _segmentation(self):
        files = [each for path in self._files for each in (Path(path), *(Path(path, name) for name in _FILES))]
        digests = [hashlib.sha256(each.read_bytes()).hexdigest() for each in files if each.is_file()]
        return [digests, {name: value for name, value in self._given.items() if not name.endswith("_file")}]


def _given_to_core(options: TokenizerOptions, kind: str) -> dict:
    """Return the arguments, except the file, from which megatron-core's library creates a tokenizer."""
    if kind == "GPT2BPETokenizer":
        files = {"vocab_file": options.vocab_file, "merges_file": options.merge_file}
        return {**files, "additional_special_tokens": [], "trust_remote_code": False}
    if kind == "HuggingFaceTokenizer":
        return {"trust_remote_code": False}
    if kind == "TikTokenizer":
        size = {} if options.vocab_size is None else {"vocab_size": options.vocab_size}
        return {**size, "num_special_tokens": 1000}
    return {"special_tokens": None, "legacy": False}


def build_tokenizer(options: TokenizerOptions, prefix: str | None = None) -> Tokenizer:
    """Return the tokenizer that the flags name, else the one of the dataset at ``prefix``, else the byte-level one.

    Raises:
        UserError: a file is missing or unreadable, the vocabulary's size is not --vocab-size, or the dataset was made
            with another tokenizer.
    """
    sidecar = read_sidecar(prefix) if prefix is not None else None
    kind = options.tokenizer_type or (sidecar.tokenizer_type if sidecar else "ByteLevelTokenizer")
    tokenizer = _build(kind, options, sidecar if sidecar and sidecar.tokenizer_type == kind else None)
    if kind not in ("NullTokenizer", "TikTokenizer") and options.vocab_size not in (None, tokenizer.vocab_size):
        raise UserError(
            f"--vocab-size is {options.vocab_size} but {_named(tokenizer)} has {tokenizer.vocab_size} ids",
            f"drop --vocab-size or give {tokenizer.vocab_size}",
        )
    if sidecar and sidecar.fingerprint != tokenizer.fingerprint:
        made = f"{sidecar.tokenizer_type} {sidecar.tokenizer_model or ''}".strip()
        raise UserError(
            f"{prefix} was made with {made} (fingerprint {sidecar.fingerprint[:12]}, {sidecar.vocab_size} ids), "
            f"this run has {_named(tokenizer)} (fingerprint {tokenizer.fingerprint[:12]}, {tokenizer.vocab_size} ids)",
            "use the dataset's tokenizer, or make the dataset again with tools/preprocess_data.py",
        )
    return tokenizer


def padded_vocab_size(options: TokenizerOptions, vocab_size: int, tensor_parallel_size: int) -> int:
    """Return the number of rows of the embedding: --padded-vocab-size, else ``vocab_size`` padded according to
    --make-vocab-size-divisible-by.

    Raises:
        UserError: --padded-vocab-size is smaller than the vocabulary, or cannot be split over the ranks.
    """
    padded = options.padded_vocab_size
    if padded is None:
        multiple = options.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-vocab_size // multiple) * multiple
    if padded < vocab_size or padded % tensor_parallel_size:
        raise UserError(
            f"--padded-vocab-size {padded} has to hold {vocab_size} ids and be divisible by the tensor-parallel size "
            f"{tensor_parallel_size}",
            "drop it, or give such a number",
        )
    return padded


def _build(kind: str, options: TokenizerOptions, sidecar: DatasetMeta | None) -> Tokenizer:
    if kind == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if kind == "NullTokenizer":
        return NullTokenizer(options.vocab_size or sidecar.vocab_size)
    model = options.tokenizer_model or (sidecar.tokenizer_model if sidecar else None)
    if kind not in OF_CORE or (model is None and kind != "GPT2BPETokenizer"):
        raise UserError(f"the dataset was made with {kind}", "add --tokenizer-model with its file, or make it again")
    return CoreTokenizer(options, kind, model)


def _named(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.kind} {tokenizer.model or ''}".strip()
