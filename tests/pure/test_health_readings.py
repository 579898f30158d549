"""What is read of a node's health, from planted file trees, a planted kernel log and a planted NVML."""

from pathlib import Path

import planted_node

from ft.platform.health import COUNTER, EVENT, Observation, Reader, Reading, differences
from ft.platform.health.reader import kernel_status, of_this_node

GPU = {"used": 1, "errors": 0, "corrected": 4, "row_failed": 0, "retired": 0, "temperature": 60, "milliwatts": 310500}
GPU |= {"reasons": 0, "replays": 12, "links": [[0, 0, 0, 0], None], "action": 0}


def read(root: Path, **how) -> Reading:
    return Reader("n0", root, clock_status=lambda: (0, 1500), **how).read()


def values(reading: Reading) -> dict[tuple[str, str], float]:
    return {(o.device, o.name): o.value for o in reading.observations}


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
    assert found["mlx5_0", "pcie.corrected"] == 3 and found["mlx5_0", "pcie.fatal"] == 0
    assert found["mlx5_0", "pcie.lanes_lost"] == 0
    assert 0 <= found[str(tmp_path), "disk.free_share"] <= 1 and found[str(tmp_path / "missing"), "disk.unreachable"]
    assert found["", "clock.slow_source"] == 0 and found["", "clock.error"] == 0.0015
    assert found["package0", "cpu.throttled"] == 0 and found["", "cpu.offline"] == 0
    assert reading.unreadable == {"GPUs": "the Python package nvidia-ml-py is not there"}


def test_what_cannot_be_read_is_named(tmp_path):
    reading = Reader("n0", tmp_path, clock_status=lambda: None).read()
    sources = {"GPUs", "network ports", "memory", "disks", "clock", "processors", "PCIe", "kernel log"}
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


# ------------------------------------------------------------------------------------------------------------ NVML


def test_more_is_read_of_newer_gpus(tmp_path, nvml):
    module, plant = nvml
    fields = {"208": 1 << 33, "214": 0, "215": 2}
    newer = {**GPU, "links": [[], []], "link_fields": fields, "full_banks": 1, "sram": 1, "margin": 30, "action": 1}
    broken = {**GPU, "fabric": [3, 999, 0x0116], "reasons": 0x08, "action": 4}
    reader = Reader("n0", tmp_path, module)
    plant(newer, broken, {**GPU, "fabric": [2, 0, 0], "action": 77}, {**GPU, "fabric": [3, 0, 0xAA | 0x100]})
    found = values(reader.read())
    assert found["gpu0/nvlink1", "nvlink.receive_errors"] == (1 << 33) + 1, "in all its 64 bits, of its own link"
    assert found["gpu0/nvlink0", "nvlink.recoveries"] == 2 and ("gpu0/nvlink0", "nvlink.replays") not in found
    assert ("gpu0/nvlink0", "nvlink.integrity_errors") not in found, "not in this package"
    assert found["gpu0", "gpu.rows.banks_without_spare"] == found["gpu0", "gpu.sram.over_threshold"] == 1
    assert found["gpu0", "gpu.temperature.margin"] == 30 and ("gpu0", "gpu.fabric.failed") not in found
    assert found["gpu0", "gpu.recovery.gpu_reset"] == found["gpu1", "gpu.recovery.drain_and_reset"] == 1
    assert found["gpu2", "gpu.recovery.unknown"] == 1 and found["gpu3", "gpu.recovery.none"] == 0
    assert found["gpu1", "gpu.fabric.failed"] == 1 and found["gpu1", "gpu.fabric.unready"] == 0
    assert found["gpu1", "gpu.fabric.unhealthy"] == 2, "routes are being recovered and are unhealthy"
    assert found["gpu2", "gpu.fabric.unready"] == 1 and found["gpu3", "gpu.fabric.unhealthy"] == 0
    assert found["gpu1", "gpu.throttled.hardware"] == 1 and found["gpu0", "gpu.throttled.hardware"] == 0
    reader.close()


def test_a_gpu_that_may_not_be_opened_is_not_lost(tmp_path, nvml):
    module, plant = nvml
    plant({**GPU, "closed": 4}, {**GPU, "closed": 999}, GPU)
    reading = Reader("n0", tmp_path, module).read()
    found = values(reading)
    assert ("gpu0", "gpu.lost") not in found and "gpu0: Insufficient Permissions" in reading.unreadable["GPUs"]
    assert found["gpu1", "gpu.lost"] == 1 and found["gpu2", "gpu.lost"] == 0


def test_an_xid_154_of_nvml_says_what_is_asked_for(tmp_path, nvml):
    module, plant = nvml
    plant(GPU, GPU)
    reader = Reader("n0", tmp_path, module)
    reader.read()
    plant({**GPU, "action": 2, "xids": [154]}, {**GPU, "action": 0, "xids": [154]})
    events = [(o.device, o.name) for o in reader.news().observations if o.kind == EVENT]
    assert events == [("gpu0", "xid.154.node_reboot"), ("gpu1", "gpu.recovered")]
    reader.close()


def test_an_xid_that_the_log_and_nvml_report_is_one_event(tmp_path, nvml):
    module, plant = nvml
    planted_node.plant(tmp_path)
    plant(GPU, GPU)
    reader = Reader("n0", tmp_path, module)
    reader.read()
    plant({**GPU, "xids": [145, 31]}, GPU)
    planted_node.log(tmp_path, "4,9,2000000,-;NVRM: Xid (PCI:0000:3a:00): 145, RLW_REMAP Fatal XC1 i0 Link 1")
    events = [(o.device, o.name) for o in reader.news().observations if o.kind == EVENT]
    assert events == [("gpu0", "xid.31"), ("gpu0", "xid.145.fatal")]
    reader.close()


def test_xids_of_the_others_come_when_one_gpu_is_lost(tmp_path, nvml):
    module, plant = nvml
    plant(GPU, GPU, GPU)
    reader = Reader("n0", tmp_path, module)
    reader.read()
    plant(GPU, {"lost": True}, GPU)
    assert not reader.news().observations, "NVML answers that a GPU is lost"
    reader.read()
    plant(GPU, {"lost": True}, {**GPU, "xids": [31]})
    assert [(o.device, o.name) for o in reader.news().observations if o.kind == EVENT] == [("gpu2", "xid.31")]
    reader.close()


def test_the_driver_names_gpus_that_nvml_cannot(tmp_path, nvml):
    module, plant = nvml
    planted_node.plant(tmp_path)
    planted_node.gpus(tmp_path, "0000:3a:00.0", "0000:3b:00.0", "0001:3c:00.0")
    without = Reader("n0", tmp_path).read()
    assert without.aliases["0001:3c:00.0"] == "gpu2" and without.id_of("gpu2") == "GPU-of-0001:3c:00.0"
    plant(GPU, {**GPU, "closed": 15}, GPU)
    planted_node.log(tmp_path, "4,9,2000000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    reading = Reader("n0", tmp_path, module).read()
    assert [(o.device, o.name) for o in reading.observations if o.kind == EVENT] == [("gpu1", "xid.79")]
    assert reading.id_of("gpu1") == "GPU-of-0000:3b:00.0" and reading.id_of("gpu0") == "GPU-0000"
    assert reading.aliases["0000:3c:00.0"] == "gpu2" and "0001:3c:00.0" not in reading.aliases, "one name, one GPU"
