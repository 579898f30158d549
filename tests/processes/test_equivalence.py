"""With nothing enabled the trainer computes what a plain megatron-core loop does, bit for bit.

The layouts are in ``equivalence.toml``.
"""

import math
import tomllib
from pathlib import Path

import plain_loop
import pytest
import small_runs as runs

CASES = tomllib.loads(Path(__file__).with_name("equivalence.toml").read_text())
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}


@pytest.mark.newest
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_equal_those_of_the_plain_loop(case, ranks, corpus, tmp_path):
    changes = {**case["loop"], "config": {**NO_DROPOUT, **case["loop"].get("config", {})}}
    plain = ranks(plain_loop.train, case["ranks"], plain_loop.Setting(corpus, **changes))[-1]
    metrics = tmp_path / "metrics.jsonl"
    ranks(runs.run, case["ranks"], f"{runs.BASE} {case['flags']} --data-path {corpus} --metrics-file {metrics}")
    ours = runs.metrics(metrics)
    assert len(set(plain["losses"])) == len(plain["losses"]), "the plain loop does not learn"
    assert not any(map(math.isnan, plain["losses"]))
    assert [step["loss"] for step in ours] == plain["losses"]
    assert [step["grad_norm"] for step in ours] == plain["grad_norms"]
