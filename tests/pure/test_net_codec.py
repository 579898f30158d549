"""The codec: what it reads back, and what it refuses with which words."""

import json
import math
import random
from dataclasses import dataclass, field

import pytest

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
