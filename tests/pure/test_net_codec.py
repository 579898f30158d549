"""The readers of messages, JSON and files from elsewhere. Bounds are in ``conversations/values``."""

import json
import math
import os
import random
import threading
from dataclasses import dataclass, field

import pytest

from ft.base import bounded_json, files
from ft.base.bounded_json import BadJson
from ft.base.errors import UserError
from ft.net.codec import BadMessage, Numbers, from_json, to_json


@dataclass(frozen=True)
class Leaf:
    count: int
    seconds: float | None = None

    def __post_init__(self):
        if self.count < 0:
            raise ValueError("count is negative")


@dataclass
class Tree:
    name: str
    leaves: dict[int, Leaf] = field(default_factory=dict)
    pair: tuple[int, str] = (0, "")
    several: tuple[int, ...] = ()
    rows: list[list[int]] = field(default_factory=list)
    flag: bool = False


def test_what_is_written_is_read_back():
    tree = Tree("oak", {3: Leaf(1, 2.5), -1: Leaf(0)}, (4, "x"), (1, 2), [[1], []], True)
    assert from_json(Tree, json.loads(json.dumps(to_json(tree)))) == tree


@pytest.mark.parametrize(
    "values, problem",
    [
        ([], "'[]' is not an object with the fields of Tree"),
        ({}, "Tree needs 'name'"),
        ({"name": "a", "height": 3}, "Tree has no field 'height'"),
        ({"name": 3}, "name: '3' is not a text"),
        ({"name": "a", "flag": 1}, "flag: '1' is not true or false"),
        ({"name": "a", "leaves": {"x": {"count": 1}}}, "leaves.x: 'x' is not a whole number as a key"),
        ({"name": "a", "leaves": {"1": {"count": True}}}, "leaves.1.count: 'True' is not a whole number"),
        ({"name": "a", "leaves": {"1": {"count": 1, "seconds": "2"}}}, "leaves.1.seconds: '2' is not a number"),
        ({"name": "a", "leaves": {"1": {"count": 1, "seconds": math.inf}}}, "leaves.1.seconds: 'inf' is not a number"),
        ({"name": "a", "leaves": {"1": {"count": -1}}}, "leaves.1: count is negative"),
        ({"name": "a", "pair": [1]}, "pair: '[1]' is not a list of 2"),
        ({"name": "a", "several": [1, None]}, "several.1: 'None' is not a whole number"),
        ({"name": "a", "rows": [[1], 2]}, "rows.1: '2' is not a list"),
    ],
)
def test_an_error_says_where_and_what_was_expected(values, problem):
    with pytest.raises(BadMessage) as caught:
        from_json(Tree, values)
    assert str(caught.value).startswith(problem)


def test_any_numbers_are_read_back(seed):
    rng = random.Random(seed)
    for _ in range(300):
        numbers = []
        for _ in range(rng.randrange(6)):
            first, distance = rng.randrange(-50, 50), rng.randrange(-3, 4)
            numbers += [first + distance * at for at in range(rng.randrange(12))]
        assert from_json(Numbers, json.loads(json.dumps(to_json(Numbers(numbers))))) == numbers


# --- JSON and files from elsewhere ------------------------------------------------------------------------------------


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
