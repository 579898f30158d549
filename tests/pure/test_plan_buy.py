"""``ft plan buy`` and its views: the table, the recommendation, what programs get, and the lines that start the run."""

import csv
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from closed_forms import asked
from pythons import python

from ft import cli
from ft.commands.check import answer_for
from ft.lab.plan.goodput import answer, buy, launch, model
from ft.lab.plan.goodput.model import CHECKPOINTS, ProtectionChoice
from ft.protection.table import DOUBLE, HOT_SWAP, REPLICAS, STACKS, STAGES, SWAPPED
from ft.systems.spare.placement import read

WORDS = "--gpus 128 --gpu-mtbf 2000h --step-time 10s --save-time 60s --restart-time 10m --repair-time 24h --params 7B"
KEYS = {"protections", "spares", "interval_steps", "effective", "effective_low", "effective_high", "paid_per_useful"}


@pytest.fixture(scope="module")
def found() -> answer.Answer:
    return answer.answer(asked(f"{WORDS} --failures 3000"))


def out(words: str, capsys) -> str:
    assert cli.main(["plan", *shlex.split(words)]) == 0
    return capsys.readouterr().out


def test_every_combination_has_its_rows_sorted_by_cost(found):
    names = {row.protection.names for row in found.rows}
    assert {(CHECKPOINTS,), (HOT_SWAP,), (REPLICAS,), (REPLICAS, STACKS), (HOT_SWAP, STAGES), (DOUBLE,)} <= names
    assert (HOT_SWAP, STAGES, SWAPPED, DOUBLE) in names and (model.FEWER,) in names
    assert [row.paid for row in found.rows] == sorted(row.paid for row in found.rows)
    assert {row.protection.returns for row in found.rows if row.protection.names == (REPLICAS, STACKS)} == {True, False}


def test_the_recommended_row_is_the_simplest_of_the_cheapest(found):
    ours = [row for row in found.rows if answer.is_ours(row)]
    assert found.recommended.paid <= 1.002 * min(row.paid for row in ours)
    assert found.reason.count(". ") == 1 and found.reason.endswith(".")


def test_failures_that_are_rarer_make_it_cheaper(found):
    paid = {change.factor: change.paid for change in found.changes if change.key == "gpu_mtbf"}
    assert paid[0.3] > paid[3.0] > paid[10.0]
    assert all(change.least <= change.paid for change in found.changes)


def test_the_value_at_which_another_row_wins_is_found_by_bisection():
    """Standbys and repairs are as given, so that restarts of checkpoints alone decide against hot-swap."""
    words = f"{WORDS} --failures 3000 --spares 4 --interval 200 --snapshot-overhead 0.03 --stall-time 30m"
    found = answer.answer(asked(words))
    turn = next(turn for turn in found.turns if turn.key == "restart_time")
    at = {}
    for side, factor in (("before", turn.factor**0.8), ("beyond", turn.factor**1.2)):
        other = asked(words).but(restart_time=600.0 * factor)
        rows = [model.best(other, [row.protection], 3000) for row in found.rows if answer.is_ours(row)]
        at[side] = answer.recommended(rows).protection.title
    assert at["before"] == found.recommended.protection.title != at["beyond"] == turn.winner
    assert turn.value == pytest.approx(600.0 * turn.factor)


def test_a_list_of_standbys_has_a_row_for_each_and_the_text_shows_the_best():
    found = answer.answer(asked(f"{WORDS} --failures 300 --spares 0,3"))
    alone = [row for row in found.rows if row.protection.names == (CHECKPOINTS,)]
    assert {row.spares for row in alone} == {0, 3} and found.recommended.paid == min(
        row.paid for row in found.rows if answer.is_ours(row)
    )
    assert len(buy.first_of_each(found.rows)) * 2 == len(found.rows) and "for every number" in buy.as_text(found)


def test_json_has_the_keys_that_are_promised(found):
    values = json.loads(json.dumps(buy.as_values(found)))
    assert all(row.keys() >= KEYS for row in values["rows"])
    assert values["recommended"]["protections"] == list(found.recommended.protection.names)
    assert values["assumed"]["days"] == "90.0" and "repair_time" not in values["assumed"]
    assert values["origin"]["swap_time"]["from"].startswith("paper")
    alone = next(row for row in values["rows"] if row["protections"] == ["checkpoints"])
    assert alone["effective_low"] <= alone["effective"] <= alone["effective_high"]


def test_csv_has_a_line_for_each_row(found):
    lines = list(csv.DictReader(io.StringIO(buy.as_csv(found))))
    assert [line["protections"] for line in lines] == ["+".join(row.protection.names) for row in found.rows]
    assert float(lines[0]["paid_per_useful"]) == found.rows[0].paid


def test_the_text_has_the_table_the_reason_and_the_origin_of_every_value(found):
    text = buy.as_text(found)
    assert found.reason in text and "ft run --nnodes" in text and "given: --gpus 128" in text
    assert "paper (DEADPOOL" in text and "fitted to 2 cells" in text and "assumed:" in text


@pytest.mark.parametrize("names", [(CHECKPOINTS,), (HOT_SWAP,), (REPLICAS,), (REPLICAS, STACKS), (HOT_SWAP, STAGES),
                                   (HOT_SWAP, STAGES, SWAPPED), (HOT_SWAP, REPLICAS)])  # fmt: skip
