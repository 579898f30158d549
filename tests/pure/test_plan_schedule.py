"""``ft plan schedule``: tables, the keys that programs get, the file of steps, and input that cannot work."""

import json

import pytest

from ft import cli
from ft.systems.schedule.choose import KINDS, Shape, plan
from ft.systems.schedule.program import Message, Unit


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


def _step(planned, values, stage: int, step: dict):
    """The step of a schedule that a stage's entry in its file stands for."""
    if step["do"] in ("forward", "backward"):
        unit = Unit(stage, step["microbatch"], step.get("chunk", 0), step["do"] == "backward")
        place = values["ways"][step["way"]][step["position"]]
        assert place == ([stage, unit.chunk] if "chunk" in step else stage)
        assert (step["way"] == "swapped") == (unit.microbatch in values["swapped"])
        return unit
    ops = []
    for op in step["ops"]:
        ends = (stage, op["peer"]) if op["op"] == "send" else (op["peer"], stage)
        ops.append(Message(*ends, Unit(ends[0], op["microbatch"], op.get("chunk", 0), op["what"] == "gradient")))
    return tuple(ops)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_has_all_that_it_takes_to_run(kind, capsys, tmp_path):
    path = tmp_path / "steps.json"
    ask(capsys, f"--pp 4 --microbatches 8 --kind {kind} --out {path}")
    planned, values = plan(kind, Shape(4, 8)), json.loads(path.read_text())
    predicted = values.pop("predicted")
    assert set(predicted) == {"forward", "backward", "comm", "time", "bubbles", "in_flight"}
    assert predicted["time"] == planned.ran.end
    for stage, (steps, read) in enumerate(zip(planned.program.stages, values["steps"], strict=True)):
        assert [_step(planned, values, stage, step) for step in read] == list(steps)
    dones = {step["do"] for steps in values["steps"] for step in steps}
    assert dones == {"forward", "backward", "transfer"}
    if kind == "woven":
        assert values["ways"] == {"normal": [0, 1, 2, 3], "swapped": [1, 0, 3, 2]} and values["swapped"] == [1, 3, 5, 7]
        step = {"do": "forward", "microbatch": 1, "way": "swapped", "position": 0}
        assert values["steps"][1][0] == step


def test_the_picture_is_a_png_and_a_bad_path_is_said(capsys, tmp_path):
    path = tmp_path / "schedule.png"
    ask(capsys, f"--pp 4 --microbatches 6 --plot {path}")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "cannot be written" in ask(capsys, f"--pp 4 --microbatches 6 --plot {tmp_path}/no/where.png", code=2)[1]
    assert "cannot be written" in ask(capsys, f"--pp 4 --microbatches 6 --out {tmp_path}/no/where.json", code=2)[1]


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
def test_what_cannot_work_is_said_and_writes_no_file(words, said, capsys, tmp_path):
    path = tmp_path / "steps.json"
    assert said in ask(capsys, f"{words} --out {path}", code=2)[1] and not path.exists()
