"""Flags of the training data and its tokenizer."""

from dataclasses import dataclass
from typing import Literal

from ft.base.errors import UserError

OF_CORE = {
    "GPT2BPETokenizer": "megatron",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}
"""Value of --tokenizer-type -> name of the library in megatron-core's tokenizers that reads its files."""

TOKENIZERS = ("ByteLevelTokenizer", "HuggingFaceTokenizer", "NullTokenizer", *OF_CORE)


@dataclass
class DataOptions:
    """data and dataloader"""

    data_path: list[str] | None = None
    """Indexed dataset prefix, or a blend: weight prefix weight prefix ... (or prefixes alone, weighted by size)."""

    split: str | None = None
    """Comma-separated shares of documents for train, valid and test, e.g. 969,30,1."""

    train_data_path: list[str] | None = None
    """Blend for training only; with it give --valid-data-path and --test-data-path and no --data-path."""

    valid_data_path: list[str] | None = None
    """Blend for validation only."""

    test_data_path: list[str] | None = None
    """Blend for testing only."""

    data_cache_path: str | None = None
    """Folder for the sample indices; default: a cache folder beside the data."""

    mock_data: bool = False
    """Train on synthetic samples; needs no data path."""

    seq_length: int | None = None
    """Tokens in a sample."""

    num_workers: int = 2
    """Threads that read samples ahead of the training loop; 0 reads inside it."""

    reset_position_ids: bool = False
    """Start position ids afresh after every end-of-document token."""

    reset_attention_mask: bool = False
    """Let no token attend across an end-of-document token."""

    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""

    dataloader_type: Literal["single", "cyclic"] | None = None
    """single (default): one pass in a seeded order; cyclic: reshuffled after every pass."""

    def __post_init__(self):
        per_split = [self.train_data_path, self.valid_data_path, self.test_data_path]
        if self.data_path and any(per_split):
            raise UserError(
                "--data-path and --train/valid/test-data-path were both given",
                "use --data-path with --split, or one path per split",
            )
        if self.split and any(per_split):
            raise UserError("--split has no meaning with one data path per split", "drop --split")
        if self.mock_data and (self.data_path or any(per_split)):
            raise UserError("--mock-data was given together with data paths", "drop one of them")
        if self.seq_length is not None and self.seq_length < 1:
            raise UserError(f"--seq-length is {self.seq_length}", "give at least 1")


@dataclass
class TokenizerOptions:
    """tokenizer"""

    tokenizer_type: Literal[TOKENIZERS] | None = None
    """ByteLevelTokenizer (256 bytes + special tokens), HuggingFaceTokenizer (a local tokenizers file), NullTokenizer
    (token ids are numbers), or one of megatron-core's library. Default: what the dataset was made with; with
    --vocab-file and --merge-file GPT2BPETokenizer, else ByteLevelTokenizer."""

    tokenizer_model: str | None = None
    """File of the tokenizer, or folder of a HuggingFaceTokenizer."""

    vocab_file: str | None = None
    """Vocabulary of a GPT2BPETokenizer."""

    merge_file: str | None = None
    """Merges of a GPT2BPETokenizer."""

    vocab_size: int | None = None
    """Size of the vocabulary before padding; needed by NullTokenizer, checked against the others."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""

    padded_vocab_size: int | None = None
    """Padded vocabulary size to use instead of computing it."""

    def __post_init__(self):
        if self.tokenizer_type == "HuggingFaceTokenizer" and not self.tokenizer_model:
            raise UserError("HuggingFaceTokenizer needs its file", "add --tokenizer-model /path/to/tokenizer.json")
        if self.tokenizer_type == "NullTokenizer" and not self.vocab_size:
            raise UserError("NullTokenizer needs the number of token ids", "add --vocab-size N")
        if self.tokenizer_type is None and self.vocab_file and self.merge_file:
            self.tokenizer_type = "GPT2BPETokenizer"
        if self.tokenizer_type == "GPT2BPETokenizer" and not (self.vocab_file and self.merge_file):
            raise UserError("GPT2BPETokenizer needs its files", "add --vocab-file FILE --merge-file FILE")
        if self.tokenizer_type in OF_CORE and self.tokenizer_type != "GPT2BPETokenizer" and not self.tokenizer_model:
            raise UserError(f"{self.tokenizer_type} needs its file", "add --tokenizer-model FILE")
