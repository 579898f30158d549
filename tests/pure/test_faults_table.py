"""The table of faults: policy, injection, page and command say the same."""

import re
from pathlib import Path

import pytest
from fault_bundles import BUNDLES, ELSEWHERE

from ft.cli import main
from ft.faults import Fault, parse, read_scenario, schedule, table
from ft.faults.faults import OF_CONTROL, OF_NODE
from ft.faults.page import PAGE, SCENARIO, page, read_times
from ft.faults.spec import KEYS
from ft.faults.table import (
    DMR,
    FILES,
    GPU,
    HARMLESS,
    MEANING,
    NAMES,
    OF_ACTION,
    ROOT,
    START,
    STOPPED,
    TABLE,
    UNNOTICED,
    WORKER,
    row_of,
)
from ft.faults.worker import ACTS, IN_TRAINING
from ft.systems.hot_swap.recovery_manager import _ACTS as SESSION_ACTS
from ft.worker.session import surroundings
from megatron.ft_trainer.arguments import parse as parse_flags

ROOT_FOLDER = Path(__file__).parent.parent.parent
ROWS = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
INJECTED = pytest.mark.parametrize("row", [row for row in TABLE if row.where != START], ids=lambda row: row.name)


@ROWS
def test_what_the_table_says_of_a_kind_is_what_the_policy_decides(row):
    assert row.outcome in MEANING and row.does and row.seen
    if row.sign is None:
        assert row.outcome in (HARMLESS, UNNOTICED) or row.kind == "terminate"
        return
    assert OF_ACTION[row.sign.action] == row.outcome


@INJECTED
def test_each_kind_can_be_asked_for_and_is_carried_out_by_somebody(row):
    when = "step=4" if row.kind in OF_CONTROL or "node=" in row.how else "step=4:rank=1"
    (fault,) = schedule(parse(row.spec(when)), 4, ["n0", "n1"], 0)
    assert (fault.kind, fault.step) == (row.kind, 4)
    assert fault.is_injected_by_agent == (row.where not in (WORKER, FILES))
    carried_out = {*ACTS, *SESSION_ACTS, *OF_NODE, *OF_CONTROL, "slow"}
    assert row.kind in carried_out
    assert row_of(fault) is row


def test_no_kind_is_carried_out_that_the_table_does_not_know():
    assert {*ACTS, *SESSION_ACTS, *IN_TRAINING} <= set(NAMES)
    assert len({row.name for row in TABLE}) == len(TABLE)


@ROWS
def test_each_kind_is_tested_end_to_end(row):
    tested = {name for bundle in BUNDLES.values() for name, _ in bundle.faults}
    assert (row.name in tested) != (row.name in ELSEWHERE), "a kind is tested in one bundle, or says where else"
    assert not row.needs or row.name in ELSEWHERE
    assert row.needs in ("", ROOT, GPU, DMR)
    if row.outcome == STOPPED:
        assert row.name in ELSEWHERE


def test_the_page_is_what_the_command_makes():
    assert (ROOT_FOLDER / PAGE).read_text() == page(read_times(ROOT_FOLDER)), "run: python -m ft.faults.page"


def test_the_row_that_a_first_change_adds_fits_the_table():
    guide = (ROOT_FOLDER / "docs" / "first_change.md").read_text()
    (row,) = (eval(code, vars(table)) for code in re.findall(r"^ {8}(FaultRow\(\n.*?\n {8}\)),$", guide, re.M | re.S))
    assert OF_ACTION[row.sign.action] == row.outcome


def test_every_key_is_on_the_page():
    text = (ROOT_FOLDER / PAGE).read_text()
    for key in KEYS:
        assert re.search(rf"^\| `{key}` \| \S.*\. \|$", text, re.MULTILINE)


def test_the_scenario_on_the_page_can_be_run(tmp_path):
    (tmp_path / "s.yaml").write_text(SCENARIO)
    scenario = read_scenario(tmp_path / "s.yaml")
    assert scenario.seed == 7
    faults = schedule(scenario.specs, 4, ["n0", "n1"], scenario.seed)
    assert [fault.kind for fault in faults].count("slow") == 4
    assert all(fault.step for fault in faults if fault.kind == "slow") and faults[-1].time == 120


def test_the_command_prints_every_kind_and_key(capsys):
    assert main(["faults"]) == 0
    printed = capsys.readouterr().out
    for row in TABLE:
        assert re.search(rf"^  {re.escape(row.name)} +{row.outcome}", printed, re.MULTILINE)
    for key in KEYS:
        assert re.search(rf"^  {key} +[^ ].*\.$", printed, re.MULTILINE), f"ft faults does not say what {key} is"
    assert main(["faults", "--markdown"]) == 0
    assert capsys.readouterr().out == (ROOT_FOLDER / PAGE).read_text()


# --- disturbed messages ----------------------------------------------------------------------------------------------


def test_a_fault_in_a_recovery_waits_for_one_and_reaches_whoever_has_just_joined():
    from ft.faults.worker import Injector

    class Actions:
        def act(self, fault: Fault) -> None:
            done.append(fault.number)

    done: list[int] = []
    faults = [
        Fault(1, "kill", step=7, rank=0),
        Fault(2, "drop", step=7, rank=1, phase="restore"),
        Fault(3, "drop", step=20, rank=1, phase="restore"),
    ]
    survivor = Injector(faults, 1, "n0", [], lambda fault: None, Actions())
    for phase in ("between", "forward", "transfer"):
        survivor.at(phase, 7)
    survivor.at("restore", 6)
    assert done == []
    survivor.at("restore", 8)
    survivor.at("restore", 8)
    assert done == [2]
    joiner = Injector(faults, 1, "n0", [1], lambda fault: None, Actions())
    joiner.at("restore", 1)
    joiner.at("restore", 1)
    assert done == [2, 2]


# --- configuration drift ---------------------------------------------------------------------------------------------


def test_settings_are_what_changes_the_result_and_not_what_a_node_calls_its_own():
    own = {"CUDA_VISIBLE_DEVICES": "1", "NCCL_SOCKET_IFNAME": "eth0", "CUDA_MPS_PIPE_DIRECTORY": "/p", "HOME": "/root"}
    found = surroundings({"NCCL_ALGO": "Ring", **own})
    assert [name for name in found if name.startswith("environment")] == ["environment NCCL_ALGO"]
    assert {"torch", "python", "megatron-core", "code of ft and megatron"} <= found.keys()
    flags = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    options = parse_flags(flags + "--train-iters 9 --lr 1e-2 --metrics-file /a/b")
    given = options.given()
    assert given["--lr"] == "0.01" and given["--train-iters"] == "9"
    assert "--metrics-file" not in given and "--min-lr" not in given
