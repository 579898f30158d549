"""tools/preprocess_data.py: text in, indexed dataset out, whole or not at all."""

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
    assert [bytes(document[:-1]).decode().split()[0] for document in docs] == [
        "notes",
        "z",
        "b",
        "one",
        "two",
        "{",
        "t",
    ]
    assert skipped == {"binary": 1, "not UTF-8": 1, "empty": 1}
    ids = [i for d in docs for i in d]
    assert "7 documents" in facts and f"{len(ids)} tokens" in facts
    entropy = -sum(n / len(ids) * math.log(n / len(ids)) for n in Counter(ids).values())
    sidecar = read_sidecar(str(tmp_path / "out"))
    assert (sidecar.tokenizer_type, sidecar.vocab_size) == ("ByteLevelTokenizer", 259)
    assert sidecar.unigram_entropy == pytest.approx(entropy, rel=1e-12)


def test_input_is_not_overwritten(tmp_path):
    (tmp_path / "out.bin").write_text("text")
    with pytest.raises(UserError, match=r"out\.bin is both input and output"):
        make(tmp_path, tmp_path / "out.bin")
    (tmp_path / "out.json").write_text('{"text": "a corpus"}')
    make(tmp_path, tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == '{"text": "a corpus"}'


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
