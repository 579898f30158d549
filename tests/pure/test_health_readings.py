"""What is read of a node's health, from planted file trees, a planted kernel log and a planted NVML."""

import importlib
import json
import sys
from pathlib import Path

import planted_node
import pytest

from ft.platform.health import COUNTER, EVENT, Observation, Reader, Reading, differences
from ft.platform.health.clock import kernel_status
from ft.platform.health.kernel_log import LINES, parse
from ft.platform.health.reader import of_this_node

PLANTED = Path(__file__).parent.parent / "helpers" / "planted_nvml"
GPU = {"used": 1, "errors": 0, "corrected": 4, "row_failed": 0, "retired": 0, "temperature": 60, "milliwatts": 310500}
GPU |= {"reasons": 0, "replays": 12, "links": [[0, 0, 0, 0], None], "action": 0}


def read(root: Path, **how) -> Reading:
    return Reader("n0", root, clock_status=lambda: (0, 1500), **how).read()


def values(reading: Reading) -> dict[tuple[str, str], float]:
    return {(o.device, o.name): o.value for o in reading.observations}


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    """Return (the planted NVML, a function that sets the state of its GPUs)."""
    monkeypatch.syspath_prepend(PLANTED)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("PLANTED_GPUS", str(tmp_path / "gpus.json"))
    yield importlib.import_module("pynvml"), lambda *gpus: (tmp_path / "gpus.json").write_text(json.dumps(gpus))
    sys.modules.pop("pynvml", None)


def test_a_planted_node_is_read_whole(tmp_path):
    reading = read(planted_node.plant(tmp_path), watched=[tmp_path, tmp_path / "missing"])
    found = values(reading)
    assert found["mlx5_0/1", "port.up"] == 1 and found["mlx5_0/1", "port.disabled"] == 0
    assert found["mlx5_0/1", "port.rate"] == 400 and found["mlx5_0/1", "port.link_downed"] == 2
    assert found["mlx5_0/1", "port.local_ack_timeout_err"] == 7
    assert found["eth0", "interface.rate"] == 100 and found["eth0", "interface.rx_errors"] == 0
    assert not any(device == "docker0" for device, _ in found), "software interfaces are no devices"
    assert found["mc0", "memory.corrected"] == 3 and found["mc0/dimm1", "memory.corrected"] == 3
    assert found["", "memory.available"] == 400 << 10 and found["", "memory.available_share"] == 0.4
    assert found["", "memory.oom_kills"] == 1 and found["", "memory.corrupted"] == 0
    assert found["nvme0", "disk.live"] == 1 and found["nvme0", "disk.temperature"] == 41.85
    assert found["sda", "disk.errors"] == 31
    assert 0 <= found[str(tmp_path), "disk.free_share"] <= 1 and found[str(tmp_path / "missing"), "disk.unreachable"]
    assert found["", "clock.slow_source"] == 0 and found["", "clock.error"] == 0.0015
    assert found["package0", "cpu.throttled"] == 0 and found["", "cpu.offline"] == 0
    assert reading.unreadable == {"GPUs": "the Python package nvidia-ml-py is not there"}


def test_what_cannot_be_read_is_named(tmp_path):
    reading = Reader("n0", tmp_path, clock_status=lambda: None).read()
    sources = {"GPUs", "network ports", "memory", "disks", "clock", "processors", "kernel log"}
    assert reading.unreadable.keys() == sources and "No such file" in reading.unreadable["kernel log"]
    assert [o.name for o in reading.observations] == ["clock.ahead"]


def test_this_machine_can_be_read():
    reader = of_this_node("n0", watched=[Path("/")])
    assert {"memory.available_share", "disk.free_share", "clock.ahead"} <= {o.name for o in reader.read().observations}
    assert reader.asking == ""
    reader.close()
    assert kernel_status() is None or kernel_status()[1] >= 0


def test_a_source_that_answers_nonsense_does_not_hide_the_others(tmp_path):
    def broken():
        raise ValueError("no struct")

    reading = Reader("n0", planted_node.plant(tmp_path), clock_status=broken).read()
    assert reading.unreadable["clock"] == "ValueError: no struct"
    assert values(reading)["mc0", "memory.corrected"] == 3


