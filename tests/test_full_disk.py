"""A full disk under a run's logs and metrics stops no training."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from ft_runs import ROOT

from ft.agent.script import _text
from megatron.training.logging.metrics import MetricsFile


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_what_a_full_disk_does_not_take_of_a_log_is_left_out():
    with open("/dev/full", "wb") as full:
        log = _text(full.fileno())
        for _ in range(3):
            print("x" * 9000, file=log)
            log.flush()
        log.detach().detach()


def test_a_log_that_is_closed_is_an_error_all_the_same(tmp_path):
    fd = os.open(tmp_path / "log", os.O_RDONLY | os.O_CREAT)
    log = _text(fd)
    try:
        print("x", file=log)
        raise AssertionError("a file that is open for reading took a line")
    except OSError:
        os.close(fd)


LIMITED = """
import resource, sys
from pathlib import Path
from megatron.training.logging.metrics import MetricsFile
path = Path(sys.argv[1])
before = resource.getrlimit(resource.RLIMIT_FSIZE)
metrics = MetricsFile(path, 0)
for step in range(1, 21):
    if step == 5:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 3, before[1]))
    if step == 12:
        metrics.rewind(8)
        metrics.write({"step": 9, "loss": 0.9})
        metrics.write({"step": 10, "loss": 0.9})
        metrics.write({"step": 11, "loss": 0.9})
    if step == 15:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    metrics.write({"step": step, "loss": 0.5})
metrics.close()
"""


def test_metrics_that_found_no_room_are_written_when_there_is_some(tmp_path):
    path = tmp_path / "metrics.jsonl"
    subprocess.run([sys.executable, "-c", LIMITED, str(path)], check=True, timeout=100, cwd=ROOT)
    assert steps(path) == list(range(1, 21))
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()][8:11] == [0.9] * 3


def test_a_metrics_file_is_cut_where_it_is_when_there_is_no_room_for_another(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 9)) + '{"step": 9, "lo')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
    try:
        metrics = MetricsFile(path, 6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    metrics.write({"step": 7})
    metrics.close()
    assert steps(path) == list(range(1, 8))
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
