"""``ft plan policy`` shows what the control plane itself decides."""

import json

import pytest

from ft import cli


def answer(capsys, *words: str) -> dict:
    assert cli.main(["plan", "policy", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "lost, checkfree, recovery, said",
    [
        ("", "plus", "copies", "step 0"),
        ("2", "off", "restart", "both copies lost"),
        ("2", "middle", "rebuild", "of step 0, stage 2 is rebuilt"),
        ("1,4", "middle", "rebuild", "stage 1, 4"),
        ("2,3", "plus", "restart", "the adjacent stages 2 and 3 are both lost"),
        ("0", "middle", "restart", "only CheckFree+ rebuilds"),
        ("0,5", "plus", "rebuild", "stage 0, 5"),
    ],
)
def test_one_failure(lost, checkfree, recovery, said, capsys):
    found = answer(capsys, "--lost", lost, "--checkfree", checkfree)
    assert found["recovery"] == recovery and said in found["reason"]


def test_unequal_blocks_are_named(capsys):
    found = answer(capsys, "--blocks", "4,4,4,5,4", "--lost", "2", "--checkfree", "middle")
    assert found["recovery"] == "restart" and "do not hold as many transformer layers" in found["reason"]


def test_the_table_has_the_kinds_of_recovery_in_their_order_and_fits_a_terminal(capsys):
    assert cli.main(["plan", "policy"]) == 0
    text = capsys.readouterr().out
    assert text.index("copies") < text.index("rebuild") < text.index("restart")
    assert max(map(len, text.splitlines())) <= 160


@pytest.mark.parametrize(
    "words", [("--lost", "9"), ("--lost", "a"), ("--blocks", "2,0"), ("--pp", "3", "--blocks", "2,2")]
)
def test_stages_that_make_no_sense_are_refused(words, capsys):
    assert cli.main(["plan", "policy", *words]) == 2
    assert "fix:" in capsys.readouterr().err
