"""What is read of a planted kernel log: lines in the form of the drivers' own messages, times, and wrong bytes."""

import time
from pathlib import Path

import planted_node
import pytest

from ft.platform.health import EVENT, Observation, Reader, gpus, kernel_log
from ft.platform.health.kernel_log import LINES, KernelLog, parse
from ft.platform.health.observation import Source

AT = "[ 1234.500000] "
ALIASES = {"0000:3b:00.0": "gpu1", "0000:08:00.0": "mlx5_0"}

KNOWN = """\
xid.31 | gpu1 | 31
NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, Ch 1
xid.48 | gpu 0000:5e:00 | 48
NVRM: Xid (0000:5e:00): 48, An uncorrectable double bit error
xid.94 | gpu1 | 94
NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, pid=7, name=a, Contained: CE (0x9). RST: No, D-RST: No
xid.31 | gpu1 | 31
NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:01): 31, pid=7, name=python3, Ch 1
xid.94.reset | gpu1 | 94
NVRM: Xid (PCI:0000:3b:00): 94, pid=7, name=a b, Contained: CBC (0x1, 0x0). physAddr: 0x1 RST: No, D-RST: Yes
xid.95 | gpu1 | 95
NVRM: Xid (PCI:0000:3b:00): 95, Uncontained: LTC TAG (0x2,0x1). RST: Yes, D-RST: No
xid.79 | gpu 0001:3b:00 | 79
NVRM: Xid (PCI:0001:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
xid.79 | gpu 10000:3b:00 | 79
NVRM: Xid (PCI:10000:3b:00): 79, GPU has fallen off the bus.
xid.119 | gpu1 | 119
NVRM: Xid (PCI:0000:3b:00): 119, pid=20, name=nvidia-smi, Timeout after 6s of waiting for RPC \
response from GPU4 GSP! Expected function 103 (GSP_RM_ALLOC) (0x2081 0x4).
xid.45 | gpu1 | 45
NVRM: Xid (PCI:0000:3b:00): 45, pid=7, name=python, Ch 00000008 caused by previous Xid 31
xid.145 | gpu1 | 145
NVRM: Xid (PCI:0000:3b:00): 145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x040988e2 0x00000008)
xid.145.fatal | gpu1 | 145
NVRM: Xid (PCI:0000:3b:00): 145, pid=8, name=ray::Worker, RLW_REMAP Fatal   XC1 i0 Link 12 (0x04 0x40)
xid.149.fatal | gpu1 | 149
NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000)
xid.154.drain_p2p | gpu1 | 154
NVRM: Xid (PCI:0000:3b:00): 154, pid=1, name=a, GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)
xid.154.unknown | gpu1 | 154
NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x1f (Unknown)
gpu.recovered | gpu1 | 154
NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)
xid.154 | gpu1 | 154
NVRM: Xid (PCI:0000:3b:00): 154, of another form
log.gpu.init | gpu1 | 1
NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0xffff:2542)
log.gpu.off_the_bus | gpu1 | 1
NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.
sxid.fatal | nvswitch 0000:c1:00.0 | 12028
nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 x
sxid.other | nvswitch 0000:c1:00.0 | 20009
nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20009, Non-fatal, Link
sxid.switch | nvswitch 0000:c1:00.0 | 23001
nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 23001, Fatal, Link 30 ingress SRC-VC buffer overflow
sxid.switch | nvswitch 0000:c1:00.0 | 26006
nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 26006, SOE HALTED
sxid.heat | nvswitch 0000:c1:00.0 | 10004
nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 10004, NVSWITCH Temperature 99C | TSENSE WARN Threshold 97C
sxid.corrected | nvswitch 0000:c1:00.0 | 11012
nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 11012, Correctable, Link 30 ingress header ECC error
log.memory.corrected | mc1 | 3
EDAC MC1: 3 CE memory read error on CPU_SrcID#1
log.memory.uncorrected | mc0 | 1
EDAC MC0: 1 UE memory scrubbing error
log.memory.uncorrected |  | 1
Memory failure: 0x1fe4: recovery action for dirty LRU page
log.machine_check |  | 1
mce: [Hardware Error]: Machine check events logged
log.machine_check.fatal |  | 1
{1}[Hardware Error]: event severity: fatal
log.machine_check |  | 1
[Hardware Error]: Deferred error, no action required.
log.machine_check |  | 1
{1}[Hardware Error]: event severity: recoverable
log.pcie.uncorrected | gpu1 | 1
pcieport 0000:3a:00.0: AER: Multiple Uncorrectable (Fatal) error message received from 0000:3b:00.0
log.pcie.uncorrected | mlx5_0 | 1
pcieport 0000:3a:00.0: AER: Uncorrected (Non-Fatal) error received: 0000:08:00.1
log.pcie.fatal | gpu1 | 1
nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Inaccessible
log.pcie.fatal | gpu 0000:5e:00.0 | 1
nvidia 0000:5e:00.0: AER: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer
log.pcie.corrected | pci 0000:01:00.0 | 1
nvme 0000:01:00.0: PCIe Bus Error: severity=Correctable, type=Physical Layer, (Receiver ID)
log.pcie.contained | pci 0000:00:1c.0 | 1
pcieport 0000:00:1c.0: DPC: containment event, status:0x1f01: unmasked uncorrectable error detected
log.pcie.limited | mlx5_0 | 1
mlx5_core 0000:08:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at 0000:07:00.0
log.nic.power | mlx5_0 | 1
mlx5_core 0000:08:00.0: mlx5_pcie_event:299:(pid 2): Detected insufficient power on the PCIe slot (27W).
log.pcie.corrected | gpu1 | 1
nvme 0000:3b:00.0: PCIe Bus Error: severity=Corrected, type=Physical
log.pcie.uncorrected | gpu1 | 1
nvme 0000:3b:00.0: PCIe Bus Error: severity=Uncorrectable (Non-Fatal)
log.nic.down | mlx5_0 | 1
mlx5_core 0000:08:00.1 eth0: Link down
log.nic.dead | mlx5_0 | 1
mlx5_core 0000:08:00.0: poll_health:825: device's health compromised - reached
log.nic.cable | mlx5_0 | 1
mlx5_core 0000:08:00.0: Port module event[error]: module 0, Cable error, High
log.nic.heat | mlx5_0 | 1
mlx5_core 0000:08:00.0: mlx5_port_module_event:1131:(pid 0): Port module event[error]: module 0, Cable error, High \
Temperature
log.nic.timeout | mlx5_0 | 1
mlx5_core 0000:08:00.0: cmd_work_handler: timeout. Will cause a leak
log.disk.timeout | nvme1 | 1
nvme nvme1: I/O 12 QID 3 timeout, aborting
log.disk.reset | nvme1 | 1
nvme nvme1: I/O 12 QID 3 timeout, reset controller
log.disk.reset | nvme1 | 1
nvme nvme1: controller is down; will reset: CSTS=0xffffffff
log.disk.dead | nvme1 | 1
nvme nvme1: Removing after probe failure status: -19
log.disk.medium | sdb | 1
blk_update_request: critical medium error, dev sdb, sector 3
log.disk.error | nvme1n1 | 1
I/O error, dev nvme1n1, sector 5 op 0x0:(READ)
log.disk.error | dm-0 | 1
Buffer I/O error on dev dm-0, logical block 1308, lost async page write
log.disk.error | nvme0n1 | 1
block nvme0n1: no available path - failing I/O
log.disk.error | nvme0n1p1 | 1
md/raid0md0: Disk failure on nvme0n1p1 detected, failing array.
log.disk.dead | nvme4 | 1
nvme nvme4: Disabling device after reset failure: -19
log.file_system | md0 | 1
EXT4-fs (md0): Remounting filesystem read-only
log.file_system | dm-0 | 1
EXT4-fs (dm-0): I/O error while writing superblock
log.file_system | sda1 | 1
XFS (sda1): Filesystem has been shut down due to log error (0x2).
log.storage.waiting | 7.247.192.16 | 1
nfs: server 7.247.192.16 not responding, still trying
log.file_system | sda1 | 1
EXT4-fs error (device sda1): ext4_find_entry:1455
log.file_system | dm-0 | 1
XFS (dm-0): Metadata corruption detected
log.oom_kill |  | 4711
Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB
log.oom_kill |  | 4711
Out of memory: Killed process 4711 (python)
log.lockup |  | 7
watchdog: BUG: soft lockup - CPU#7 stuck for 22s!
log.lockup |  | 3
NMI watchdog: Watchdog detected hard LOCKUP on cpu 3
log.hung_task |  | 120
INFO: task python:12 blocked for more than 120 seconds.
log.clock.unstable |  | 1
clocksource: Marking clocksource 'tsc' as unstable because
"""
"""For each line of a log, before it: name of the observation, device and value."""


