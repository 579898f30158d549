"""Tokenizers of megatron-core's library, from real files, against what core's own builder makes of the same flags."""

import argparse
import base64
import json

import pytest

from ft.base.errors import UserError
from megatron import patches
from megatron.ft_trainer.arguments.data import TokenizerOptions
from megatron.ft_trainer.data.tokenizer import build_tokenizer

TEXTS = ["def f(x):\n    return x + 1", "the quick brown fox jumps over the lazy dog", "words, and numbers 123 456"]


@pytest.fixture(autouse=True)
def patched():
    patches.apply()


def sentence_piece(folder) -> dict:
    library = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed (pip install sentencepiece)")
    (folder / "text").write_text("\n".join(TEXTS * 40))
    given = {"input": str(folder / "text"), "model_prefix": str(folder / "pieces")}
    library.SentencePieceTrainer.train(**given, vocab_size=45, hard_vocab_limit=False, pad_id=3, minloglevel=2)
    return {"tokenizer_model": str(folder / "pieces.model")}


def byte_pairs(folder) -> dict:
    """Write the files of a GPT2BPETokenizer, also as a folder gpt2, the name by which core asks for configuration and
    merges.
    """
    pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
    library = pytest.importorskip("tokenizers")
    pairs = library.ByteLevelBPETokenizer()
    pairs.train_from_iterator(TEXTS * 40, vocab_size=300, special_tokens=["<|endoftext|>"])
    (folder / "gpt2").mkdir()
    (folder / "gpt2/config.json").write_text('{"model_type": "gpt2"}')
    for each in (folder, folder / "gpt2"):
        pairs.save_model(str(each))
    return {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}


def tik(folder) -> dict:
    pytest.importorskip("tiktoken", reason="tiktoken is not installed (pip install tiktoken)")
    words = [bytes([i]) for i in range(256)] + [b"th", b"the", b" q", b"re"]
    rows = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": word.decode("latin-1")}
        for rank, word in enumerate(words)
    ]
    (folder / "tik.json").write_text(json.dumps(rows))
    return {"tokenizer_model": str(folder / "tik.json"), "vocab_size": 300, "tiktoken_num_special_tokens": 40}


def of_core(options: TokenizerOptions):
    """Return the tokenizer that megatron-core's own builder makes of these flags."""
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as builder
    except ImportError:
        from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer as builder
    # the names and defaults of releases from 0.19 on
    newer = {"chat_template": None, "special_tokens": options.tokenizer_special_tokens, "metadata_path": None}
    newer |= {"tokenizer_sentencepiece_ignore_extra_whitespaces": True, "pad_vocab_size": False}
    newer |= {"tokenizer_hf_no_use_fast": False, "tokenizer_hf_no_include_special_tokens": False}
    return builder(argparse.Namespace(**vars(options), **newer))


KINDS = {
    "SentencePieceTokenizer": sentence_piece,
    "GPTSentencePieceTokenizer": sentence_piece,
    "Llama2Tokenizer": sentence_piece,
    "TikTokenizer": tik,
    "GPT2BPETokenizer": byte_pairs,
}


@pytest.mark.newest
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_cores_own_builder(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = TokenizerOptions(tokenizer_type=kind, **KINDS[kind](tmp_path))
    ours, theirs = build_tokenizer(options), of_core(options)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)
    for text in [*TEXTS, "", "naïve — 漢字"]:
        assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours.detokenize(ours.tokenize(TEXTS[1])).strip() == TEXTS[1]
    assert build_tokenizer(options).fingerprint == ours.fingerprint


def test_the_legacy_way_of_sentence_piece_is_passed_on(tmp_path):
    """It has no end-of-document token, in megatron-core's own builder too, so that a run is refused."""
    options = TokenizerOptions(
        tokenizer_type="Llama2Tokenizer",
        tokenizer_sentencepiece_legacy=True,
        tokenizer_special_tokens=["<sep>"],
        **sentence_piece(tmp_path),
    )
    with pytest.raises(AttributeError, match="has no attribute 'eod'"):
        _ = of_core(options).eod
    with pytest.raises(UserError, match=r"cannot build Llama2Tokenizer.*has no attribute 'eod'"):
        build_tokenizer(options)


def test_a_type_that_this_release_of_core_lacks_is_named(tmp_path):
    from megatron.core.tokenizers.text.text_tokenizer import TOKENIZER_MAPPING_LIBRARIES

    if "sft" in TOKENIZER_MAPPING_LIBRARIES:
        pytest.skip("this release of megatron-core has all types")
    with pytest.raises(UserError, match="has no SFTTokenizer"):
        build_tokenizer(TokenizerOptions(tokenizer_type="SFTTokenizer", tokenizer_model=str(tmp_path)))
