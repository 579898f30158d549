"""A full disk under a run's logs and metrics stops no training."""

import contextlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from ft_runs import ROOT, Running, flags

from ft.cli import main as cli
from ft.job.agent.script import _text
from ft.record.metrics import MetricsFile

STEPS = 100


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
from ft.record.metrics import MetricsFile
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


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=755", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Writes into a file until there is no room for a byte more."""
    with open(disk / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while ballast.write(bytes(4096)):
            pass


def test_a_disk_that_stays_full_costs_records_that_are_named_and_no_training(corpus, disk, capsys):
    running = Running(disk, "pretrain_gpt.py", flags(corpus, steps=STEPS), nproc=2, standby=0)
    running.wait_for(lambda: running.step() >= 5)
    fill(disk)
    done = running.wait()
    assert done.code == 0, done.output
    assert f"the disk of {disk} is full: training goes on" in done.output
    kept = steps(disk / "metrics.jsonl")
    assert kept == list(range(1, kept[-1] + 1)) and kept[-1] < STEPS
    lacks = f"metrics.jsonl lacks {STEPS - kept[-1]} of {STEPS} steps: {kept[-1] + 1} to {STEPS}"
    assert lacks in done.output.splitlines()[-1]
    (disk / "ballast").unlink()
    assert cli(["status", str(disk)]) == 0
    told = capsys.readouterr().out
    assert lacks in told and f"step       {STEPS}\n" in told


def test_a_disk_that_has_room_again_has_all_records(corpus, disk, capsys):
    running = Running(disk, "pretrain_gpt.py", flags(corpus, steps=STEPS), nproc=2, standby=0)
    running.wait_for(lambda: running.step() >= 5)
    fill(disk)
    running.wait_for(lambda: "is full" in running.output())
    (disk / "ballast").unlink()
    done = running.wait()
    assert done.code == 0, done.output
    assert steps(disk / "metrics.jsonl") == list(range(1, STEPS + 1))
    assert done.output.splitlines()[-1].endswith("no line is damaged and no step is missing")
    assert [event.step for event in done.named("finished")] == [STEPS]
    assert cli(["status", str(disk)]) == 0
    assert "records" not in capsys.readouterr().out


def test_the_loss_curve_leaves_out_a_damaged_line_and_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo\n{"step": 3, "loss": 2.25}\n{"step": 4}\n{"st')
    command = [sys.executable, "tools/plot_loss.py", "--metrics", str(path), "--output", str(tmp_path / "loss.png")]
    done = subprocess.run(command, check=True, timeout=100, cwd=ROOT, capture_output=True, text=True)
    named = [line.split(":")[2].split()[0] for line in done.stderr.splitlines() if line.startswith("warning")]
    assert named == ["2", "4", "5"] and (tmp_path / "loss.png").stat().st_size
