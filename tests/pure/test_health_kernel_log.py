"""What is read of a kernel log with wrong bytes and of one that fails, and that all lines are tested.

The lines that are known are in ``conversations/health/kernel_log.txt``, messages of several lines in
``conversations/readings/log.txt``.
"""

import re

import planted_node
from conversations import ROOT

from ft.platform.health import gpus, kernel_log
from ft.platform.health.kernel_log import LINES, KernelLog
from ft.platform.health.observation import HealthSource


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

    def fails(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(kernel_log.os, "read", fails)
        assert "Input/output error" in read(log).unreadable
    assert not read(log).observations, "old lines are not new"
    planted_node.log(tmp_path, "[ 9.0] NVRM: Xid (PCI:0000:3b:00): 31, new")
    assert [o.name for o in read(log).observations] == ["xid.31"]
