"""``ft dmr plan`` and ``ft dmr explain``: what they print and write, and files that cannot work."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from dmr_traces import PRINT, pipeline_trace, random_trace
from msgspec.structs import replace

from ft import cli
from ft.base.errors import UserError
from ft.systems.dmr.plan.file import (
    differences,
    read_plan,
    read_trace,
    refuse_plan_of_other_run,
    write_plan,
    write_trace,
)
from ft.systems.dmr.plan.planner import plan
from ft.systems.dmr.plan.text import gigabytes
from ft.systems.schedule.kinds import Pipeline

TRACE = pipeline_trace(Pipeline(2, 2, comm_us=5.0), tp_us=12.0)
BUDGET = "2500"


@pytest.fixture(scope="session")
def planned(tmp_path_factory):
    """A profile and its plan, once for all."""
    folder = tmp_path_factory.mktemp("planned")
    profile, out = folder / "prof.json", folder / "plan.json"
    write_trace(profile, TRACE)
    assert cli.main(["dmr", "plan", str(profile), "--memory-budget", BUDGET, "--out", str(out)]) == 0
    return profile, out


@pytest.fixture
def files(planned, tmp_path):
    """Copies of both, to be changed."""
    return tuple(Path(shutil.copy(path, tmp_path)) for path in planned)


def refused(capsys, *words: str) -> str:
    capsys.readouterr()
    try:
        code = cli.main(["dmr", *words])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    assert code == 2 and not said.out
    return said.err


def changed(path, change) -> str:
    """The file with its values changed by ``change``."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return str(path)


def test_traces_and_plans_are_read_as_they_were_written(tmp_path):
    first = random.randrange(10**6)
    print("first seed", first)
    for seed in range(first, first + 20):
        trace = random_trace(seed, dynamic=seed % 2 == 0)
        path = tmp_path / "file.json"
        write_trace(path, trace)
        read = read_trace(path)
        assert replace(read, memory=trace.memory, tensors=trace.tensors) == trace
        assert dict(read.tensors) == dict(trace.tensors) and not list(tmp_path.glob(".*"))
        found = plan(read, 1e3)
        write_plan(path, found)
        assert read_plan(path) == found


def test_plan_and_explain_say_the_same(files, capsys):
    profile, out = map(str, files)
    capsys.readouterr()
    assert cli.main(["dmr", "plan", profile, "--memory-budget", BUDGET]) == 0
    printed = capsys.readouterr().out
    assert "D_inter" in printed and "P: with the recomputation" in printed and "bubble" in printed
    assert cli.main(["dmr", "explain", out]) == 0
    assert capsys.readouterr().out == printed
    assert cli.main(["dmr", "explain", out, "--operators", "mm1"]) == 0
    assert "mm1" in (listed := capsys.readouterr().out) and "mm2" not in listed