def known() -> list[tuple[str, str, str, float]]:
    """Return (line, name, device, value) of all known lines."""
    lines = KNOWN.splitlines()
    cases = []
    for said, line in zip(lines[::2], lines[1::2], strict=True):
        name, device, value = (word.strip() for word in said.split("|"))
        cases.append((line, name, device, float(value)))
    return cases


@pytest.mark.parametrize("line, name, device, value", known())
def test_a_line_of_the_kernel_log_is_an_event(line, name, device, value):
    event = parse(AT + line, "n0", 5e9, 1e9, ALIASES)
    assert event == Observation("n0", device, name, value, "", 1e9 + 1234.5, EVENT, AT + line)
    same = parse(f"3,77,1234500000,-;{line}", "n0", 5e9, 1e9, ALIASES)
    assert (same.name, same.device, same.when) == (name, device, 1e9 + 1234.5)
    assert parse(line, "n0", 5e9, 1e9, ALIASES).when == 5e9, "a line without a time is new"


def test_the_table_of_lines_is_tested_whole():
    tested = {name for _, name, _, _ in known()}
    assert {f"xid.154.{name}" for name in ("drain_p2p", "unknown")} <= tested
    left = {line.name for line in LINES if not line.name.startswith(("xid.154.", "xid.{code}"))} - tested
    assert not left


