"""Tokenizers: round trips, special tokens, fingerprints, and every way in which they can be given wrongly."""

import subprocess
import sys

import msgspec
import pytest

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.topics import TokenizerOptions
from megatron.ft_trainer.data.tokenizer import (
    ByteLevelTokenizer,
    NullTokenizer,
    Sidecar,
    build_tokenizer,
)


def write_sidecar(prefix, tokenizer):
    sidecar = Sidecar(tokenizer.kind, tokenizer.model, tokenizer.fingerprint, tokenizer.vocab_size, 0.0)
    prefix.with_suffix(".meta.json").write_bytes(msgspec.json.encode(sidecar))
    return str(prefix)


def test_fingerprints_differ_and_are_equal_in_other_processes():
    mine = [ByteLevelTokenizer().fingerprint, NullTokenizer(300).fingerprint, NullTokenizer(301).fingerprint]
    assert len(set(mine)) == 3
    code = (
        "from megatron.ft_trainer.data.tokenizer import *\n"
        "print(ByteLevelTokenizer().fingerprint, NullTokenizer(300).fingerprint, NullTokenizer(301).fingerprint)"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == mine


def test_default_is_what_the_dataset_was_made_with(tmp_path):
    assert build_tokenizer(TokenizerOptions()).kind == "ByteLevelTokenizer"
    prefix = write_sidecar(tmp_path / "numbers", NullTokenizer(50))
    tokenizer = build_tokenizer(TokenizerOptions(), prefix)
    assert (tokenizer.kind, tokenizer.vocab_size) == ("NullTokenizer", 50)
    assert build_tokenizer(TokenizerOptions(), str(tmp_path / "without sidecar")).kind == "ByteLevelTokenizer"


def test_another_tokenizer_than_the_datasets(tmp_path):
    prefix = write_sidecar(tmp_path / "numbers", NullTokenizer(50))
    with pytest.raises(UserError, match=r"numbers was made with NullTokenizer .*this run has ByteLevelTokenizer"):
        build_tokenizer(TokenizerOptions(tokenizer_type="ByteLevelTokenizer"), prefix)
    with pytest.raises(UserError, match=r"50 ids.*60 ids"):
        build_tokenizer(TokenizerOptions(tokenizer_type="NullTokenizer", vocab_size=60), prefix)
