"""Every planner and every simulation of costs begins with what its model leaves out, in one line."""

import pytest

from ft import cli

ASKED = "--gpus 64 --gpu-mtbf 5000h --step-time 10s --save-time 60s --restart-time 10m --failures 400 --spares 1"
PLANS = {
    f"buy {ASKED}": ("slow nodes",),
    f"spares {ASKED}": ("queues of the scheduler",),
    f"interval {ASKED}": ("queues of the scheduler",),
    "snapshot --nodes 4 --params 7B x.py --use-distributed-optimizer": ("nodes without a replacement",),
    "policy": ("further faults during the recovery",),
    "policy --lost 2": ("how long the recovery takes", "further faults during the recovery"),
    "schedule --pp 4 --microbatches 8": ("NCCL",),
    "spare place --groups 20 --redundancy 3": ("failure domains",),
    "spare reorder --groups 20 --redundancy 3 --failed 1,2": ("groups that return",),
    "dmr --model llama3-70b --gpus 32 --pp 3 --memory 80GB --batch 6": ("the host",),
}
"""Words after ``ft plan`` -> what the first line has to say."""


@pytest.mark.parametrize(("words", "said"), PLANS.items())
def test_the_first_line_says_what_is_left_out(words, said, capsys):
    assert cli.main(["plan", *words.split()]) == 0
    first, empty = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("Left out: ") and len(first) <= 120 and not empty
    assert [part for part in said if part not in first] == []
