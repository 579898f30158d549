"""What a report says of stages that were rebuilt: the jump of the loss, and when it was made good."""

from pathlib import Path

from histories import History

from ft.base import events
from ft.observe.report.protections import REBUILD_HEAD, rebuild_rows
from ft.record.block import recovery_block
from ft.record.run import Run


def run_of(losses: list[float], *rebuilt: tuple[int, int]) -> Run:
    history = History()
    for step, stage in rebuilt:
        detail = {"stage": stage, "strategy": "weighted", "weights": [0.25, 0.75], "seconds": 0.04}
        history.say(5.0 + step, events.STAGE_REBUILT, epoch=1, step=step, **detail)
    metrics = [{"step": i, "loss": loss} for i, loss in enumerate(losses, 1)]
    return Run(Path("run"), history.events, metrics)


def test_the_jump_is_against_the_mean_of_the_last_steps_and_is_made_good_below_it():
    losses = [9.0, 4.2, 4.0, 4.1, 3.9, 3.8, 5.0, 4.5, 4.1, 3.9, 3.5]
    (row,) = rebuild_rows(run_of(losses, (6, 1)))
    assert row == ("6", "1", "weighted (25 % + 75 %)", "40 ms", "4.000", "5.000", "+1.000", "after 4 steps")
    assert len(row) == len(REBUILD_HEAD)


def test_a_loss_that_is_not_made_good_and_a_run_without_losses():
    assert rebuild_rows(run_of([4.0, 5.0, 4.5], (1, 2)))[0][-2:] == ("+1.000", "not yet")
    assert rebuild_rows(run_of([], (1, 2)))[0][4:] == ("-", "-", "-", "not yet")


def test_a_rebuild_that_was_begun_again_counts_once_and_two_stages_count_twice():
    found = rebuild_rows(run_of([4.0] * 9, (5, 1), (5, 1), (5, 3), (7, 1)))
    assert [row[:2] for row in found] == [("5", "1"), ("5", "3"), ("7", "1")]
    assert rebuild_rows(run_of([4.0] * 9)) == []


def test_the_block_at_the_terminal_names_the_stage_and_its_shares():
    history = History()
    history.detect(5.0, 1, step=20)
    history.close(5.0)
    history.open(5.05, r1="n0.w4")
    detail = {"stage": 1, "strategy": "weighted", "weights": [0.4, 0.6], "seconds": 0.04}
    history.say(5.2, events.STAGE_REBUILT, epoch=1, step=20, **detail)
    history.repair(5.1, 20)
    assert "stages    stage 1 rebuilt from its neighbours: weighted, 40 % + 60 %" in recovery_block(history.events)
