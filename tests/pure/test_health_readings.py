"""What is read of this machine's health, and how much counters have grown.

What is read of planted nodes and GPUs is in ``conversations/readings``.
"""

from pathlib import Path

from ft.platform.health import COUNTER, Observation, Reading, differences
from ft.platform.health.reader import kernel_status, of_this_node


def test_this_machine_can_be_read(tmp_path):
    reader = of_this_node("n0", watched=[Path("/"), tmp_path / "missing"])
    found = {(o.device, o.name): o.value for o in reader.read().observations}
    assert {("", "memory.available_share"), ("/", "disk.free_share"), ("", "clock.ahead")} <= found.keys()
    assert 0 <= found["/", "disk.free_share"] <= 1 and found[str(tmp_path / "missing"), "disk.unreachable"]
    assert reader.asking == ""
    reader.close()
    assert kernel_status() is None or kernel_status()[1] >= 0


def test_the_difference_of_two_readings_is_the_growth_of_counters():
    def reading(when, **counters):
        found = (Observation("n0", "mc0", name, value, "", when, COUNTER) for name, value in counters.items())
        return Reading("n0", when, (*found, Observation("n0", "", "clock.ahead", when, "s", when)))

    changes = differences(reading(10.0, a=5, b=7, c=1), reading(40.0, a=8, b=2, d=9))
    assert [(change.now.name, change.grew, change.seconds) for change in changes] == [("a", 3, 30.0), ("b", 2, 30.0)]
    assert differences(None, reading(10.0, a=5)) == []


def test_a_gpu_has_an_id_or_none_is_known():
    reading = Reading("n0", 1.0, aliases={"0000:3b:00.0": "gpu1", "GPU-0001": "gpu1"})
    assert reading.id_of("gpu1") == "GPU-0001" and reading.id_of("gpu7") == ""