@pytest.mark.parametrize("number, name", list(enumerate(gpus.RECOVERY_ACTIONS)))
def test_each_recovery_that_the_driver_asks_for_is_read(number, name):
    line = (
        f"NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x4 (Drain and Reset) to 0x{number:x} (-)"
    )
    assert parse(line, "n0", 5e9, 1e9, ALIASES).name == (f"xid.154.{name}" if number else "gpu.recovered")


# The further lines of one report of an NVSwitch, the end of heat, and what means nothing, are no errors of their own.
OTHERS = (
    *("usb 1-1: new device", "EXT4-fs (vda): mounted", "NVRM: loading NVIDIA UNIX", ""),
    "NVRM: GPU at PCI:0000:3b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d",
    "NVRM: GPU4 GSP RPC buffer contains function 103 (GSP_RM_ALLOC) and data 0x2081 0x4.",
    "NVRM: Xid (invalid): some error",
    "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Severity 1 Engine instance 60 Sub-engine instance 00",
    "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Data {0x10000000, 0x10000000, 0x00000000}",
    "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 26006, SOE HALT data[0] = 0x12",
    "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 10005, Thermal slowdown Disengaged",
    "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 22013, Non-fatal, Link 30 Minion Link DLREQ interrupt",
    "[Hardware Error]: Corrected error, no action required.",
    "nvme nvme0: Shutdown timeout set to 8 seconds",
)


@pytest.mark.parametrize("line", OTHERS)
def test_other_lines_are_no_events(line):
    assert parse(AT + line, "n0", 5e9, 1e9, {}) is None


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


def read(log: KernelLog, aliases=None) -> Source:
    log.read(found := Source("n0", 1e9), 0.0, aliases or {})
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


@pytest.mark.parametrize(
    "begin, seconds",
    [
        ("<4>[ 1234.500000] ", 1e9 + 1234.5),
        ("[ 1234.500000][ T4711] ", 1e9 + 1234.5),
        ("Feb 23 16:24:18 node7 kernel: [ 1234.500000] ", 1e9 + 1234.5),
        ("4,77,1234500000,c,caller=T12;", 1e9 + 1234.5),
        ("2025-02-23T16:24:18,500000+00:00 ", 1740327858.5),
        ("[Xxx Feb 99 16:24:18 2025] ", 5e9),
    ],
)
def test_the_time_of_a_line_is_read_in_each_form(begin, seconds):
    line = "NVRM: Xid (PCI:0000:3b:00): 45, pid=7, name=[12.5], Ch 1 [99.000000]"
    assert parse(begin + line, "n0", 5e9, 1e9, {}).when == seconds


def test_the_local_time_of_dmesg_is_read(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    line = "[Sun Feb 23 16:24:18 2025] NVRM: Xid (PCI:0000:9b:00): 119, pid=20"
    assert parse(line, "n0", 5e9, 1e9, {}).when == 1740327858
    monkeypatch.undo()
    time.tzset()


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