def test_the_difference_of_two_readings_is_the_growth_of_counters():
    def reading(when, **counters):
        found = (Observation("n0", "mc0", name, value, "", when, COUNTER) for name, value in counters.items())
        return Reading("n0", when, (*found, Observation("n0", "", "clock.ahead", when, "s", when)))

    changes = differences(reading(10.0, a=5, b=7, c=1), reading(40.0, a=8, b=2, d=9))
    assert [(change.now.name, change.grew, change.seconds) for change in changes] == [("a", 3, 30.0), ("b", 2, 30.0)]
    assert differences(None, reading(10.0, a=5)) == []


def test_gpus_are_read_through_nvml(tmp_path, nvml):
    module, plant = nvml
    plant(GPU, {**GPU, "reasons": 0x44, "errors": 2}, {"lost": True})
    reader = Reader("n0", tmp_path, module)
    reading = reader.read()
    found = values(reading)
    assert found["gpu0", "gpu.ecc.corrected"] == 4 and found["gpu1", "gpu.ecc.uncorrected"] == 2
    assert found["gpu0", "gpu.temperature"] == 60 and found["gpu0", "gpu.temperature.margin"] == 27
    assert found["gpu0", "gpu.power"] == 310.5 and found["gpu0", "gpu.pcie.replays"] == 12
    assert found["gpu1", "gpu.throttled.heat_hardware"] == 1 and found["gpu1", "gpu.throttled.power_cap"] == 1
    assert found["gpu1", "gpu.throttled.power_brake"] == 0
    assert found["gpu0/nvlink0", "nvlink.up"] == 1 and found["gpu0/nvlink1", "nvlink.up"] == 0
    assert ("gpu0/nvlink1", "nvlink.replays") not in found and found["gpu0/nvlink0", "nvlink.replays"] == 0
    assert (found["gpu0", "gpu.lost"], found["gpu2", "gpu.lost"]) == (0, 1)
    assert reading.aliases["0000:3b:00.0"] == "gpu1" and reading.id_of("gpu1") == "GPU-0001"
    assert reading.id_of("gpu7") == "" and "GPUs" not in reading.unreadable
    reader.close()


def test_xids_come_once_by_nvml_and_are_named_as_in_the_kernel_log(tmp_path, nvml):
    module, plant = nvml
    planted_node.plant(tmp_path)
    plant(GPU, GPU)
    reader = Reader("n0", tmp_path, module)
    reader.read()
    plant(GPU, {**GPU, "xids": [94, 94]})
    planted_node.log(tmp_path, "4,9,2000000,-;NVRM: Xid (PCI:0000:3a:00): 79, pid='<unknown>', GPU has fallen off")
    events = [o for o in reader.read().observations if o.kind == EVENT]
    assert [(o.device, o.name) for o in events] == [("gpu1", "xid.94"), ("gpu1", "xid.94"), ("gpu0", "xid.79")]
    assert events[0].text != events[1].text
    assert not [o for o in reader.read().observations if o.kind == EVENT]
    reader.close()


AT = "[ 1234.500000] "
ADDRESS = "0000:3b:00.0"