def test_json_has_these_keys(files, capsys):
    capsys.readouterr()
    assert cli.main(["dmr", "explain", str(files[1]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"predicted", "phases", "sets", "windows", "agc_segments", "memory", "online", "reasons"}
    assert len(found["phases"]) == 4 and found["memory"]["budget"] == float(BUDGET)
    assert {"t_none", "t_naive", "t_plan", "peak_bytes", "overhead", "gain"} <= set(found["predicted"])


def test_the_picture_is_a_png(files, tmp_path, capsys):
    path = tmp_path / "plan.png"
    assert cli.main(["dmr", "explain", str(files[1]), "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_windows_and_phases_can_be_left_out(files, capsys):
    def overhead(*words):
        capsys.readouterr()
        assert cli.main(["dmr", "plan", str(files[0]), "--memory-budget", BUDGET, "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)["predicted"]["overhead"]

    assert overhead() < overhead("--no-windows", "bubble") <= overhead("--phases", "1") < overhead("--phases", "0")


def _cycle(values):
    ops = values["ops"]
    ops[0].setdefault("in_ids", []).append(ops[5]["out_ids"][0])
    ops[5].setdefault("in_ids", []).append(ops[0]["out_ids"][0])


@pytest.mark.parametrize(
    "change, said",
    [
        (_cycle, "cycle: operators need each other's results"),
        (lambda values: values.pop("ops"), "has no 'ops'"),
        (lambda values: values["ops"][3].update(t_us=-1.0), "ops[3] has t_us = -1.0"),
        (lambda values: values["ops"][3].update(t_us="long"), "ops[3] has t_us = 'long'"),
        (lambda values: values["ops"][3].update(phase="sideways"), "ops[3] has phase = 'sideways'"),
        (lambda values: values["ops"][3].update(in_ids=["nowhere"]), "uses a tensor 'nowhere'"),
        (lambda values: values["ops"].append(values["ops"][0]), "lists operator"),
        (lambda values: values["ops"][3].update(stage=7), "on stage 7"),
        (lambda values: values["ops"].__setitem__(2, []), "ops[2] is not a JSON object"),
        (lambda values: values["windows"][0].update(kind="door"), "windows[0] has kind = 'door'"),
        (lambda values: values["windows"][0].update(dur_us=float("nan")), "NaN is no finite number"),
        (lambda values: values["tensors"]["w"].update(bytes=True), "tensors: w has bytes = True"),
        (lambda values: values["fingerprint"].pop("torch"), "has no 'torch'"),
        (lambda values: values["memory"]["timeline"].update({"0": [[0, -5]]}), "`float` >= 0.0"),
        (lambda values: values["memory"]["timeline"].update(one=[]), "Expected `int`"),
        (lambda values: values["pipeline"].update(stages=0), "no pipeline has Pipeline(stages=0"),
        (lambda values: values["pipeline"].update(microbatches=10**12), "has more than 10000000 forwards"),
        (lambda values: values["ops"][3].update(t_us=10**400), "is too large"),
        (lambda values: values["units"].pop(), "units has other units than its schedule"),
    ],
)
def test_profiles_and_plans_that_cannot_be_are_refused_with_what_is_wrong(change, said, files, capsys):
    profile, out = files
    assert said in refused(capsys, "plan", changed(profile, change), "--memory-budget", "80GB")
    assert said in refused(capsys, "explain", changed(out, lambda values: change(values["trace"])))


def _deferred(values) -> str:
    return next(name for name, how in values["assign"].items() if how["set"] == "D_intra")


def _segment(values) -> dict:
    return next(iter(values["segments"].values()))


def _empty_segment(values) -> dict:
    return {**_segment(values), "ops": [], "keeps": [], "load_us": 0.0}


def _index(values) -> int:
    return next(i for i, op in enumerate(values["trace"]["ops"]) if op["id"] == _deferred(values))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda values: values["assign"].popitem(), "is not assigned: it would go unverified"),
        (lambda values: values["assign"].update(ghost={"set": "naive"}), "'ghost' is assigned, but the plan"),
        (lambda values: values["assign"][_deferred(values)].update(set="maybe"), "set = 'maybe'"),
        (lambda values: values["assign"][_deferred(values)].update(window="door"), "a window 'door' that"),
        (lambda values: values["assign"][_deferred(values)].update(set="D_inter"), "its window"),
        (lambda values: values["assign"][_deferred(values)].update(set="P"), "nothing recomputes it"),
        (lambda values: [each.update(dur_us=0.1) for each in values["trace"]["windows"]], "of verification"),
        (lambda values: values["trace"]["memory"].update(budget=1000.0), "and the plan's budget is"),
        (lambda values: values["assign"][_deferred(values)].update(agc_segment="s"), "AGC segment 's'"),
        (lambda values: values["assign"][_deferred(values)].update(set="unchecked"), "leaves it unchecked"),
        (lambda values: values["assign"][_deferred(values)].update(set="naive"), "has a window"),
        (lambda values: values["trace"]["ops"][_index(values)].update(mutates=["w"]), "must be verified at once"),
        (lambda values: values["trace"]["ops"][_index(values)].update(deterministic=False), "is not reproducible"),
        (lambda values: _segment(values)["keeps"].pop(0), "which it neither keeps nor makes"),
        (lambda values: _segment(values).update(load_us=0.1), "is said to take 0.1"),
        (lambda values: _segment(values)["ops"].append("ghost"), "has operator 'ghost'"),
        (lambda values: _segment(values).update(window="door"), "a window 'door' that"),
        (lambda values: _segment(values)["again"].append("ghost"), "'ghost' again, which is none of a recomputation"),
        (lambda values: values["segments"].update(empty=_empty_segment(values)), "'empty' has no operators"),
        (lambda values: values.update(version=2), "has version 2, but this version of the program reads 3"),
        (lambda values: values.pop("version"), "has no 'version'"),
        (lambda values: values.pop("assign"), "is a profile, not a plan"),
        (lambda values: values["predicted"].pop("t_plan"), "has no 't_plan'"),
    ],
)
def test_plans_that_cannot_be_followed_are_refused_with_what_is_wrong(change, said, files, capsys):
    assert said in refused(capsys, "explain", changed(files[1], change))


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"version":3,"assign":{"a":{"set":"P"},"a":{"set":"naive"}}}', "has 'a' twice"),
        ("[" * 100_000, "cannot be understood"),
        ('{"version":' + "1" * 5000 + "}", "cannot be understood"),
        ("[1, 2]", "is not a JSON object"),
    ],
)
def test_a_file_that_says_one_thing_twice_or_cannot_be_understood_is_refused(text, said, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert said in refused(capsys, "explain", str(path))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_the_beginning_of_a_file_is_refused(share, files, capsys):
    for command, path in zip(("plan", "explain"), files, strict=True):
        whole = path.read_text()
        path.write_text(whole[: int(share * len(whole))])
        assert "not JSON, or is truncated" in refused(capsys, command, str(path))


def test_files_that_are_not_there_or_cannot_be_written_are_named(files, tmp_path, capsys):
    assert "cannot be read" in refused(capsys, "explain", str(tmp_path / "none.json"))
    assert "cannot be read" in refused(capsys, "plan", str(tmp_path))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert "is no text" in refused(capsys, "plan", str(tmp_path / "binary.json"))
    nowhere = str(tmp_path / "no folder" / "plan.json")
    assert "cannot be written" in refused(capsys, "plan", str(files[0]), "--memory-budget", "80GB", "--out", nowhere)


def test_a_budget_has_to_be_given_and_to_be_enough(files, capsys):
    profile = str(files[0])
    assert "no memory budget" in refused(capsys, "plan", profile)
    assert "without any verification" in refused(capsys, "plan", profile, "--memory-budget", "10")
    for wrong in ("80XB", "-3GB", "0", "much"):
        assert "not a size like 80GB" in refused(capsys, "plan", profile, f"--memory-budget={wrong}")
    assert "needs a subcommand" in refused(capsys)
    known = ("--known", str(files[1]), "--phases", "1")
    assert "fewer phases are requested" in refused(capsys, "plan", profile, "--memory-budget", "80GB", *known)


def test_sizes_are_written():
    assert (gigabytes(61.34e9), gigabytes(5e6), gigabytes(10)) == ("61.3 GB", "5.0 MB", "10 B")


def test_a_plan_for_another_run_is_refused_with_what_differs(files):
    found = read_plan(files[1])
    refuse_plan_of_other_run(found, PRINT)
    with pytest.raises(UserError, match=r"torch: planned for 'x', the run has '2\.9'"):
        refuse_plan_of_other_run(found, {**PRINT, "torch": "2.9"})
    assert differences(PRINT, {**PRINT, "tp": 2, "extra": 1}) == [
        "tp: planned for 'x', the run has 2",
        "extra: planned for None, the run has 1",
    ]


def test_a_file_is_replaced_whole(files):
    os.chmod(files[1], 0o444)
    write_plan(files[1], read_plan(files[1]))
    assert read_plan(files[1]).assign
