"""Every option that changes the computation trains: the loss is finite and falls. The options: ``features.toml``."""

import math
import tomllib
from pathlib import Path

import pytest
import small_runs as runs

FEATURES = tomllib.loads(Path(__file__).with_name("features.toml").read_text())
LONG = pytest.mark.long
CASES = [
    pytest.param(feature["ranks"], feature["flags"], id=name, marks=LONG if tier == "long" else ())
    for tier, features in FEATURES.items()
    for name, feature in features.items()
]


@pytest.mark.parametrize(("ranks_of_it", "extra"), CASES)
def test_it_trains(ranks_of_it, extra, ranks, corpus, tmp_path):
    data = "" if "--mock-data" in extra else f"--data-path {corpus}"
    command = f"{runs.BASE} --train-iters 8 {data} {extra} --metrics-file {tmp_path}/m.jsonl"
    ranks(runs.run, ranks_of_it, command)
    steps = runs.metrics(tmp_path / "m.jsonl")
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert min(step["loss"] for step in steps[4:]) < steps[0]["loss"]
