"""The metrics file over going back and beginning again: every step once, whatever happens in between."""

import json

from ft.record.metrics import MetricsFile


def lines(path):
    return [(figures["step"], figures["loss"]) for figures in map(json.loads, path.read_text().splitlines())]


def write(metrics, steps, loss):
    for step in steps:
        metrics.write({"step": step, "loss": loss})


def test_steps_done_anew_take_the_place_of_the_undone_ones(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)
    write(metrics, range(1, 6), 0.1)
    metrics.rewind(3)
    write(metrics, range(4, 8), 0.2)
    metrics.close()
    assert lines(tmp_path / "metrics.jsonl") == [(step, 0.1 if step < 4 else 0.2) for step in range(1, 8)]


def test_a_restart_from_a_checkpoint_of_an_undone_step_finds_its_line(tmp_path):
    """The run went back to step 3, failed on the way to step 4, and a checkpoint of step 4 was there to begin with."""
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0)
    write(first, range(1, 6), 0.1)
    first.rewind(3)
    second = MetricsFile(path, 4)
    write(second, range(5, 7), 0.2)
    second.close()
    assert [step for step, _ in lines(path)] == list(range(1, 7))


def test_a_run_that_ends_after_going_back_leaves_no_undone_step(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)
    write(metrics, range(1, 6), 0.1)
    metrics.rewind(3)
    metrics.close()
    assert [step for step, _ in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
