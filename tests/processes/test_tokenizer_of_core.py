"""Tokenizers of megatron-core's library, from real files, against what core's own builder makes of the same flags."""

import argparse
import base64
import json
from pathlib import Path

import msgspec
import pytest
from pythons import python

from ft.base.errors import UserError
from megatron import patches
from megatron.ft_trainer.arguments.topics import TokenizerOptions
from megatron.ft_trainer.data.tokenizer import ByteLevelTokenizer, DatasetMeta, NullTokenizer, build_tokenizer

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


def hugging_face(folder) -> dict:
    """Train a small BPE, and write the folder that ``save_pretrained`` makes of it."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (pip install transformers)"
    )
    tokenizers = pytest.importorskip("tokenizers")
    pairs = tokenizers.ByteLevelBPETokenizer()
    pairs.train_from_iterator(TEXTS * 40, vocab_size=300, special_tokens=["</s>", "<pad>", "<stop>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=pairs._tokenizer, eos_token="<stop>", pad_token="<pad>"
    )
    fast.save_pretrained(str(folder / "hf"))
    return {"tokenizer_model": str(folder / "hf")}


def tik(folder) -> dict:
    pytest.importorskip("tiktoken", reason="tiktoken is not installed (pip install tiktoken)")
    words = [bytes([i]) for i in range(256)] + [b"th", b"the", b" q", b"re"]
    rows = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": word.decode("latin-1")}
        for rank, word in enumerate(words)
    ]
    (folder / "tik.json").write_text(json.dumps(rows))
    return {"tokenizer_model": str(folder / "tik.json"), "vocab_size": 1260}


def of_core(options: TokenizerOptions):
    """Return the tokenizer that megatron-core's own builder makes of these flags."""
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as builder
    except ImportError:
        from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer as builder
    unset = {"chat_template": None, "special_tokens": None, "metadata_path": None, "pad_vocab_size": False}
    unset |= {"tokenizer_metadata": None, "tokenizer_special_tokens": None, "tokenizer_sentencepiece_legacy": False}
    unset |= {"tokenizer_hf_use_fast": False, "tokenizer_hf_include_special_tokens": False, "trust_remote_code": False}
    unset |= {"tokenizer_sentencepiece_ignore_extra_whitespaces": True, "tiktoken_pattern": None}
    unset |= {"tokenizer_hf_no_use_fast": False, "tokenizer_hf_no_include_special_tokens": False}
    return builder(argparse.Namespace(**vars(options), **unset, tiktoken_num_special_tokens=1000))


KINDS = {
    "SentencePieceTokenizer": sentence_piece,
    "GPTSentencePieceTokenizer": sentence_piece,
    "Llama2Tokenizer": sentence_piece,
    "TikTokenizer": tik,
    "GPT2BPETokenizer": byte_pairs,
    "HuggingFaceTokenizer": hugging_face,
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


def of_folder(model: str):
    return build_tokenizer(TokenizerOptions(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model))


def changed(file: Path, change) -> None:
    """Change what a file of JSON holds."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_hugging_face_folder_names_its_special_tokens_is_found_again_and_known_by_its_files(tmp_path):
    folder = hugging_face(tmp_path)["tokenizer_model"]
    first = of_folder(folder)
    assert (first.eod, first.pad) == (2, 1)
    sidecar = DatasetMeta(first.kind, first.model, first.fingerprint, first.vocab_size, 0.0)
    (tmp_path / "words.meta.json").write_bytes(msgspec.json.encode(sidecar))
    assert build_tokenizer(TokenizerOptions(), str(tmp_path / "words")).model == folder
    changed(Path(folder, "tokenizer.json"), lambda content: content["model"]["merges"].pop())
    assert of_folder(folder).fingerprint != first.fingerprint
    changed(Path(folder, "tokenizer_config.json"), lambda content: content.update(pad_token="<stop>"))
    assert (of_folder(folder).eod, of_folder(folder).pad) == (2, -1), "padding is never the end of a document"


def test_fingerprints_differ_and_are_equal_in_other_processes():
    mine = [ByteLevelTokenizer().fingerprint, NullTokenizer(300).fingerprint, NullTokenizer(301).fingerprint]
    assert len(set(mine)) == 3
    code = (
        "from megatron.ft_trainer.data.tokenizer import *\n"
        "print(ByteLevelTokenizer().fingerprint, NullTokenizer(300).fingerprint, NullTokenizer(301).fingerprint)"
    )
    assert python("-c", code).stdout.split() == mine


def test_bad_hugging_face_folders(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match=r"no tokenizer file at .*absent"):
        of_folder(str(tmp_path / "absent"))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="give the folder that save_pretrained"):
        of_folder(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="megatron-core cannot build HuggingFaceTokenizer"):
        of_folder(str(tmp_path))
