"""tools/preprocess_data.py: text in, indexed dataset out, whole or not at all."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ft.base.errors import UserError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.ft_trainer.data.datasets import read_lengths
from megatron.ft_trainer.data.tokenizer import read_sidecar
from tools.preprocess_data import preprocess

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "preprocess_data.py"
EOD = 256


def run(*words, **kwargs):
    command = [sys.executable, str(TOOL), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, **kwargs)


def make(folder, *words):
    """Preprocesses in this process; returns (documents as lists of ids, the tool's sentence, skipped)."""
    prefix = str(folder / "out")
    facts, skipped = preprocess(["--output-prefix", prefix, "--input", *map(str, words)])
    return documents(prefix), facts, skipped


def documents(prefix):
    read_lengths(prefix)
    return [document.tolist() for document in IndexedDataset(prefix)]


def texts(prefix):
    return [bytes(d[:-1]).decode() for d in documents(prefix)]


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "src"
    for name, text in {
        "b.py": "b = 1\n",
        "a/z.py": "z = 'ü'\n",
        "a/notes.txt": "notes\n",
        "test/t.py": "t\n",
        ".hidden/h.py": "h\n",
        "__pycache__/c.py": "c\n",
        "a/empty.py": " \n",
        "lines.jsonl": '{"text": "one"}\n\n{"text": "two"}',
        "package.json": '{\n "name": "a document, not lines"\n}',
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "image.bin").write_bytes(b"\x89PNG\0\0")
    (root / "latin.txt").write_bytes("é".encode("latin-1"))
    os.symlink(root / "nowhere", root / "dangling")
    return root


def test_folder_in_order_what_is_skipped_and_what_the_sidecar_says(tmp_path, folder):
    docs, facts, skipped = make(tmp_path, folder)
    found = texts(str(tmp_path / "out"))
    assert [text.split()[0] for text in found] == ["notes", "z", "b", "one", "two", "{", "t"]
    assert skipped == {"binary": 1, "not UTF-8": 1, "empty": 1}
    ids = [i for d in docs for i in d]
    assert "7 documents" in facts and f"{len(ids)} tokens" in facts
    entropy = -sum(n / len(ids) * math.log(n / len(ids)) for n in Counter(ids).values())
    sidecar = read_sidecar(str(tmp_path / "out"))
    assert (sidecar.tokenizer_type, sidecar.vocab_size) == ("ByteLevelTokenizer", 259)
    assert sidecar.unigram_entropy == pytest.approx(entropy, rel=1e-12)


def test_include_and_exclude(tmp_path, folder):
    make(tmp_path, folder, "--include", "*.py", "--exclude", "test", "a/e*")
    assert texts(str(tmp_path / "out")) == ["z = 'ü'\n", "b = 1\n"]


def test_end_of_document_is_on_unless_switched_off(tmp_path, folder):
    assert all(d[-1] == EOD for d in make(tmp_path, folder)[0])
    docs, _, _ = make(tmp_path, folder, "--no-append-eod")
    assert EOD not in [i for d in docs for i in d]


def test_a_limit_in_the_order_of_the_input(tmp_path):
    lines = [json.dumps({"text": f"document {i} " * (i % 7 + 1)}) for i in range(200)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    docs, _, _ = make(tmp_path, tmp_path / "c.jsonl", "--max-mb", 0.005)
    assert 5000 <= sum(len(d) - 1 for d in docs) < 5100


def test_shuffle_is_seeded_and_keeps_all(tmp_path, folder):
    plain, _, _ = make(tmp_path, folder)
    once, first, _ = make(tmp_path, folder, "--shuffle-seed", 5)
    again, second, _ = make(tmp_path, folder, "--shuffle-seed", 5)
    assert once == again and first == second
    assert once != plain and sorted(once) == sorted(plain)
    assert make(tmp_path, folder, "--shuffle-seed", 6)[0] != once


def test_limit_keeps_whole_documents(tmp_path, folder):
    everything = make(tmp_path, folder, "--shuffle-seed", 5)[0]
    some = make(tmp_path, folder, "--shuffle-seed", 5, "--max-mb", 12e-6)[0]
    assert some == everything[: len(some)] and 0 < len(some) < len(everything)


def test_null_tokenizer_takes_ids(tmp_path):
    (tmp_path / "ids.txt").write_text("5 6 7\n70000")
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size")
    assert make(tmp_path, tmp_path / "ids.txt", *null, 70002)[0] == [[5, 6, 7, 70000, 70001]]
    with pytest.raises(UserError, match=r"ids\.txt: NullTokenizer reads token ids"):
        make(tmp_path, tmp_path / "ids.txt", *null, 10)


BAD_LINES = {
    '{"text": "fine"}\n\nnot json': r"c\.jsonl:3: not valid JSON",
    '{"text": "fine"}\n{"body": "x"}': r"c\.jsonl:2: no text under 'text'; it has 'body'",
    '{"text": 5}': r"c\.jsonl:1: no text under 'text'",
    '["text"]': r"c\.jsonl:1: not valid JSON with an object a line",
}


@pytest.mark.parametrize("content", BAD_LINES)
def test_bad_lines_are_located(tmp_path, content):
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(UserError, match=BAD_LINES[content]):
        make(tmp_path, tmp_path / "c.jsonl")
    assert sorted(os.listdir(tmp_path)) == ["c.jsonl"]


def test_nothing_to_read(tmp_path, folder):
    with pytest.raises(UserError, match="nowhere can't be read: No such file"):
        make(tmp_path, tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no files that match"):
        make(tmp_path, folder, "--include", "*.c")
    with pytest.raises(UserError, match=r"holds no documents \(1 binary\)"):
        make(tmp_path, folder / "image.bin")
    assert sorted(os.listdir(tmp_path)) == ["src"]


def test_input_is_not_overwritten(tmp_path):
    (tmp_path / "out.bin").write_text("text")
    with pytest.raises(UserError, match=r"out\.bin is both input and output"):
        make(tmp_path, tmp_path / "out.bin")
    (tmp_path / "out.json").write_text('{"text": "a corpus"}')
    make(tmp_path, tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == '{"text": "a corpus"}'


@pytest.mark.parametrize("prefix", ["data/", "data/x.bin"])
def test_a_prefix_has_no_suffix(prefix):
    with pytest.raises(UserError, match="--output-prefix is"):
        preprocess(["--input", "x", "--output-prefix", prefix])


def test_the_command(tmp_path, folder):
    done = run("--input", folder, "--output-prefix", tmp_path / "new" / "out")
    assert done.returncode == 0 and done.stderr == ""
    assert "7 documents" in done.stdout and "unigram entropy" in done.stdout and "1 binary" in done.stdout
    with pytest.raises(UserError, match="can't write"):
        preprocess(["--input", str(folder), "--output-prefix", str(folder / "b.py" / "out")])


@pytest.mark.parametrize("crash_at", range(5))
def test_crash_while_renaming_never_mixes_two_datasets(tmp_path, folder, monkeypatch, crash_at):
    """Whichever step of the commit is the last, the prefix holds the new dataset, or nothing that opens."""
    make(tmp_path, folder)
    steps = iter(range(10))

    def step(real):
        def wrapped(*args, **options):
            if next(steps) >= crash_at:  # a killed process removes no temporary files either
                raise KeyboardInterrupt
            return real(*args, **options)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr("tools.preprocess_data.Path.unlink", step(Path.unlink))
        patch.setattr("tools.preprocess_data.os.replace", step(os.replace))
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, folder / "b.py")
    prefix = str(tmp_path / "out")
    if crash_at < 2:
        assert len(documents(prefix)) == 7 and (crash_at == 1 or read_sidecar(prefix))
    elif crash_at in (2, 3):
        with pytest.raises(UserError, match=r"out\.idx does not exist"):
            documents(prefix)
    else:
        assert len(documents(prefix)) == 1
    assert len(make(tmp_path, folder)[0]) == 7
