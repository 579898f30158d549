"""How much of a window is used, on a device whose operators are computed later than they are launched."""

import math

import pytest
import torch

from ft.systems.dmr.runtime.queue import DeviceTime, HostTime, spent_on


class Device:
    """A device on which operators take ``factor`` times what was planned.

    Attributes:
        queued: microseconds of all work that was launched so far.
        done: microseconds of work that was computed so far.
    """

    def __init__(self, factor: float):
        self.factor, self.queued, self.done = factor, 0.0, 0.0

    def event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, device: Device):
        self._device = device

    def record(self) -> None:
        self.at = self._device.queued

    def query(self) -> bool:
        return self._device.done >= self.at

    def elapsed_time(self, other: "Event") -> float:
        assert self.query() and other.query(), "the host would wait for the device"
        return (other.at - self.at) / 1e3


def window(spent: DeviceTime, device: Device, lasts: float, each: float) -> float:
    """Launch operators of ``each`` planned microseconds while they fit; return their time on the device."""
    began = device.queued
    spent.opens(lasts)
    while spent.room() >= each:
        spent.launches(each)
        device.queued += each * device.factor
    spent.closes()
    return device.queued - began


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_no_more_is_launched_than_fits_once_the_device_is_known(factor):
    device = Device(factor)
    spent, used = DeviceTime(device.event), []
    for _ in range(40):
        spent.restart()
        used += [window(spent, device, lasts, 10.0) for lasts in (400.0, 1000.0)]
        device.done = device.queued
    assert 0.9 * 400 <= used[-2] <= 1.01 * 400 and 0.9 * 1000 <= used[-1] <= 1.01 * 1000, used


def test_windows_that_the_device_has_not_passed_are_read_later():
    device = Device(2.0)
    spent = DeviceTime(device.event)
    spent.restart()
    assert window(spent, device, 100.0, 10.0) == 200.0
    spent.restart()  # nothing is done yet
    assert window(spent, device, 100.0, 10.0) == 200.0
    device.done = device.queued
    spent.restart()
    assert window(spent, device, 100.0, 10.0) < 160.0


def test_into_a_window_of_unknown_duration_a_device_gets_nothing():
    spent = DeviceTime(Device(1.0).event)
    spent.opens(math.inf)
    assert spent.room() == 0.0
    spent.closes()


def test_on_a_cpu_the_clock_counts():
    spent = spent_on(torch.device("cpu"))
    assert isinstance(spent, HostTime)
    spent.opens(1e9)
    first = spent.room()
    spent.launches(5e8)
    assert first < 1e9 and first - 1e8 < spent.room() < first
    spent.opens(math.inf)
    assert spent.room() == math.inf
