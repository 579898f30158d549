"""``examples/own_protection.py``: outliers are undone and their batches skipped, and the report says so."""

import json

import pytest
import torch
from ft_runs import flags, ft_run

from ft import cli

STEPS = 16


def losses_without(flags: str, skipped: set[int]) -> dict[int, float]:
    """Step -> loss of a plain run whose trainer reads past the batches of ``skipped`` and computes nothing of them."""
    import time

    import torch.distributed as dist

    from megatron import patches

    patches.apply()
    from megatron.ft_trainer.arguments import check, parse
    from megatron.ft_trainer.initialize import init_model_parallel
    from megatron.ft_trainer.loop import train_step
    from megatron.ft_trainer.pretrain import assemble
    from megatron.ft_trainer.trainer import JobTrainer

    options = parse(flags.replace("--ft-hot-swap", ""))
    layout = check(options, dist.get_world_size(), has_te=False)
    init_model_parallel(options.core, layout)
    job = assemble(options, layout, time.monotonic())
    trainer, found = JobTrainer(job), {}
    while job.state.step < STEPS:
        step = job.state.step + 1
        if step in skipped:
            trainer.skip(trainer.batch_now)
            job.state.step, job.state.consumed_train_samples = step, trainer.samples + trainer.batch_now
        else:
            found[step] = train_step(job).loss
    return found


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(None, marks=pytest.mark.long),
        pytest.param(f"kill@step={STEPS // 2}:rank=1", marks=pytest.mark.newest),
    ],
)
def test_outliers_are_undone_and_their_batches_skipped(fault, corpus, ranks, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPIKE_FACTOR", "1.01")  # so small that some steps of any run are outliers
    script = flags(corpus, "--use-distributed-optimizer --pipeline-model-parallel-size 2", STEPS)
    options = f"--inject {fault}" if fault else ""
    done = ft_run(tmp_path / "run", script, script="examples/own_protection.py", nproc=4, options=options)
    assert done.code == 0, done.explain()
    lines = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    metrics = {line["step"]: line for line in lines if "loss" in line}
    skipped = {step for step, line in metrics.items() if line["skipped"]}
    assert 0 < len(skipped) < STEPS - 4, skipped
    expected = ranks(losses_without, 4, script, skipped)
    last = {step: loss for each in expected for step, loss in each.items() if loss == loss}
    for step, loss in last.items():
        assert torch.tensor(metrics[step]["loss"]).item() == torch.tensor(loss).item(), step
    assert cli.main(["report", str(done.folder)]) == 0
    report = capsys.readouterr().out
    assert all(f"{step}  spikes" in report for step in skipped)
    assert "undone, and its batch skipped" in report
