"""Every way in which the two files of a dataset can be broken has an error that names the file and the fix."""

# ruff: noqa: E402 - megatron-core is imported after the patches

import os
import struct

import numpy
import pytest

from ft.base.errors import UserError
from megatron import patches

patches.apply()

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.ft_trainer.data.datasets import read_lengths
from megatron.ft_trainer.data.tokenizer import read_sidecar

LENGTHS = [5, 0, 7, 3]


@pytest.fixture
def prefix(tmp_path):
    path = str(tmp_path / "data")
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=numpy.uint16)
    for length in LENGTHS:
        builder.add_document(numpy.arange(length), [length])
    builder.finalize(f"{path}.idx")
    return path


def overwrite(path, offset, content):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def test_sound(prefix):
    assert read_lengths(prefix).tolist() == LENGTHS
    assert read_sidecar(prefix) is None


UNREAD = r"data\.idx is not a Megatron index, or was cut short"
BREAKS = {
    "no idx": (lambda p: os.unlink(f"{p}.idx"), r"data\.idx does not exist"),
    "no bin": (lambda p: os.unlink(f"{p}.bin"), r"data\.bin does not exist"),
    "magic": (lambda p: overwrite(f"{p}.idx", 0, b"GGUF"), UNREAD),
    "empty idx": (lambda p: os.truncate(f"{p}.idx", 0), UNREAD),
    "short header": (lambda p: os.truncate(f"{p}.idx", 20), UNREAD),
    "version": (lambda p: overwrite(f"{p}.idx", 9, struct.pack("<Q", 3)), UNREAD),
    "dtype": (lambda p: overwrite(f"{p}.idx", 17, b"\x63"), UNREAD),
    "short idx": (lambda p: os.truncate(f"{p}.idx", 100), UNREAD),
    "huge count": (lambda p: overwrite(f"{p}.idx", 18, struct.pack("<Q", 2**50)), UNREAD),
    "no documents": (lambda p: overwrite(f"{p}.idx", 18, struct.pack("<QQ", 0, 1)), "no documents with tokens"),
    "no tokens": (lambda p: overwrite(f"{p}.idx", 34, bytes(4 * 4 + 4 * 8)), "no documents with tokens"),
    "short bin": (lambda p: os.truncate(f"{p}.bin", 20), r"data\.bin has 20 bytes, .* says 15 tokens .*\(30\)"),
    "negative length": (lambda p: overwrite(f"{p}.idx", 38, struct.pack("<i", -5)), "is inconsistent"),
    "offset": (lambda p: overwrite(f"{p}.idx", 66, struct.pack("<q", 3)), "is inconsistent"),
    "boundaries": (lambda p: overwrite(f"{p}.idx", 114, struct.pack("<q", 9)), "do not cover its sequences"),
    "unordered": (lambda p: overwrite(f"{p}.idx", 90, struct.pack("<q", 3)), "do not cover its sequences"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_broken(prefix, what):
    change, message = BREAKS[what]
    change(prefix)
    with pytest.raises(UserError, match=message) as caught:
        read_lengths(prefix)
    assert caught.value.fix


def test_what_is_no_prefix(prefix, tmp_path):
    with pytest.raises(UserError, match="not its prefix") as caught:
        read_lengths(f"{prefix}.bin")
    assert caught.value.fix == f"give {prefix}"
    (tmp_path / "raw.jsonl").write_text("{}")
    for path in (tmp_path / "raw.jsonl", tmp_path):
        with pytest.raises(UserError, match="is not an indexed dataset") as caught:
            read_lengths(str(path))
        assert "preprocess_data.py --input" in caught.value.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable(prefix):
    os.chmod(f"{prefix}.bin", 0)
    with pytest.raises(UserError, match="permission denied"):
        read_lengths(prefix)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "can't be read"), ("[]", "Expected `object`"), ('{"vocab_size": 9}', "missing required field")],
)
def test_bad_sidecar(prefix, content, message):
    with open(f"{prefix}.meta.json", "w") as file:
        file.write(content)
    with pytest.raises(UserError, match=message):
        read_sidecar(prefix)
