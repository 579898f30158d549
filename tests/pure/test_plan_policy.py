"""``ft plan policy`` shows what the control plane itself decides."""

import json

import pytest

from ft import cli
from ft.job.control.recovery import LADDER


def answer(capsys, *words: str) -> dict:
    assert cli.main(["plan", "policy", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def stages(capsys, lost: str, *words: str) -> dict:
    """A job with a rank on each of 6 stages, which loses these with all copies of their state."""
    given = ("--pp", "6", "--dp", "1", "--peers", "0", "--standbys", "2", "--step", "0", *words)
    return answer(capsys, *given, "--lost", lost)["replicas"][0]


@pytest.mark.parametrize(
    "lost, protect, rung, said",
    [
        ("2", "hot-swap", "checkpoint", "both copies lost"),
        ("2", "hot-swap,checkfree", "CheckFree", "of step 0, stage 2 is rebuilt"),
        ("1,4", "hot-swap,checkfree", "CheckFree", "stage 1, 4"),
        ("2,3", "hot-swap,checkfree-plus", "checkpoint", "the adjacent stages 2 and 3 are both lost"),
        ("0", "hot-swap,checkfree", "checkpoint", "only CheckFree+ rebuilds"),
        ("0,5", "hot-swap,checkfree-plus", "CheckFree", "stage 0, 5"),
    ],
)
def test_one_failure(lost, protect, rung, said, capsys):
    found = stages(capsys, lost, "--protect", protect)
    assert found["rung"] == rung and said in str(found)


def test_unequal_blocks_are_named(capsys):
    found = stages(capsys, "2", "--blocks", "4,4,4,5,4,4", "--protect", "hot-swap,checkfree")
    assert found["rung"] == "checkpoint" and "do not hold as many transformer layers" in str(found)


def test_the_table_has_the_rungs_in_their_order_and_fits_a_terminal(capsys):
    assert cli.main(["plan", "policy"]) == 0
    text = capsys.readouterr().out
    named = [line.split("  ")[1].strip() for line in text.splitlines() if line[:1].isdigit()]
    assert tuple(named) == LADDER
    assert max(map(len, text.splitlines())) <= 160


def ladder(capsys, *words: str) -> list[dict]:
    return answer(capsys, *words)["replicas"]


def test_any_loss_has_its_rung_its_source_its_loss_and_its_limits(capsys):
    (found,) = ladder(capsys, "--lost", "3", "--standbys", "1")
    assert (found["rung"], found["step"], found["loses"]["steps"]) == ("standby", 100, 0)
    assert found["sources"]["3"] == {"owned": 2, "replicated": 2} and found["refused"].keys() == {"in place"}
    assert {"limit": "control.assemble_s", "seconds": 120.0} in found["waits"]


@pytest.mark.parametrize(
    ("words", "rung", "steps", "exactness"),
    [
        ("--unverified 3@98", "in place", 0, "bit for bit"),
        ("--lost 3", "copy elsewhere", 0, "bit for bit"),
        ("--unverified 3@100", "in place", 1, "bit for bit"),
        ("--lost 2,3 --replicas 2", "another replica", 0, "every sample once"),
        ("--lost 0-7 --replicas 2 --room 0", "another replica", 0, "every sample once"),
        ("--lost 0-7 --replicas 3 --room 0 --spare-redundancy 2", "reorder", 0, "every sample once"),
        ("--lost 2,3 --protect hot-swap,checkfree", "CheckFree", 0, "approximate"),
        ("--lost 2,3 --lost 1:2,3 --replicas 2 --protect hot-swap,checkfree", "CheckFree", 0, "approximate"),
        ("--lost 3 --peers 0 --checkpoint 90", "checkpoint", 10, "bit for bit"),
        ("--lost 2,3 --checkpoint 90 --restarts-left 0", "end", 10, "bit for bit"),
    ],
)
def test_each_rung_follows_some_loss(words, rung, steps, exactness, capsys):
    found = ladder(capsys, *words.split())[0]
    assert (found["rung"], found["loses"]["steps"], found["loses"]["exactness"]) == (rung, steps, exactness), found


def test_a_replica_that_lacks_a_stage_fetches_its_state_and_has_its_position_from_a_rank_of_its_own(capsys):
    first, second = ladder(capsys, "--lost", "0-3", "--lost", "1:4,5", "--replicas", "2")
    assert (first["position_of"], second["position_of"]) == (4, 0) and first["sources"] == {}


def test_a_file_gives_the_same_keys_and_flags_go_before_it(capsys, tmp_path):
    path = tmp_path / "loss.json"
    path.write_text(json.dumps({"pp": 2, "lost": ["0:1"], "standbys": 1, "checkpoint": None, "protect": ["hot-swap"]}))
    assert ladder(capsys, str(path))[0]["rung"] == "standby"
    assert ladder(capsys, str(path), "--standbys", "0")[0]["rung"] == "copy elsewhere"


def test_the_text_names_rungs_losses_and_limits_and_what_a_run_refuses(capsys):
    words = "--lost 3 --room 0 --replicas 3 --spare-redundancy 2 --protect hot-swap"
    assert cli.main(["plan", "policy", *words.split()]) == 0
    text = capsys.readouterr().out
    assert "replica 0, logical rank(s) 3 lost: reorder" in text and "no node has room for another worker" in text
    assert "waits  at most" in text and "quorum.member_s" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lost 8", "rank 8 of replica 0 does not exist"),
        ("--lost 1:0", "replicas are 0 to 0"),
        ("--lost three", "'three' names no logical ranks"),
        ("--lost 3-1", "goes backwards"),
        ("--lost 0-999999", "does not exist"),
        ("--unverified 3", "not a logical rank and a step"),
        ("--protect magic", "hot-swap, checkfree, checkfree-plus"),
        ("--protect checkfree", "CheckFree without hot-swap"),
        ("--blocks 2,0", "not a whole number from 1"),
        ("--blocks 1,2", "2 numbers of blocks for 4 stages"),
        ("--spare-redundancy 2", "redundancy 2 with 1 replicas"),
        ("--checkpoint 101", "after step 100"),
        ("--tp 4096", "give tp x dp x pp"),
        ("--step -1", "not a whole number"),
        ("nowhere.json", "cannot be read"),
    ],
)
def test_what_no_job_can_be_is_refused_with_a_fix(words, said, capsys):
    assert cli.main(["plan", "policy", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and "fix:" in error


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"tp": 1.5}', '{"tp": true}', '{"lost": 3}', '{"lost": [3]}', '{"gpus": 8}', '{"protect": 1}']
)
def test_a_file_that_makes_no_sense_is_refused(text, capsys, tmp_path):
    path = tmp_path / "loss.json"
    path.write_text(text)
    assert cli.main(["plan", "policy", str(path)]) == 2
    assert "fix:" in capsys.readouterr().err


def test_all_problems_are_named_at_once(capsys):
    assert cli.main(["plan", "policy", "--tp", "x", "--dp", "0", "--lost", "y"]) == 2
    assert "3 problems" in capsys.readouterr().err
