"""``ft health`` on planted nodes: findings first, exit codes, JSON, and watching."""

import json
import re
import signal
import subprocess
import sys
import time

import planted_node

from ft import cli
from ft.commands import health
from ft.platform.health import Reader


def run(capsys, *flags):
    code = cli.main(["health", *map(str, flags)])
    return code, capsys.readouterr().out


def test_a_healthy_node_has_no_findings(tmp_path, capsys):
    code, text = run(capsys, "--root", planted_node.plant(tmp_path))
    assert code == 0 and text.startswith("no findings\n")
    assert re.search("mlx5_0/1 +port.up +1", text) and "4: ACTIVE" in text and "port.symbol_error" not in text
    assert "left out: zero" in text and "cannot be read: GPUs: the Python package" in text
    code, text = run(capsys, "--root", tmp_path, "--all")
    assert code == 0 and "port.symbol_error" in text and "left out" not in text


def test_findings_come_first_and_give_exit_code_1(tmp_path, capsys):
    planted_node.plant(tmp_path)
    now = time.monotonic()
    planted_node.log(
        tmp_path,
        f"[{now - 60:12.6f}] NVRM: Xid (PCI:0000:3b:00): 31, pid=4, name=python",
        f"[{now - 250:12.6f}] NVRM: Xid (PCI:0000:5d:00): 95, pid=3",
    )
    code, text = run(capsys, "--root", tmp_path)
    assert code == 1
    lines = text.splitlines()
    assert lines[0] == "2 findings" and lines[1].startswith("  gpu 0000:5d:00: drain (GPU memory fault, 4 min ")
    assert "Xid 95: an uncorrectable memory error that could not be contained" in lines[2] and "xid.95" in lines[3]
    assert lines[4].startswith("  gpu 0000:3b:00: watch (software bug or unknown failure, ")
    code, text = run(capsys, "--root", tmp_path, "--since", "2m")
    assert code == 1 and text.startswith("1 finding\n") and "Xid 95" not in text
    code, text = run(capsys, "--root", tmp_path, "--since", "10s", "--json")
    assert code == 0 and json.loads(text)["findings"] == []


def test_growth_between_the_two_readings_is_found(tmp_path):
    reader = Reader("n0", planted_node.plant(tmp_path), clock_status=lambda: None)
    assert health.examine(reader, 60.0, 0.0)[1] == []
    read = reader.read

    def grow():
        reading = read()
        planted_node.change(tmp_path, "sys/devices/system/edac/mc/mc0/ue_count", "1")
        return reading

    reader.read = grow
    assert [found.key for found in health.examine(reader, 60.0, 0.0)[1]] == [("mc0", "memory.uncorrected")]


def test_a_node_that_cannot_be_read_gives_exit_code_2(tmp_path, capsys):
    code, text = run(capsys, "--root", tmp_path)
    assert code == 2 and "cannot be read: memory" in text
    assert cli.main(["health", "--root", str(tmp_path / "missing")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_the_rules_are_printed(capsys):
    code, text = run(capsys, "--rules")
    assert code == 0 and "xid.79" in text and "a link with two ends" in text


def test_a_watched_node_tells_what_is_new_until_it_is_interrupted(tmp_path):
    planted_node.plant(tmp_path)
    command = [sys.executable, "-m", "ft", "health", "--watch", "0.1", "--json", "--root", str(tmp_path)]
    # Where the tests run in the background, SIGINT is ignored, and a child would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    try:
        first = json.loads(process.stdout.readline())
        assert first["findings"] == [] and first["unreadable"].keys() == {"GPUs", "clock"}
        planted_node.change(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
        deadline = time.monotonic() + 180
        while not (found := json.loads(process.stdout.readline())["findings"]):
            assert time.monotonic() < deadline
        assert [(each["device"], each["action"]) for each in found] == [("mlx5_0/1", "watch")]
        assert json.loads(process.stdout.readline())["findings"] == [], "what was found once is not new"
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 1
    finally:
        process.kill()
        process.communicate()