@pytest.mark.parametrize(
    "line, name, device, value",
    [
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, Ch 1", "xid.31", "gpu1", 31),
        ("NVRM: Xid (0000:5e:00): 48, An uncorrectable double bit error", "xid.48", "pci 0000:5e:00", 48),
        ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", "log.gpu.off_the_bus", "gpu1", 1),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 x",
            "sxid.fatal",
            "nvswitch 0000:c1:00.0",
            12028,
        ),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20009, Non-fatal, Link",
            "sxid.other",
            "nvswitch 0000:c1:00.0",
            20009,
        ),
        ("EDAC MC1: 3 CE memory read error on CPU_SrcID#1", "log.memory.corrected", "mc1", 3),
        ("EDAC MC0: 1 UE memory scrubbing error", "log.memory.uncorrected", "mc0", 1),
        ("Memory failure: 0x1fe4: recovery action for dirty LRU page", "log.memory.uncorrected", "", 1),
        ("mce: [Hardware Error]: Machine check events logged", "log.machine_check", "", 1),
        ("{1}[Hardware Error]: event severity: fatal", "log.machine_check.fatal", "", 1),
        ("pcieport 0000:3b:00.0: AER: Uncorrectable (Fatal) error message received", "log.pcie.fatal", "gpu1", 1),
        ("nvme 0000:3b:00.0: PCIe Bus Error: severity=Corrected, type=Physical", "log.pcie.corrected", "gpu1", 1),
        ("nvme 0000:3b:00.0: PCIe Bus Error: severity=Uncorrectable (Non-Fatal)", "log.pcie.uncorrected", "gpu1", 1),
        ("mlx5_core 0000:08:00.1 eth0: Link down", "log.nic.down", "mlx5_0", 1),
        ("mlx5_core 0000:08:00.0: poll_health:825: device's health compromised - reached", "log.nic.dead", "mlx5_0", 1),
        (
            "mlx5_core 0000:08:00.0: Port module event[error]: module 0, Cable error, High",
            "log.nic.cable",
            "mlx5_0",
            1,
        ),
        ("mlx5_core 0000:08:00.0: cmd_work_handler: timeout. Will cause a leak", "log.nic.timeout", "mlx5_0", 1),
        ("nvme nvme1: I/O 12 QID 3 timeout, aborting", "log.disk.timeout", "nvme1", 1),
        ("nvme nvme1: I/O 12 QID 3 timeout, reset controller", "log.disk.reset", "nvme1", 1),
        ("nvme nvme1: controller is down; will reset: CSTS=0xffffffff", "log.disk.reset", "nvme1", 1),
        ("nvme nvme1: Removing after probe failure status: -19", "log.disk.dead", "nvme1", 1),
        ("blk_update_request: critical medium error, dev sdb, sector 3", "log.disk.medium", "sdb", 1),
        ("I/O error, dev nvme1n1, sector 5 op 0x0:(READ)", "log.disk.error", "nvme1n1", 1),
        ("EXT4-fs error (device sda1): ext4_find_entry:1455", "log.file_system", "sda1", 1),
        ("XFS (dm-0): Metadata corruption detected", "log.file_system", "dm-0", 1),
        ("Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB", "log.oom_kill", "", 4711),
        ("Out of memory: Killed process 4711 (python)", "log.oom_kill", "", 4711),
        ("watchdog: BUG: soft lockup - CPU#7 stuck for 22s!", "log.soft_lockup", "", 7),
        ("INFO: task python:12 blocked for more than 120 seconds.", "log.hung_task", "", 120),
        ("clocksource: Marking clocksource 'tsc' as unstable because", "log.clock.unstable", "", 1),
    ],
)
def test_a_line_of_the_kernel_log_is_an_event(line, name, device, value):
    aliases = {ADDRESS: "gpu1", "0000:08:00.0": "mlx5_0"}
    event = parse(AT + line, "n0", 5e9, 1e9, aliases)
    assert event == Observation("n0", device, name, value, "", 1e9 + 1234.5, EVENT, AT + line)
    same = parse(f"3,77,1234500000,-;{line}", "n0", 5e9, 1e9, aliases)
    assert (same.name, same.device, same.when) == (name, device, 1e9 + 1234.5)
    assert parse(line, "n0", 5e9, 1e9, aliases).when == 5e9, "a line without a time is new"


def test_the_table_of_lines_is_tested_whole():
    tested = {mark.args[1][index][1] for mark in test_a_line_of_the_kernel_log_is_an_event.pytestmark for index in
              range(len(mark.args[1]))}  # fmt: skip
    left = {line.name for line in LINES} - tested - {"xid.{code}", "log.nic.heat"}
    assert not left


@pytest.mark.parametrize("line", ["usb 1-1: new device", "EXT4-fs (vda): mounted", "NVRM: loading NVIDIA UNIX", ""])
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
