"""The health watch of a node agent, with planted sources: what it reports, when, and that it never delays the agent."""

import threading
import time

import planted_node
import pytest
from waiting import eventually

from ft.faults.verdict import HOST
from ft.job.agent import health
from ft.job.agent.devices import Devices
from ft.job.agent.health import HealthWatch
from ft.job.messages import DeviceReleased, Observed
from ft.platform.health import Reader

GPU = {"used": 1 << 29, "total": 80 << 30, "action": 0, "row_failed": 0, "errors": 0}


class ToldReader(Reader):
    """A reader that tells when it has read."""

    def __init__(self, *arguments, **how):
        super().__init__(*arguments, **how)
        self.has_read = threading.Event()

    def read(self):
        reading = super().read()
        self.has_read.set()
        return reading


class HangingReader(ToldReader):
    """A reader whose driver hangs after the first reading, until it is told to answer."""

    answers = threading.Event()

    def news(self):
        self.asking = "GPUs"
        self.answers.wait(30)
        return super().news()


class Watched:
    """A health watch of a planted node, and what it has posted."""

    def __init__(self, root, mode="watch", nvml=None, workers=1, environment=None, log=(), kind=ToldReader, **how):
        self.root, self.posted, self.said = planted_node.plant(root), [], []
        planted_node.log(root, *log)
        self.devices = Devices(lambda: workers, workers, lambda: None, environment=environment or {})
        self.devices.start()
        self.reader = kind("n0", root, nvml, clock_status=lambda: None)
        how = {"period_s": 0.05, "news_s": 0.02, **how}
        self.watch = HealthWatch(mode, lambda: self.reader, self.devices, self.posted.append, self.said.append, **how)
        self.watch.start()

    def poll_until(self, count):
        """Poll as the agent does until ``count`` reports were posted."""
        eventually(lambda: self.watch.poll("n0-2", time.monotonic()) or len(self.posted) >= count)
        assert len(self.posted) == count, self.posted
        return self.posted

    def poll_for(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.watch.poll("n0-2", time.monotonic())
            time.sleep(0.01)
        return self.posted

    def begin(self):
        """Wait until the first reading, which is the base, is over."""
        assert self.reader.has_read.wait(20)
        self.poll_for(0.1)


def test_what_happens_during_the_run_is_reported_once(tmp_path):
    root = tmp_path / "node"
    watched = Watched(root, log=["[    5.000000] NVRM: Xid (PCI:0000:3b:00): 79, of an earlier run"])
    watched.begin()
    assert not watched.posted
    planted_node.log(root, "[   50.000000] EDAC MC0: 1 UE memory read error on DIMM_A1")
    (report,) = watched.poll_until(1)
    assert isinstance(report, Observed) and report.event == "health_found"
    detail = report.detail
    assert (detail["node"], detail["device"], detail["observation"]) == ("n0-2", "mc0", "log.memory.uncorrected")
    assert detail["action"] == "evict at the next step" and detail["category"] == HOST and not detail["acts"]
    assert "n0-2, mc0: evict at the next step" in watched.said[0] and "memory module" in watched.said[0]
    planted_node.log(root, "[   51.000000] EDAC MC0: 1 UE memory read error on DIMM_A1")
    assert len(watched.poll_for(0.4)) == 1, "the same finding is not reported again at once"
    watched.watch.close()


def test_what_is_wrong_at_the_start_is_reported_and_counters_from_before_are_not(tmp_path, nvml):
    module, plant = nvml
    plant({**GPU, "row_failed": 1, "errors": 7, "replays": 4000})
    watched = Watched(tmp_path / "node", nvml=module)
    (report,) = watched.poll_until(1)
    assert (report.detail["observation"], report.detail["action"]) == ("gpu.rows.failed", "drain")
    assert len(watched.poll_for(0.4)) == 1, "it lasts, and is told once"
    watched.watch.close()


@pytest.mark.parametrize("mode, environment, acts", [("drain", {}, True), ("watch", {}, False)])
def test_a_gpu_with_an_xid_is_given_to_no_further_worker_if_that_is_asked_for(tmp_path, nvml, mode, environment, acts):
    module, plant = nvml
    plant(GPU, GPU)
    watched = Watched(tmp_path / "node", mode, module, workers=2, environment=environment)
    watched.begin()
    plant(GPU, {**GPU, "xids": [119]})
    found, *others = watched.poll_until(2 if acts else 1)
    assert (found.detail["device"], found.detail["index"], found.detail["acts"]) == ("gpu1", 1, acts)
    assert others == ([DeviceReleased("", "n0-2", 1, found.detail["reason"])] if acts else [])
    assert watched.devices.sound(2) == ([0] if acts else [0, 1])
    watched.watch.close()


def test_gpus_are_numbered_as_workers_see_them_and_those_of_other_runs_do_not_count(tmp_path, nvml):
    module, plant = nvml
    plant(GPU, GPU, GPU)
    watched = Watched(tmp_path / "node", "drain", module, workers=2, environment={"CUDA_VISIBLE_DEVICES": "2,1"})
    watched.begin()
    plant({**GPU, "xids": [95]}, GPU, {**GPU, "xids": [95]})
    reports = watched.poll_until(3)
    acts = {each.detail["device"]: each.detail["acts"] for each in reports if isinstance(each, Observed)}
    assert acts == {"gpu0": False, "gpu2": True} and watched.devices.unusable.keys() == {0}
    watched.watch.close()


def test_off_means_off(tmp_path):
    watched = Watched(tmp_path / "node", "off")
    planted_node.log(tmp_path / "node", "[   50.000000] EDAC MC0: 1 UE memory read error")
    assert not watched.poll_for(0.3) and not [t for t in threading.enumerate() if t.name == "ft-health"]


def test_a_driver_that_hangs_delays_nobody_and_is_a_finding(tmp_path, monkeypatch):
    watched = Watched(tmp_path / "node", kind=HangingReader, period_s=60.0)
    watched.begin()
    monkeypatch.setattr(health, "STUCK_S", 0.2)
    began = time.monotonic()
    (report,) = watched.poll_until(1)
    assert time.monotonic() - began < 10
    assert report.detail["observation"] == "health.stuck" and "reading GPUs has not ended" in report.detail["reason"]
    assert len(watched.poll_for(0.3)) == 1
    watched.watch.close()
    watched.reader.answers.set()


def test_a_watch_that_breaks_says_so_and_ends(tmp_path):
    class Broken(ToldReader):
        def news(self):
            raise MemoryError("none left")

    watched = Watched(tmp_path / "node", kind=Broken)
    watched.begin()
    eventually(lambda: watched.watch.poll("n0-2", time.monotonic()) or watched.said)
    assert watched.said == ["n0-2: its health is not read any more: MemoryError: none left"] and not watched.posted
