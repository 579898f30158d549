"""Every planner and every simulation of costs begins with what its model leaves out, in one line."""

from pathlib import Path

import pytest

from ft import cli

ROOT = Path(__file__).parents[2]

PLANS = {
    "disruption --gpus 64 --mttf 1d --step-time 2s --checkpoint-interval 100 --checkpoint-cost 5s --restart-time 2m "
    "--hot-swap-time 30s": ("repair where no standby is left", "failures during restarts"),
    "snapshot --nodes 4 --params 7B x.py --use-distributed-optimizer": ("nodes without a replacement",),
    "policy": ("further faults during the recovery",),
    "policy --lost 2": ("further faults during the recovery",),
    "policy ladder --lost 2": ("how long the recovery takes", "further faults during the recovery"),
    "schedule --pp 4 --microbatches 8": ("NCCL",),
    "spare theory --groups 20 --redundancy 3": ("groups that return", "failures during restarts"),
    "spare place --groups 20 --redundancy 3": ("failure domains",),
    "spare reorder --groups 20 --redundancy 3 --failed 1,2": ("groups that return",),
    "spare montecarlo --groups 20 --redundancy 3 --trials 2": ("groups that return",),
    "spare simulate --groups 20 --mtbf 1h --steps 5 --seeds 1 --redundancy 3": ("groups that return", "repairs"),
    "spare optimize --groups 20 --mtbf 1h --no-simulation": ("groups that return", "repairs"),
}
"""Words after ``ft plan`` -> what the first line has to say."""
OTHERS = {
    "simulate hsdp --time 1d --no-sweep": ("at this size", "repairs"),
    "simulate churn {root}/examples/checkfree/table2.toml --seeds 1 --rates 5%": ("repairs",),
    "dmr estimate --model llama3-70b --gpus 32 --pp 3 --memory 80GB --batch 6": ("the host",),
}


@pytest.mark.parametrize(
    ("words", "said"), [*((f"plan {words}", said) for words, said in PLANS.items()), *OTHERS.items()]
)
def test_the_first_line_says_what_is_left_out(words, said, capsys):
    assert cli.main(words.format(root=ROOT).split()) == 0
    first, empty = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("Left out: ") and len(first) <= 120 and not empty
    assert [part for part in said if part not in first] == []
