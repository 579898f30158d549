"""What is read of a planted kernel log: times, messages of several lines, and wrong bytes.

The lines that are known are in ``conversations/health/kernel_log.txt``.
"""

import re
from pathlib import Path

import planted_node
from conversations import ROOT

from ft.platform.health import EVENT, Reader, gpus, kernel_log
from ft.platform.health.kernel_log import LINES, KernelLog
from ft.platform.health.observation import HealthSource


def test_every_line_that_is_known_is_in_the_conversation():
    tested = set(re.findall(r"^([\w.]+) \|", (ROOT / "health" / "kernel_log.txt").read_text(), re.MULTILINE))
    assert {f"xid.154.{name}" for name in (*gpus.RECOVERY_ACTIONS[1:], "unknown")} <= tested
    left = {line.name for line in LINES if not line.name.startswith(("xid.154.", "xid.{code}"))} - tested
    assert not left


def test_only_complete_new_lines_of_a_log_are_read(tmp_path):
    planted_node.plant(tmp_path)
    reader = Reader("n0", tmp_path)
    assert not [o for o in reader.read().observations if o.kind == EVENT]
    with (tmp_path / "dev/kmsg").open("a") as file:
        file.write("[ 5.0] NVRM: Xid (PCI:0000:3b:00): 3")
    assert not [o for o in reader.read().observations if o.kind == EVENT]
    planted_node.log(tmp_path, "1, pid=3")
    assert [o.name for o in reader.read().observations if o.kind == EVENT] == ["xid.31"]
    reader.close()


def read(log: KernelLog, aliases=None) -> HealthSource:
    log.read(found := HealthSource("n0", 1e9), 0.0, aliases or {})
    return found


def events_of(root: Path, aliases=None) -> list[tuple[str, str]]:
    return [(o.device, o.name) for o in read(KernelLog(root / "kmsg"), aliases).observations]


def test_a_message_of_several_lines_is_one_event(tmp_path):
    message = ("NVRM: The NVIDIA GPU 0000:18:00.0", "NVRM: (PCI ID: 10de:2330) installed in this system has")
    message += ("NVRM: fallen off the bus and is not responding to commands.",)
    gone = [("gpu 0000:18:00.0", "log.gpu.off_the_bus")]
    (tmp_path / "kmsg").write_text("3,7,5000000,-;" + r"\x0a".join(message) + "\n SUBSYSTEM=pci\n")
    assert events_of(tmp_path) == gone, "as /dev/kmsg has it"
    stamped = "".join(f"[    5.000000] {line}\n" for line in message)
    (tmp_path / "kmsg").write_text(stamped)
    assert events_of(tmp_path) == gone, "as dmesg has it"
    first, rest = stamped.split("\n", 1)
    (tmp_path / "kmsg").write_text(f"{first}\n[    5.000000] usb 1-1: new device\n{rest}")
    assert events_of(tmp_path) == gone, "with a line of another driver in between"
    (tmp_path / "kmsg").write_text(stamped.split("\n", 1)[1])
    assert not events_of(tmp_path), "without its first line, nobody knows which GPU it is"


def test_faults_of_several_gpus_are_told_apart(tmp_path):
    lines = [
        "4,1,171167620236,-;NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6)",
        "4,2,171167621162,-;NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain"
        " and Reset)",
        "4,3,171167630899,-;NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6)",
        "4,4,171167897562,-;NVRM: Xid (PCI:0019:01:00): 154, GPU recovery action changed from 0x4 (Drain and Reset) to"
        " 0x1 (GPU Reset Required)",
    ]
    (tmp_path / "kmsg").write_text("\n".join(lines) + "\n")
    aliases = {"0008:01:00.0": "gpu0", "0009:01:00.0": "gpu1", "0018:01:00.0": "gpu2", "0019:01:00.0": "gpu3"}
    assert events_of(tmp_path, aliases) == [
        *(("gpu1", "xid.149.fatal"), ("gpu1", "xid.154.drain_and_reset")),
        *(("gpu0", "xid.149.fatal"), ("gpu3", "xid.154.gpu_reset")),
    ]


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
