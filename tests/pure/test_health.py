"""The table of rules of health, and what is read of this machine, of damaged kernel logs and of growing counters.

Lines of logs, readings of planted nodes and what follows from them are in ``conversations/health`` and ``readings``.
"""

import dataclasses
import re
from pathlib import Path
from unittest.mock import Mock

import planted_node
import pytest
from conversations import ROOT

from ft.faults import verdict
from ft.faults.health import ACTIONS, DRAIN, LINK, RULES, THIS, WATCH
from ft.platform.health import Reading, gpus, kernel_log
from ft.platform.health.kernel_log import LINES, KernelLog
from ft.platform.health.observation import HealthSource
from ft.platform.health.reader import kernel_status, of_this_node

IMPORTANT = (13, 31, 32, 38, 43, 44, 45, 46, 48, 61, 62, 63, 64, 66, 68, 69, 74, 79, 92, 94, 95, 109, 110, 119, 120)
IMPORTANT += (*range(121, 126), 136, 137, 140, 143, *range(144, 151), *range(154, 159), 171, 172)
CATEGORIES = {verdict.DEVICE, verdict.HOST, verdict.NETWORK, verdict.SOFTWARE}


def test_every_row_is_complete():
    for rule in RULES:
        assert rule.category in CATEGORIES and rule.action in ACTIONS, rule
        assert rule.advice.endswith((".", ":")) and rule.meaning and len(rule.source) > 5, rule
        assert rule.action == WATCH or rule.category != verdict.SOFTWARE, rule
    names = [rule.observation for rule in RULES]
    assert len(set(names)) == len(names)
    assert names.index("xid.*") > max(names.index(f"xid.{number}") for number in IMPORTANT)


def test_every_important_xid_and_every_line_of_the_log_has_a_row():
    rows = {rule.observation for rule in RULES}
    assert {f"xid.{number}" for number in IMPORTANT} <= rows
    assert {line.name for line in LINES if "{code}" not in line.name} - {"gpu.recovered"} <= rows
    assert {f"xid.{number}.fatal" for number in range(144, 150)} | {"xid.94.reset"} <= rows
    for name in (*gpus.RECOVERY_ACTIONS[1:], gpus.UNKNOWN_ACTION):
        assert {f"xid.154.{name}", f"gpu.recovery.{name}"} <= rows
    assert not {"gpu.recovered", "gpu.recovery.none", "xid.154.none"} & rows, "they are no faults"


def test_no_row_acts_against_a_device_for_what_others_may_have_done():
    assert {rule.action for rule in RULES if rule.cause != THIS} == {WATCH}
    row = next(rule for rule in RULES if rule.observation == "nvlink.up")
    assert row.cause == LINK
    with pytest.raises(ValueError, match="although the cause is"):
        dataclasses.replace(row, action=DRAIN)
    of_peers = [rule for rule in RULES if re.search("peer|ack|rnr|seq|remote", rule.observation + rule.meaning)]
    assert len(of_peers) > 4 and {rule.action for rule in of_peers} == {WATCH}


def test_every_line_that_is_known_is_in_the_conversation():
    tested = set(re.findall(r"^([\w.]+) \|", (ROOT / "health" / "kernel_log.txt").read_text(), re.MULTILINE))
    assert {f"xid.154.{name}" for name in (*gpus.RECOVERY_ACTIONS[1:], "unknown")} <= tested
    left = {line.name for line in LINES if not line.name.startswith(("xid.154.", "xid.{code}"))} - tested
    assert not left


def read(log: KernelLog) -> HealthSource:
    log.read(found := HealthSource("n0", 1e9), 0.0, {})
    return found


def test_wrong_bytes_and_very_long_lines_do_no_harm(tmp_path):
    line = b"[ 5.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=\xff\xfe\x00, Ch 1 "
    (tmp_path / "kmsg").write_bytes(b"\xc3\x28 \x80\n" + line + b"x" * (6 << 20) + b"\n" + line + b"\n")
    found = read(KernelLog(tmp_path / "kmsg")).observations
    assert [o.name for o in found] == ["xid.31", "xid.31"] and max(len(o.text) for o in found) <= 1000
    assert "\ufffd" in found[0].text, "the rest of the line is kept"


def test_a_log_that_failed_is_read_from_its_end_on(tmp_path, monkeypatch):
    planted_node.plant(tmp_path)
    planted_node.log(tmp_path, "[ 5.0] NVRM: Xid (PCI:0000:3b:00): 79, of last week")
    log = KernelLog(tmp_path / "dev/kmsg")
    assert [o.name for o in read(log).observations] == ["xid.79"]
    with monkeypatch.context() as patch:
        patch.setattr(kernel_log.os, "read", Mock(side_effect=OSError(5, "Input/output error")))
        assert "Input/output error" in read(log).unreadable
    assert not read(log).observations, "old lines are not new"
    planted_node.log(tmp_path, "[ 9.0] NVRM: Xid (PCI:0000:3b:00): 31, new")
    assert [o.name for o in read(log).observations] == ["xid.31"]


def test_this_machine_can_be_read(tmp_path):
    reader = of_this_node("n0", watched=[Path("/"), tmp_path / "missing"])
    found = {(o.device, o.name): o.value for o in reader.read().observations}
    assert {("", "memory.available_share"), ("/", "disk.free_share"), ("", "clock.ahead")} <= found.keys()
    assert 0 <= found["/", "disk.free_share"] <= 1 and found[str(tmp_path / "missing"), "disk.unreachable"]
    assert reader.asking == ""
    reader.close()
    assert kernel_status() is None or kernel_status()[1] >= 0


def test_a_gpu_has_an_id_or_none_is_known():
    reading = Reading("n0", 1.0, aliases={"0000:3b:00.0": "gpu1", "GPU-0001": "gpu1"})
    assert reading.id_of("gpu1") == "GPU-0001" and reading.id_of("gpu7") == ""
