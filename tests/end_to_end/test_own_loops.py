"""Training loops of one's own under ft run: what ft.protect refuses, and what it says about those that it accepts."""

import json

import pytest
from ft_runs import ROOT, ft_run

LOOPS = str(ROOT / "tests" / "helpers" / "own_loops.py")
KILL = "--inject kill@step=3:rank=1"


def losses(file) -> dict[int, float]:
    """Return the last loss of each step."""
    return {line["step"]: line["loss"] for line in map(json.loads, file.read_text().splitlines())}


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            "ddp",
            ["parallel_state is not initialised", "DistributedDataParallel, which lacks", "torch.optim.adamw.AdamW"],
        ),
        ("fsdp2", ["are DTensors, which no snapshot holds: 0.weight", "FSDPSequential, which lacks what a recovery"]),
    ],
)
def test_a_loop_that_could_not_be_restored_is_refused_before_its_first_step(kind, says, tmp_path):
    done = ft_run(tmp_path / "run", kind, script=LOOPS, nproc=2, options=KILL)
    assert done.code == 2, done.explain()
    assert "fix: " in done.output and "Traceback" not in done.output
    assert [text for text in says if text not in done.output] == []
    assert "from now on it is protected" not in done.output and not done.named("restarted")


def test_frozen_weights_are_restored(tmp_path):
    found = {}
    for name, faults in (("undisturbed", ""), ("faulty", "--inject kill@step=3:rank=1,hang@step=5:rank=3")):
        file = tmp_path / f"{name}.jsonl"
        done = ft_run(tmp_path / name, f"frozen --steps 7 --losses {file}", script=LOOPS, options=faults)
        assert done.code == 0, done.explain()
        assert "first snapshot of its whole state is complete: from now on it is protected" in done.output
        assert not done.named("step_differs"), done.explain()
        found[name] = losses(file)
    assert len(found["undisturbed"]) == 7 and found["faulty"] == found["undisturbed"]


def test_a_redone_step_that_reads_other_batches_is_said(tmp_path):
    done = ft_run(tmp_path / "run", "running --steps 7", script=LOOPS, options="--inject kill@step=3:rank=1")
    assert done.code == 0, done.explain()
    found = done.named("step_differs")
    assert found and {event.step for event in found} <= {2, 3}, found
    assert "forward passes read other batches" in found[0].detail["differences"][0]
    assert done.output.count("differs from its first try") == 1 and "fix: read each step's batches" in done.output