@pytest.mark.parametrize("gpus", [64, 4096, 98304])
def test_ft_check_accepts_the_line_of_every_row(names, gpus):
    given = asked(WORDS.replace("128", str(gpus)).replace("7B", "70B"))
    protections = model.candidates(given, names)
    for protection in protections[:1]:
        row = model.simulate(given, protection, 2, 300, 200)
        line = launch.lines(given, row)["check"].split()
        found = answer_for(Path(line[4]), line[5:], gpus // protection.units)
        assert found.accepted, found.refused


def test_a_plan_of_spare_is_one_that_a_run_reads(tmp_path, capsys):
    path = tmp_path / "plan.json"
    out(f"buy {WORDS.replace('7B', '1B')} --replicas 16 --failures 400 --spare-plan {path}", capsys)
    assert read(path, 16).redundancy >= 2


def test_init_writes_a_file_that_the_command_takes(tmp_path, capsys):
    path = tmp_path / "scenario.toml"
    out(f"buy {path} --init", capsys)
    assert "--repair-time 24h" in out(f"interval {path} --gpus 64 --failures 400", capsys)
    assert cli.main(["plan", "buy", str(path), "--init"]) == 2


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_pictures_have_the_kind_of_their_ending(ending, found, tmp_path, capsys):
    from ft.lab.plan.goodput.picture import pareto

    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    pareto(found, tmp_path / f"buy.{ending}")
    out(f"spares {WORDS} --failures 400 --spares 0,2 --plot {tmp_path}/spares.{ending}", capsys)
    out(f"schedule --pp 4 --microbatches 6 --plot {tmp_path}/schedule.{ending}", capsys)
    names = ("buy", "spares", "schedule")
    assert all((tmp_path / f"{name}.{ending}").read_bytes().startswith(begins) for name in names)


def test_bad_input_is_refused_before_anything_large_is_imported():
    code = (
        "import sys; from ft import cli; code = cli.main('plan buy --gpus 1e99 --save-time nan'.split());"
        "sys.exit(code + 10 * any(name in sys.modules for name in ('torch', 'scipy', 'numba', 'matplotlib')))"
    )
    done = python("-c", code)
    assert done.returncode == 2, done.stderr


def test_spares_and_interval_show_the_optimum(capsys):
    rows = json.loads(out(f"spares {WORDS} --failures 2000 --json", capsys))
    assert rows.keys() == {"checkpoints", "hot-swap", "replicas"}
    assert rows["hot-swap"][0]["effective"] < rows["hot-swap"][-1]["effective"]
    found = json.loads(out(f"interval {WORDS} --repair-time 0 --failures 20000 --json", capsys))
    pairs = zip(found["rows"]["checkpoints"], found["daly"], strict=True)
    assert all(row["effective"] == pytest.approx(daly, abs=0.006) for row, daly in pairs)


def test_a_run_without_standbys_waits_for_repairs():
    row = model.simulate(asked(WORDS), ProtectionChoice((CHECKPOINTS,)), 0, 100, 4000)
    waited = row.totals["waited"] / row.totals["seconds"]
    assert waited == pytest.approx(model.waiting(16, 0, 250 * 3600, 86400), abs=0.02)


@pytest.mark.parametrize(("gpus", "more"), [(8, ""), (16, ""), (24, "--stages 3"), (3, "--gpus-per-node 1 --stages 3")])
def test_small_clusters_have_the_rows_that_fit(gpus, more):
    given = asked(f"{WORDS.replace('128', str(gpus)).replace('7B', '100M')} --failures 300 {more}")
    titles = {row.protection.title for row in answer.answer(given).rows}
    assert "checkpoints" in titles and ("hot-swap" in titles) == (given.nodes > 1)
    assert ("hot-swap + CheckFree" in titles) == (given.nodes >= given.stages)


def test_a_run_in_which_nothing_gets_done_is_told():
    found = answer.answer(asked(f"{WORDS.replace('2000h', '1h').replace('24h', '9000d')} --failures 300 --spares 0"))
    assert found.reason.startswith("Nothing trains") and "never" in buy.as_text(found)
    assert json.loads(json.dumps(buy.as_values(found)))["recommended"]["paid_per_useful"] is None


def test_a_progress_bar_is_drawn_on_terminals_only(monkeypatch, capsys):
    assert buy.progress() is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    buy.progress()(1, 2, "hot-swap")
    assert "hot-swap" in capsys.readouterr().err


STORED = Path(__file__).parents[2] / "tools/experiments/results"


def rows_of(text: str) -> dict[str, float]:
    """Return name -> useful per cent of the rows of an output."""
    found = re.findall(r"^(\S.*?)  +[\d,]+  +\S+  +([\d.]+) % \(", text, re.MULTILINE)
    return {name: float(share) for name, share in found}


@pytest.mark.skipif(model.engine.player()[0] != "numba", reason="numba is not installed (pip install numba)")
@pytest.mark.parametrize("gpus", [64, 4096, pytest.param(98304, marks=pytest.mark.long)])
def test_the_worked_cases_are_what_the_command_prints(gpus, capsys):
    stored = (STORED / f"plan_buy_{gpus}.txt").read_text()
    printed = out(stored.splitlines()[0].removeprefix("$ ft plan "), capsys)
    assert rows_of(printed).keys() == rows_of(stored).keys() and len(rows_of(stored)) > 20
    assert rows_of(printed) == pytest.approx(rows_of(stored), abs=0.5)
    assert [line.split(" with ")[0] for line in printed.splitlines() if line.startswith("Buy ")] == [
        line.split(" with ")[0] for line in stored.splitlines() if line.startswith("Buy ")
    ]
