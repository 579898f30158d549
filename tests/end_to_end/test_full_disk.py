"""A full disk under a run's files or its output, and an output that nobody reads, stop no training."""

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ft_runs import ROOT, Running, flags
from pythons import python
from small_disks import fill, make_room, small_disk

from ft.base import output
from ft.base.lines import Lines
from ft.cli import main as cli
from ft.platform import election
from ft.platform.election import LeaseKeeper, LeaseRecord
from ft.record.metrics import MetricsFile

STEPS = 200


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_what_a_full_disk_does_not_take_of_a_log_is_left_out():
    with open("/dev/full", "wb") as full:
        log = output.stream_for(full.fileno())
        for _ in range(3):
            print("x" * 9000, file=log)
            log.flush()
        log.detach().detach()


def test_a_log_that_is_closed_is_an_error_all_the_same(tmp_path):
    fd = os.open(tmp_path / "log", os.O_RDONLY | os.O_CREAT)
    log = output.stream_for(fd)
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
    assert python("-c", LIMITED, path).returncode == 0
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
    """A file system of 4 MiB and 100 files."""
    with small_disk(tmp_path / "disk", "4m", files=100) as folder:
        yield folder


def test_what_a_disk_has_not_taken_is_counted_and_said_once_there_is_room(disk):
    with open(disk / "out", "wb", buffering=0) as file:
        out = output.stream_for(file.fileno())
        print("first", file=out)
        fill(disk)
        print("x" * 9000 + "\n" + "y" * 9000, file=out)
        make_room(disk)
        print("second", file=out)
        print("third", file=out)
        out.flush()
        lines = (disk / "out").read_text().splitlines()
    assert [lines[0], *lines[-2:]] == ["first", "second", "third"]
    assert [line for line in lines if "could not be written" in line] == [lines[-3]]
    assert lines[-3].startswith("ft: ") and lines[-3].endswith("could not be written here (No space left on device)")


def test_a_lease_is_renewed_and_a_term_is_claimed_on_a_full_disk(disk):
    record = LeaseRecord(3, 0, "tcp://n0:1", "n0", 1, count=9)
    election.renew(disk, record)
    fill(disk, files=False)
    later = LeaseRecord(4, 0, "", "n1", 12345, count=10)
    assert election.claim(disk, 4, "n1")
    election.renew(disk, later)
    assert election.read(disk) == later
    make_room(disk)
    (disk / election.CONTROL).unlink()
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        election.renew(disk, later)


def test_who_cannot_take_a_lease_does_not_count_it_as_taken(disk):
    keeper = LeaseKeeper(disk, 0.01)
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        keeper.hold(LeaseRecord(1, 0, "", "n0", 1))
    assert not keeper.holds and keeper.age(0.0) is None


def test_a_file_that_cannot_be_made_now_is_made_when_there_is_room(disk):
    fill(disk)
    told = []
    lines = Lines(disk / "lines", tell=told.append)
    lines.write(b"one\n")
    assert not (disk / "lines").exists() and "cannot be written" in told[0]
    make_room(disk)
    lines.write(b"two\n")
    lines.close()
    assert (disk / "lines").read_text() == "one\ntwo\n" and "1 lines that waited were written" in told[1]


@pytest.mark.parametrize(
    ("redirected", "said"),
    [
        pytest.param(
            "2>{said} >/dev/full", "could not be written to stdout (No space left on device)", marks=pytest.mark.long
        ),
        ("2>{said} | head -2", "could not be written to stdout (Broken pipe)"),
        pytest.param(">&- 2>&- <&-", "", marks=pytest.mark.long),
    ],
    ids=["full", "closed pipe", "closed"],
)
def test_an_output_that_takes_nothing_does_not_end_the_run(redirected, said, corpus, tmp_path):
    words = [sys.executable, "-m", "ft", "run", "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run")]
    words += ["pretrain_gpt.py", *flags(corpus, "--log-interval 1", steps=5).split()]
    line = f"{shlex.join(words)} {redirected.format(said=tmp_path / 'said')}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, check=False, timeout=180, stdout=subprocess.DEVNULL)
    assert done.returncode == 0
    assert steps(tmp_path / "run" / "metrics.jsonl") == [1, 2, 3, 4, 5]
    if said:
        assert (tmp_path / "said").read_text().count(said) == 1


def test_a_run_that_finds_its_disk_full_at_the_start_says_so(corpus, disk):
    fill(disk)
    done = Running(disk, "pretrain_gpt.py", flags(corpus), nproc=2, standby=0).wait()
    assert done.code == 2 and "Traceback" not in done.output
    assert f"the run's directory {disk} cannot be written: No space left on device" in done.output


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
    assert cli(["report", str(disk)]) == 2
    told = capsys.readouterr()
    assert "recovered  0 of 0 interruptions" in told.out and "cannot be written: No space left" in told.err
    assert not list(disk.glob("*timeline*")) and not list(disk.glob("*report*"))
    make_room(disk)
    assert cli(["status", str(disk)]) == 0
    told = capsys.readouterr().out
    assert lacks in told and f"step       {STEPS}\n" in told


def test_a_disk_that_has_room_again_has_all_records(corpus, disk, capsys):
    running = Running(disk, "pretrain_gpt.py", flags(corpus, steps=STEPS), nproc=2, standby=0)
    running.wait_for(lambda: running.step() >= 5)
    fill(disk)
    running.wait_for(lambda: "is full" in running.output())
    make_room(disk)
    done = running.wait()
    assert done.code == 0, done.output
    assert steps(disk / "metrics.jsonl") == list(range(1, STEPS + 1))
    assert done.output.splitlines()[-1].endswith("no line is damaged and no step is missing")
    assert [event.step for event in done.named("finished")] == [STEPS]
    assert cli(["status", str(disk)]) == 0
    assert "records" not in capsys.readouterr().out


@pytest.mark.long
def test_a_control_plane_that_finds_no_room_is_started_when_there_is_some_and_training_goes_on(corpus, disk):
    running = Running(disk, "pretrain_gpt.py", flags(corpus, steps=4 * STEPS), nproc=2, standby=0)
    running.wait_for(lambda: running.step() >= 5)
    fill(disk)
    os.kill(election.read(disk).pid, signal.SIGKILL)
    running.wait_for(lambda: "no control plane can be started here" in running.output())
    make_room(disk)
    done = running.wait()
    assert done.code == 0, done.explain()
    assert steps(disk / "metrics.jsonl") == list(range(1, 4 * STEPS + 1))
    assert not done.named("restarted") and not done.named("control_restarted"), done.explain()
    assert [event.detail["term"] for event in done.named("control_back")][:1] == [1], done.explain()


def test_the_loss_curve_leaves_out_a_damaged_line_and_names_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo\n{"step": 3, "loss": 2.25}\n{"step": 4}\n{"st')
    done = python("tools/plot_loss.py", "--metrics", path, "--output", tmp_path / "loss.png")
    named = [line.split(":")[2].split()[0] for line in done.stderr.splitlines() if line.startswith("warning")]
    assert done.returncode == 0 and named == ["2", "4", "5"] and (tmp_path / "loss.png").stat().st_size
