"""The rungs of recovery: which serves after which failure, and ``ft plan policy``."""

import json
import random

import pytest

from ft import cli
from ft.control.rungs import CHECKFREE, CHECKPOINT, GIVE_UP, HOT_SWAP, MIDDLE, OFF, PLUS, RUNGS, Loss, choose

SIX = (4,) * 6


def loss(*lost: int, blocks=SIX, step: int | None = 7, checkpoint: bool = True, restarts: int = 1) -> Loss:
    return Loss(tuple(blocks), frozenset(lost), step, checkpoint, restarts)


@pytest.mark.parametrize("checkfree", [OFF, MIDDLE, PLUS])
def test_peer_copies_come_first(checkfree):
    choice = choose(loss(), checkfree)
    assert choice.rung == HOT_SWAP and not choice.passed


@pytest.mark.parametrize(
    "lost, checkfree, rung, said",
    [
        ((2,), OFF, CHECKPOINT, "CheckFree is off"),
        ((2,), MIDDLE, CHECKFREE, "stage 2 is averaged from stages 1 and 3"),
        ((1, 4), MIDDLE, CHECKFREE, "stage 1 is averaged from stages 0 and 2, stage 4 is averaged from stages 3 and 5"),
        ((1, 3), MIDDLE, CHECKFREE, "stage 3 is averaged"),
        ((2, 3), PLUS, CHECKPOINT, "the adjacent stages 2 and 3 are both lost"),
        ((0,), MIDDLE, CHECKPOINT, "stage 0 is the first, which only CheckFree+"),
        ((5,), MIDDLE, CHECKPOINT, "stage 5 is the last, which only CheckFree+"),
        ((0,), PLUS, CHECKFREE, "stage 0 is copied from stage 1"),
        ((0, 5), PLUS, CHECKFREE, "stage 5 is copied from stage 4"),
        ((4, 5), PLUS, CHECKPOINT, "the adjacent stages 4 and 5 are both lost"),
        ((0, 2, 5), MIDDLE, CHECKPOINT, "stage 0 is the first"),
    ],
)
def test_lost_stages_are_rebuilt_where_their_neighbours_can(lost, checkfree, rung, said):
    choice = choose(loss(*lost), checkfree)
    assert choice.rung == rung
    assert said in (choice.reason if rung == CHECKFREE else choice.passed[-1][1])


def test_unequal_blocks_matter_only_where_they_are_used():
    blocks = (4, 4, 4, 5, 4, 4)
    assert "unequal" in choose(loss(2, blocks=blocks), PLUS).passed[-1][1]
    assert choose(loss(0, blocks=blocks), PLUS).rung == choose(loss(1, blocks=blocks), MIDDLE).rung == CHECKFREE


def test_without_a_common_step_of_the_others_nothing_but_a_checkpoint_serves():
    for lost in ((), (2,)):
        choice = choose(loss(*lost, step=None), PLUS)
        assert choice.rung == CHECKPOINT and [rung for rung, _ in choice.passed] == [HOT_SWAP, CHECKFREE]


def test_the_run_ends_when_no_rung_is_left_and_says_why_for_each():
    choice = choose(loss(2, 3, checkpoint=False), PLUS)
    assert choice.rung == GIVE_UP and [rung for rung, _ in choice.passed] == list(RUNGS[:-1])
    assert choose(loss(2, restarts=0), OFF).passed[-1][1].endswith("used up")


def test_one_stage_alone_has_nothing_to_be_rebuilt_from():
    assert choose(loss(0, blocks=(4,)), PLUS).passed[-1][1] == "stage 0 has no neighbour"


def test_more_that_is_left_never_means_a_lower_rung():
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(500):
        stages = rng.randint(1, 8)
        lost = frozenset(rng.sample(range(stages), rng.randint(0, stages)))
        blocks = tuple(rng.choice((4, 4, 4, 5)) for _ in range(stages))
        step, checkpoint, mode = rng.choice((None, 3)), rng.random() < 0.5, rng.randrange(3)
        modes = (OFF, MIDDLE, PLUS)
        at = RUNGS.index(choose(Loss(blocks, lost, step, checkpoint), modes[mode]).rung)
        better = [
            choose(Loss(blocks, frozenset(list(lost)[1:]), step, checkpoint), modes[mode]),
            choose(Loss(blocks, lost, 3, checkpoint), modes[mode]),
            choose(Loss(blocks, lost, step, True), modes[mode]),
            choose(Loss(blocks, lost, step, checkpoint), modes[min(2, mode + 1)]),
        ]
        if not lost:
            better = better[1:]
        assert all(RUNGS.index(choice.rung) <= at for choice in better), (blocks, lost, step, checkpoint, mode)


def ask(capsys, words: str, code: int = 0) -> tuple[str, str]:
    assert cli.main(["plan", "policy", *words.split()]) == code
    said = capsys.readouterr()
    return said.out, said.err


def test_the_table_has_the_rungs_in_their_order_and_typical_failures(capsys):
    out, _ = ask(capsys, "")
    lines = out.splitlines()
    assert [line.split("  ")[1] for line in lines[2:6]] == list(RUNGS)
    assert any(line.startswith("stage 0 lost everywhere       plus       checkfree") for line in lines)
    found = json.loads(ask(capsys, "--json")[0])
    assert [rung["rung"] for rung in found["rungs"]] == list(RUNGS) and len(found["cases"]) == 15
    assert len(json.loads(ask(capsys, "--pp 1 --json")[0])["cases"]) == 6


def test_one_failure_gets_its_answer_with_all_reasons(capsys):
    out, _ = ask(capsys, "--lost 2 --checkfree on --blocks 4,4,4,5")
    assert out.splitlines() == [
        "not hot-swap: nobody holds the state of stage 2",
        "not checkfree: stages 1, 2 and 3 have unequal numbers of blocks",
        "checkpoint: all workers begin anew from the newest persistent checkpoint",
    ]
    found = json.loads(ask(capsys, "--lost 0 --checkfree plus --json")[0])
    assert found["rung"] == CHECKFREE and found["passed"][0]["rung"] == HOT_SWAP


@pytest.mark.parametrize("words", ["--pp 0", "--lost 6", "--lost x", "--pp 4 --blocks 1,1", "--blocks 1,0"])
def test_stages_that_do_not_exist_are_refused(words, capsys):
    assert "fix:" in ask(capsys, words, code=2)[1]
