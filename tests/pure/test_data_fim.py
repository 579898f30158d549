"""Fill-in-the-middle samples: the parts of a document are rearranged, and a sample depends on its index alone."""

# ruff: noqa: E402 - megatron-core is imported after the patches

import numpy
import pytest

from ft.base.errors import UserError
from megatron import patches

patches.apply()

from small_datasets import SEQ, write_dataset

from megatron.ft_trainer.arguments import parse
from megatron.ft_trainer.arguments.data import DataOptions
from megatron.ft_trainer.data.datasets import build_datasets
from megatron.ft_trainer.data.fim import Rearranged
from megatron.ft_trainer.data.tokenizer import ByteLevelTokenizer, HuggingFaceTokenizer

MARKS = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<|endoftext|>", "<file>"]
TEXT = "def f(x):\n    return x + 1\n"


@pytest.fixture
def tokenizer(tmp_path):
    """Every byte is a token; the ids of the marks follow."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    found = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens(MARKS)
    found.save(str(tmp_path / "tokenizer.json"))
    return HuggingFaceTokenizer(str(tmp_path / "tokenizer.json"))


def rearranged(tokenizer, ids, seed=0, **flags):
    given = DataOptions(fim_data=True, **flags)
    return Rearranged(given, tokenizer)(numpy.array(ids), numpy.random.default_rng(seed))


def parts(tokenizer, ids):
    """Return name of a mark -> the text behind it."""
    found, at = {}, None
    for i in ids:
        if i >= 256:
            at = MARKS[i - 256]
            found[at] = []
        else:
            found[at].append(i)
    return {mark: tokenizer.detokenize(text) for mark, text in found.items()}


@pytest.mark.parametrize("spm", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_parts_of_a_document_make_it_up_again(tokenizer, spm, seed):
    document = tokenizer.tokenize(TEXT)
    room = [tokenizer.token_id("<|endoftext|>")] * 4  # empty documents, which are left as they are
    ids = rearranged(tokenizer, document + room, seed, fim_rate=1.0, fim_spm_rate=spm)
    assert len(ids) == len(document) + 4
    assert [i for i in ids if 256 <= i < 259] == [256, 258, 257]
    found = parts(tokenizer, ids[: len(document) + 3])
    assert found["<fim_prefix>"] + found["<fim_middle>"] + found["<fim_suffix>"] == TEXT
    assert not spm or found["<fim_prefix>"] == ""  # then prefix and middle follow each other without a mark


def test_documents_stay_apart_and_keep_the_samples_length(tokenizer):
    eod = tokenizer.token_id("<|endoftext|>")
    document = tokenizer.tokenize("abcd")
    ids = rearranged(tokenizer, [*document, eod, *document, eod, *document], fim_rate=1.0)
    assert len(ids) == 14 and list(ids).index(eod) == 7
    assert rearranged(tokenizer, document, fim_rate=0.0).tolist() == document


def test_fragments_have_middles_of_their_own(tokenizer):
    split = tokenizer.token_id("<file>")
    document = [*tokenizer.tokenize("keep this"), split, *tokenizer.tokenize("abcd")]
    flags = {"fim_rate": 1.0, "fim_split_sample": "<file>", "fim_fragment_rate": 1.0, "fim_no_prefix": "keep"}
    ids = rearranged(tokenizer, document, **flags).tolist()
    assert ids[:10] == document[:10] and ids[10] == tokenizer.token_id("<fim_prefix>") and len(ids) == len(document)


def test_a_sample_depends_on_its_index_alone(tokenizer, tmp_path):
    prefix = write_dataset(tmp_path / "a", 60)

    def build(**flags):
        data = DataOptions(seq_length=SEQ, data_path=[prefix], split="8,1,1", **flags)
        return build_datasets(data, tokenizer, 7, (100, 10, 0))[0]

    first, second, plain = build(fim_data=True, fim_rate=0.7), build(fim_data=True, fim_rate=0.7), build()
    forwards = [first[i]["tokens"].tolist() for i in range(len(first))]
    backwards = [second[i]["tokens"].tolist() for i in reversed(range(len(second)))]
    assert forwards == backwards[::-1]
    changed = sum(ids != plain[i]["tokens"].tolist() for i, ids in enumerate(forwards))
    assert 0.5 * len(plain) < changed < len(plain)


def test_a_tokenizer_without_the_marks_is_refused():
    with pytest.raises(UserError, match="--fim-prefix-token <fim_prefix>: the ByteLevelTokenizer has no such token"):
        rearranged(ByteLevelTokenizer(), [1, 2])


@pytest.mark.parametrize(
    "flags", ["--mock-data --fim-data", "--fim-data --fim-rate 1.5", "--fim-data --fim-split-sample <file>"]
)
def test_flags_that_cannot_work_are_refused(flags):
    with pytest.raises(UserError):
        parse(flags)
