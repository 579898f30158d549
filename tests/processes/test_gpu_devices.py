"""What is read of a node's GPUs without CUDA, and what a node agent makes of it, with planted NVML and nvidia-smi."""

import sys
import threading
import time

import pytest
from waiting import eventually

from ft.job.agent.devices import Devices
from ft.job.messages import DeviceReleased
from ft.platform import devices

GIB = 1 << 30
SOUND = {"used": GIB // 2, "total": 80 * GIB, "action": 0, "row_failed": 0, "errors": 0}


@pytest.fixture
def plant(nvml):
    return nvml[1]


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({}, ""),
        ({"errors": 3}, ""),  # contained: the driver asks for nothing
        ({"action": 1}, "the driver asks for a reset"),
        ({"action": 2, "errors": 3}, "the driver asks for a reboot of the node"),
        ({"row_failed": 1}, "a row of its memory is defective and cannot be replaced"),
        ({"retired": 1}, "pages of its memory are retired at the next reboot"),
        ({"lost": True}, "NVML cannot reach it: GPU is lost"),
    ],
)
def test_a_gpu_that_needs_a_reset_is_unusable(changes, problem, plant):
    plant(SOUND, {**SOUND, **changes})
    sound, other = devices.read({})
    assert sound == devices.GpuState("GPU-0000", 80 * GIB, GIB // 2)
    assert other.problem == problem


def test_an_older_driver_that_names_no_action_is_judged_by_its_uncorrectable_errors(plant):
    older = {name: value for name, value in SOUND.items() if name not in ("action", "row_failed")}
    plant(older, {**older, "errors": 2})
    assert [reading.problem for reading in devices.read({})] == ["", "2 uncorrectable error(s) of its memory"]


@pytest.mark.parametrize(
    "selection, chosen",
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("GPU-0001", [1]),
        ("1,7,0", [1]),
        ("1,1", [1]),
        ("", []),
        ("MIG-4f,1", []),
    ],
)
def test_gpus_are_in_the_order_of_cuda_visible_devices(selection, chosen, plant):
    plant(SOUND, SOUND, SOUND)
    environment = {} if selection is None else {"CUDA_VISIBLE_DEVICES": selection}
    assert [reading.uuid for reading in devices.read(environment)] == [f"GPU-{index:04x}" for index in chosen]


def test_without_the_package_nvidia_smi_is_asked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # Python's way of saying that an import fails
    lines = ["GPU-a, 81559, 512, 0, No", "GPU-b, 81559, 4, 2, [N/A]", "GPU-c, [GPU is lost], 1, 0, No"]
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = devices.read({})
    assert found[0] == devices.GpuState("GPU-a", 81559 << 20, 512 << 20)
    problems = ["2 uncorrectable error(s) of its memory", "nvidia-smi reports [GPU is lost]"]
    assert [reading.problem for reading in found[1:]] == problems
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert devices.read({}) == []


def known(count, workers, **how):
    """Return the devices of a node, looked at for the first time."""
    found = Devices(lambda: count, workers, lambda: None, environment={}, **how)
    found.start()
    found.described()
    return found


def test_a_device_is_released_when_its_memory_is_free(plant):
    plant(SOUND, SOUND)
    found = known(2, 2)
    found.take("n0.w1", 1)
    plant(SOUND, {**SOUND, "used": 70 * GIB})  # the driver frees the memory of a killed process after a while
    found.ended("n0.w1", "n0")
    time.sleep(0.3)
    assert found.is_busy and not found.reports()
    plant(SOUND, {**SOUND, "used": GIB})
    assert eventually(found.reports) == [DeviceReleased("n0.w1", "n0", 1)]
    assert not found.is_busy and found.sound(2) == [0, 1]


def test_a_device_that_stays_full_or_turned_out_broken_is_not_used_again(plant):
    plant(SOUND, SOUND, SOUND)
    found = known(3, 2, free_s=0.2)
    found.take("n0.w0", 0)
    found.take("n0.w1", 1)
    plant({**SOUND, "used": 70 * GIB}, {**SOUND, "action": 1}, SOUND)
    found.ended("n0.w0", "n0")
    found.ended("n0.w1", "n0")
    reports = {}
    while len(reports) < 2:
        reports |= {report.device: report.problem for report in eventually(found.reports)}
    assert "was not free 0.2 s after its worker n0.w0 had ended" in reports[0]
    assert reports[1] == "the driver asks for a reset" and found.sound(3) == [2]


def test_a_device_that_is_broken_from_the_start_is_reported_with_the_node(plant):
    plant(SOUND, {**SOUND, "action": 4})
    found = known(2, 2)
    assert found.described() == {"devices": 2, "unusable": {1: "the driver asks for a drain and a reset"}}
    assert found.sound(2) == [0]


def test_more_workers_than_devices_share_them_as_before(plant):
    plant(SOUND)
    found = known(1, 4)
    assert found.described() == {"devices": 0, "unusable": {}} and found.sound(4) == [0, 1, 2, 3]
    found.take("n0.w0", 0)
    found.ended("n0.w0", "n0")
    assert not found.is_busy


def test_the_agent_does_not_wait_for_a_driver_that_hangs(monkeypatch):
    asked, answers = threading.Event(), threading.Event()

    def hangs(environment):
        asked.set()
        answers.wait(30)
        return []

    monkeypatch.setattr(devices, "read", hangs)
    found = Devices(lambda: 2, 2, lambda: None, environment={})
    found.start()
    assert asked.wait(10) and found.is_busy and not found.reports()
    answers.set()
    assert found.described()["devices"] == 2
