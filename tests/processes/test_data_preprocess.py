"""tools/preprocess_data.py: text in, indexed dataset out, whole or not at all."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy
import pytest

from ft.base.errors import UserError
from megatron import patches
from megatron.ft_trainer.arguments.topics import TokenizerOptions
from megatron.ft_trainer.data.indexed import encode_index, read_index, read_sidecar
from megatron.ft_trainer.data.preprocess import PreprocessOptions, preprocess

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "preprocess_data.py"
EOD = 256

patches.apply()


def run(*words, **kwargs):
    command = [sys.executable, str(TOOL), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, **kwargs)


def make(folder, *inputs, tokenizer=None, **options):
    """Preprocesses in this process; returns (documents as lists of ids, sidecar, skipped)."""
    prefix = str(folder / "out")
    options = PreprocessOptions(input=list(map(str, inputs)), output_prefix=prefix, **options)
    sidecar, skipped = preprocess(options, tokenizer or TokenizerOptions())
    return documents(prefix), sidecar, skipped


def documents(prefix):
    index = read_index(prefix)
    tokens = numpy.fromfile(f"{prefix}.bin", index.dtype)
    return [part.tolist() for part in numpy.split(tokens, numpy.cumsum(index.lengths)[:-1])]


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


def test_folder_in_order_and_what_is_skipped(tmp_path, folder):
    _, sidecar, skipped = make(tmp_path, folder)
    found = texts(str(tmp_path / "out"))
    assert [text.split()[0] for text in found] == ["notes", "z", "b", "one", "two", "{", "t"]
    assert skipped == {"binary": 1, "not UTF-8": 1, "empty": 1}
    assert sidecar.documents == 7 and sidecar.text_bytes == sum(len(t.encode()) for t in found)


def test_include_and_exclude(tmp_path, folder):
    make(tmp_path, folder, include=["*.py"], exclude=["test", "a/e*"])
    assert texts(str(tmp_path / "out")) == ["z = 'ü'\n", "b = 1\n"]


def test_files_are_written_as_megatron_core_writes_them(tmp_path, folder):
    import torch

    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    mine, _, _ = make(tmp_path, folder)
    for name, dtype in (("short", numpy.uint16), ("long", numpy.int32)):
        theirs = str(tmp_path / name)
        builder = IndexedDatasetBuilder(f"{theirs}.bin", dtype=dtype)
        for document in mine:
            builder.add_document(torch.tensor(document), [len(document)])
        builder.finalize(f"{theirs}.idx")
        index = encode_index(numpy.dtype(dtype), [len(d) for d in mine])
        assert index == Path(f"{theirs}.idx").read_bytes()
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"short{suffix}").read_bytes()


def test_sidecar_says_what_is_there(tmp_path, folder):
    docs, sidecar, _ = make(tmp_path, folder)
    ids = [i for d in docs for i in d]
    counts = Counter(ids)
    entropy = -sum(n / len(ids) * math.log(n / len(ids)) for n in counts.values())
    assert sidecar.tokens == len(ids) and sidecar.max_id == max(ids) == EOD
    assert sidecar.unigram_entropy == pytest.approx(entropy, rel=1e-12)
    assert sidecar.bin_bytes == 2 * len(ids)
    assert read_sidecar(str(tmp_path / "out")).documents == len(docs)


def test_end_of_document_is_on_unless_switched_off(tmp_path, folder):
    assert all(d[-1] == EOD for d in make(tmp_path, folder)[0])
    docs, sidecar, _ = make(tmp_path, folder, append_eod=False)
    assert EOD not in [i for d in docs for i in d] and sidecar.max_id < 256


def test_a_limit_in_the_order_of_the_input(tmp_path):
    lines = [json.dumps({"text": f"document {i} " * (i % 7 + 1)}) for i in range(200)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    _, sidecar, _ = make(tmp_path, tmp_path / "c.jsonl", max_mb=0.005)
    assert 5000 <= sidecar.text_bytes < 5100


def test_shuffle_is_seeded_and_keeps_all(tmp_path, folder):
    plain, _, _ = make(tmp_path, folder)
    once, first, _ = make(tmp_path, folder, shuffle_seed=5)
    again, second, _ = make(tmp_path, folder, shuffle_seed=5)
    assert once == again and first == second
    assert once != plain and sorted(once) == sorted(plain)
    assert make(tmp_path, folder, shuffle_seed=6)[0] != once


def test_limit_keeps_whole_documents(tmp_path, folder):
    everything = make(tmp_path, folder, shuffle_seed=5)[0]
    some = make(tmp_path, folder, shuffle_seed=5, max_mb=12e-6)[0]
    assert some == everything[: len(some)] and 0 < len(some) < len(everything)


def test_null_tokenizer_takes_ids(tmp_path):
    (tmp_path / "ids.txt").write_text("5 6 7\n70000")
    docs, _, _ = make(
        tmp_path, tmp_path / "ids.txt", tokenizer=TokenizerOptions(tokenizer_type="NullTokenizer", vocab_size=70002)
    )
    assert docs == [[5, 6, 7, 70000, 70001]]
    assert read_index(str(tmp_path / "out")).dtype == numpy.int32


BAD_LINES = {
    '{"text": "fine"}\n\nnot json': r"c\.jsonl:3: not valid JSON",
    '{"text": "fine"}\n{"body": "x"}': r"c\.jsonl:2: no key 'text'; it has 'body'",
    '{"text": 5}': r"c\.jsonl:1: 'text' is a int",
    '["text"]': r"c\.jsonl:1: a list, not a JSON object",
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
    with pytest.raises(UserError, match=r"holds no files that match \*\.c"):
        make(tmp_path, folder, include=["*.c"])
    with pytest.raises(UserError, match=r"holds no documents \(1 binary\)"):
        make(tmp_path, folder / "image.bin")
    assert sorted(os.listdir(tmp_path)) == ["src"]


def test_text_that_is_no_ids(tmp_path, folder):
    options = TokenizerOptions(tokenizer_type="NullTokenizer", vocab_size=10)
    with pytest.raises(UserError, match=r"b\.py: NullTokenizer reads token ids"):
        make(tmp_path, folder / "b.py", tokenizer=options)


def test_input_is_not_overwritten(tmp_path):
    (tmp_path / "out.bin").write_text("text")
    with pytest.raises(UserError, match=r"out\.bin is both input and output"):
        make(tmp_path, tmp_path / "out.bin")
    (tmp_path / "out.json").write_text('{"text": "a corpus"}')
    make(tmp_path, tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == '{"text": "a corpus"}'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": None}, "no --input"),
        ({"output_prefix": "data/"}, "--output-prefix is"),
        ({"output_prefix": "data/x.bin"}, "--output-prefix is"),
        ({"max_mb": 0.0}, "--max-mb is"),
        ({"shuffle_seed": -1}, "--shuffle-seed is"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        PreprocessOptions(**({"input": ["x"], "output_prefix": "p"} | options))


def test_the_command(tmp_path, folder):
    done = run("--input", folder, "--output-prefix", tmp_path / "new" / "out")
    assert done.returncode == 0 and done.stderr == ""
    assert "7 documents" in done.stdout and "unigram entropy" in done.stdout and "1 binary" in done.stdout
    failed = run("--input", folder, "--output-prefix", folder / "b.py" / "out")
    assert failed.returncode == 2 and "can't write" in failed.stderr and "fix:" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_the_tool_starts_without_torch(tmp_path, folder):
    code = (
        f"import sys; sys.path.insert(0, {str(TOOL.parent)!r})\n"
        "import preprocess_data\n"
        "assert preprocess_data.main(sys.argv[1:]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    words = ["--input", str(folder), "--output-prefix", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("crash_at", range(5))
def test_crash_while_renaming_never_mixes_two_datasets(tmp_path, folder, monkeypatch, crash_at):
    """Whichever step of the commit is the last, the prefix holds the new dataset, or nothing that opens."""
    make(tmp_path, folder)
    steps = iter(range(10))

    def step(real):
        def wrapped(*args):
            if next(steps) >= crash_at:  # a killed process removes no temporary files either
                raise KeyboardInterrupt
            return real(*args)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr("megatron.ft_trainer.data.indexed.os.unlink", step(os.unlink))
        patch.setattr("megatron.ft_trainer.data.indexed.os.replace", step(os.replace))
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, folder / "b.py")
    prefix = str(tmp_path / "out")
    if crash_at == 0:
        assert read_index(prefix).documents == 7 and read_sidecar(prefix).documents == 7
    elif crash_at == 1:
        assert read_index(prefix).documents == 7
    elif crash_at in (2, 3):
        with pytest.raises(UserError, match=r"out\.idx does not exist"):
            read_index(prefix)
    else:
        assert read_index(prefix).documents == 1
    assert make(tmp_path, folder)[1].documents == 7
