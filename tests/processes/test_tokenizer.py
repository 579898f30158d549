"""Tokenizers: round trips, special tokens, fingerprints, and every way in which they can be given wrongly."""

import subprocess
import sys

import msgspec
import pytest

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.topics import TokenizerOptions
from megatron.ft_trainer.data.tokenizer import (
    ByteLevelTokenizer,
    DatasetMeta,
    NullTokenizer,
    build_tokenizer,
    padded_vocab_size,
)


def write_sidecar(prefix, tokenizer):
    sidecar = DatasetMeta(tokenizer.kind, tokenizer.model, tokenizer.fingerprint, tokenizer.vocab_size, 0.0)
    prefix.with_suffix(".meta.json").write_bytes(msgspec.json.encode(sidecar))
    return str(prefix)


@pytest.mark.parametrize("text", ["", "plain", "naïve — 漢字 🙂", "\x00\x01 tab\t", "".join(map(chr, range(0x250)))])
def test_bytes_come_back(text):
    tokenizer = ByteLevelTokenizer()
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert all(i < 256 for i in ids)


def test_special_bytes_are_no_text():
    tokenizer = ByteLevelTokenizer()
    specials = {tokenizer.eod, tokenizer.pad, tokenizer.bos}
    assert len(specials) == 3 and min(specials) > 255 and max(specials) == tokenizer.vocab_size - 1
    assert tokenizer.detokenize([104, 105, tokenizer.eod, tokenizer.pad]) == "hi"


def test_null_tokenizer_has_eod_as_its_last_id():
    tokenizer = NullTokenizer(100)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (100, 99, -1)
    assert tokenizer.tokenize("1 2\n98") == [1, 2, 98]
    assert tokenizer.detokenize([1, 2]) == "1 2"


@pytest.mark.parametrize("text", ["1 two", "1 100", "-1", "1.5"])
def test_null_tokenizer_refuses_what_is_no_id(text):
    with pytest.raises(UserError, match=r"\[0, 100\)"):
        NullTokenizer(100).tokenize(text)


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


def test_vocab_size_is_checked():
    assert build_tokenizer(TokenizerOptions(vocab_size=259)).vocab_size == 259
    with pytest.raises(UserError, match="--vocab-size is 256 but ByteLevelTokenizer has 259"):
        build_tokenizer(TokenizerOptions(vocab_size=256))


@pytest.mark.parametrize(
    ("size", "divisible_by", "tp", "padded"), [(259, 128, 1, 384), (259, 128, 2, 512), (512, 128, 4, 512), (1, 1, 1, 1)]
)
def test_padded_vocab_size(size, divisible_by, tp, padded):
    options = TokenizerOptions(make_vocab_size_divisible_by=divisible_by)
    assert padded_vocab_size(options, size, tp) == padded


def test_padded_vocab_size_that_is_given():
    assert padded_vocab_size(TokenizerOptions(padded_vocab_size=300), 259, 2) == 300
    for given in (258, 301):
        with pytest.raises(UserError, match=f"--padded-vocab-size {given} has to hold 259 ids"):
            padded_vocab_size(TokenizerOptions(padded_vocab_size=given), 259, 2)
