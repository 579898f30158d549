"""``ft plan schedule``: tables, the keys that programs get, and input that cannot work."""

import json

import pytest

from ft import cli


def ask(capsys, words: str, code: int = 0) -> tuple[str, str]:
    assert cli.main(["plan", "schedule", *words.split()]) == code
    said = capsys.readouterr()
    return said.out, said.err


def test_the_cheapest_is_shown_beside_the_others(capsys):
    out, _ = ask(capsys, "--pp 6 --microbatches 24")
    assert out.splitlines()[2] == "woven: 6 stages, 24 microbatches; forward 1, backward 2, message 0"
    assert "bubbles 17.2 %" in out and "in flight, by stage: 8, 8, 5, 4, 2, 2" in out
    assert "ok  message order per pair" in out and "\n0: F0 F1' F2" in out.replace("  0:", "0:")
    rows = {line.split()[0]: line for line in out.splitlines() if "%" in line and line[0].isalnum()}
    assert {"1f1b", "half-half", "woven"} <= rows.keys()
    assert "20.0 %" in rows["half-half"]


def test_programs_get_these_keys(capsys):
    found = json.loads(ask(capsys, "--pp 4 --microbatches 8 --kind half-half --json")[0])
    summary = {"kind", "time", "bubbles", "in_flight", "valid"}
    assert set(found) == {*summary, "stages", "microbatches", "faults", "order", "beside"}
    assert found["valid"] and not any(found["faults"].values()) and [len(order) for order in found["order"]] == [16] * 4
    assert [set(each) for each in found["beside"]] == [summary]
    assert found["beside"][0]["kind"] == "1f1b" and found["beside"][0]["time"] == 33


def test_times_are_in_the_unit_in_which_they_are_given(capsys):
    scaled = json.loads(ask(capsys, "--pp 6 --microbatches 24 --forward 10 --comm 1 --json")[0])
    plain = json.loads(ask(capsys, "--pp 6 --microbatches 24 --forward 1 --comm 0.1 --json")[0])
    assert scaled["time"] == pytest.approx(10 * plain["time"]) and scaled["order"] == plain["order"]


def test_the_picture_is_a_png_and_a_bad_path_is_said(capsys, tmp_path):
    path = tmp_path / "schedule.png"
    ask(capsys, f"--pp 4 --microbatches 6 --plot {path}")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "cannot be written" in ask(capsys, f"--pp 4 --microbatches 6 --plot {tmp_path}/no/where.png", code=2)[1]


@pytest.mark.parametrize(
    "words, said",
    [
        ("--pp 3 --microbatches 8", "the first two and the last two stages overlap"),
        ("--pp 4 --microbatches 1", "half of the microbatches"),
        ("--pp 0 --microbatches 4 --kind 1f1b", "at least one stage"),
        ("--pp 4 --microbatches 4 --forward 0", "the times of units must be above 0"),
        ("--pp 6 --microbatches 7 --kind interleaved", "interleaved schedule cannot run"),
        ("--pp 6 --microbatches 24 --most-in-flight 1", "no schedule that swaps"),
        ("--pp 6 --microbatches 24 --kind woven --most-in-flight 6", "memory (stage 0 holds 8 microbatches at once"),
    ],
)
def test_what_cannot_work_is_said(words, said, capsys):
    assert said in ask(capsys, words, code=2)[1]
