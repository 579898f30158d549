"""The one reader of JSON and files from elsewhere. Its bounds are in ``conversations/values/files.txt``."""

import json
import os
import threading

import pytest

from ft.base import bounded_json, files
from ft.base.bounded_json import BadJson
from ft.base.errors import UserError


@pytest.mark.parametrize("text", ["", "{", b"\xff", b"\x00", "[1,]", "nan", '{"a" 1}'])
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        bounded_json.loads(text)


@pytest.mark.parametrize("value", [{"a": [1, -(2**63), 2**64 - 1, 1.5e308, "[[[[" * 100, None]}, [[{}]] * 100])
def test_what_is_within_the_bounds_is_read(value):
    assert bounded_json.loads(json.dumps(value)) == value
    nested = "[" * bounded_json.MOST_DEPTH + "]" * bounded_json.MOST_DEPTH
    assert bounded_json.loads(nested) == json.loads(nested)


def test_a_text_that_is_too_long_is_not_parsed(monkeypatch):
    monkeypatch.setattr(bounded_json, "MOST_BYTES", 10)
    with pytest.raises(BadJson, match="at most 10"):
        bounded_json.loads("[1, 2, 3, 4]")


@pytest.mark.parametrize("name, text", [("a.yaml", "[" * 5000), ("a.toml", "a = " + "[" * 5000)])
def test_a_file_that_is_nested_too_deep_is_refused(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="is not"):
        files.read_structured(tmp_path / name, "file")


def test_only_files_and_pipes_are_read(tmp_path):
    for path in ("/dev/zero", tmp_path):
        with pytest.raises(OSError):
            files.read(path)
    os.mkfifo(tmp_path / "pipe")
    assert files.read(tmp_path / "pipe") == b""  # nobody writes to it
    ours, theirs = os.pipe()
    threading.Thread(target=lambda: (os.write(theirs, b"abc"), os.close(theirs))).start()
    assert files.read(f"/proc/self/fd/{ours}") == b"abc"
    os.close(ours)
    (tmp_path / "large").write_bytes(b"12345")
    assert files.read_text(tmp_path / "large", most=5) == "12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        files.read(tmp_path / "large", most=4)
