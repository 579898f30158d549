"""The checks of ``ft selftest``: each finds its planted fault, a hang ends at its deadline, no process stays."""

import signal

import pytest
import selftests
from ft_runs import leftovers
from pythons import python
from waiting import eventually

from ft.lab.selftest.table import CHECKS
from ft.platform.network import free_port

LONG = pytest.mark.long
LIGHT = "versions,storage,one-rank,both-send,snapshot,launches,freed,ring,digests"
OTHERS = "hung-groups", "groups,fork,killed-rank,killed-making", "training", "kill", "stop", "stall", "reproducible"
FOUND = {
    "versions": "megatron-core is not installed here",
    "storage": "cannot be written: Not a directory",
    "one-rank": "gave 1 to 2 instead of 1",
    "groups": "did not come back",
    "both-send": "did not come back",
    "killed-rank": "did not come back",
    "killed-making": "did not come back",
    "hung-groups": "did not come back",
    "snapshot": "a checksum of the snapshot is wrong",
    "ring": "members 0 and 1 have different bits",
    "digests": "differ between cpu and cpu",
    "fork": "did not use its device: rank 0 of 1 did not come back within 30 s",
    "reproducible": "vary: ones_like",
    "training": "the run stopped with code",
    **dict.fromkeys(("kill", "stall", "stop"), "instead of one replaced worker"),
    "launches": "no other thread ran for ",
    "freed": "still in use 2.00 s after SIGKILL",
    "ports": "does not reach 127.0.0.1:1",
    "clocks": "behind that of node 0",
}
"""What each check says of its planted fault."""


def check_found(ended):
    """All checks have failed, and say what was planted."""
    assert ended.code == 1, ended.errors
    for name, row in ended.rows().items():
        assert row["outcome"] == "fail" and FOUND[name] in row["text"] and row["fix"], row


def test_every_check_has_a_planted_fault():
    assert FOUND.keys() == {check.name for check in CHECKS}


@pytest.mark.parametrize("names", [LIGHT, *(pytest.param(names, marks=LONG) for names in OTHERS)])
def test_checks_find_their_planted_faults(tmp_path, names):
    check_found(selftests.selftest(tmp_path / "run", "--only", names, "--plant", names))


def both_nodes(tmp_path, *words):
    """Run a self-test of two nodes, both of which are this machine; return what node 0 says."""
    folder, port = tmp_path / "run", free_port("127.0.0.1")
    flags = ["--nodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", *words]
    first, second = (selftests.start(folder, *flags, "--node-rank", str(node)) for node in (0, 1))
    other = second.communicate(timeout=selftests.LIMIT_S)
    ended = selftests.end(first, folder)
    assert (second.returncode, other[0]) == (0, ""), other
    return ended


def test_two_nodes_check_what_lies_between_them(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")  # a setting of the site that training replaces
    ended = both_nodes(tmp_path, "--only", "versions,storage,ports,clocks")
    assert ended.code == 0, (ended.output, ended.errors)
    rows = ended.rows()
    assert [row["outcome"] for row in rows.values()] == ["pass"] * 4
    assert "TORCH_NCCL_BLOCKING_WAIT=1 is replaced by 0" in rows["versions"]["text"], rows
    found = {name for row in rows.values() for name in row["measured"]}
    assert {"seen_s", "largest_skew_s", "sends_gb_s"} <= found and "GB/s over lo (ft check" in rows["ports"]["text"]
    assert all(len(row["nodes"]) == 2 for row in rows.values())


@pytest.mark.long
def test_faults_between_two_nodes_are_found(tmp_path):
    check_found(both_nodes(tmp_path, "--only", "ports,clocks", "--plant", "ports,clocks"))


def test_a_run_folder_that_cannot_be_written_is_reported_as_such(tmp_path):
    ended = selftests.selftest(tmp_path / "unused", "--only", "storage", "--run-dir", "/proc/selftest")
    row = ended.rows()["storage"]
    assert (ended.code, row["outcome"]) == (1, "fail") and "/proc/selftest" in row["text"] and "--run-dir" in row["fix"]


HANGS = """
import sys
from pathlib import Path
from ft.lab.selftest.session import Executor
from ft.lab.selftest.table import Check, Context
from ft.platform import processes
import os
check = Check("fork", sys.argv[2], "", 1, 1, "")
context = Context("fork", sys.argv[1], sys.argv[1], None, float(sys.argv[3]), planted=True)
with Executor() as executor:
    result = executor.run(check, context, is_cut=sys.argv[4] == "cut")
    print(result.outcome, "|", result.text, "|", result.fix, "|", len(processes.members([], [os.getpid()])))
"""


@pytest.mark.parametrize(
    "function, limit, how, expected",
    [
        ("fork:fork", "5", "", "fail | no answer within 5 s | something hangs"),
        pytest.param("fork:fork", "12", "cut", "skipped | not done when --minutes was over", marks=LONG),
        ("fork:missing", "60", "", "fail | AttributeError"),
    ],
)
def test_a_check_that_hangs_or_breaks_ends_at_its_deadline(tmp_path, function, limit, how, expected):
    done = python("-c", HANGS, tmp_path, function, limit, how)
    assert done.returncode == 0 and done.stdout.startswith(expected) and done.stdout.strip().endswith("| 0"), done


@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGINT, marks=LONG), signal.SIGTERM, pytest.param(signal.SIGKILL, marks=LONG)]
)
def test_nothing_is_left_when_it_is_interrupted(tmp_path, signum):
    folder = tmp_path / "run"
    process = selftests.start(folder, "--only", "training")
    status = folder / "node-0" / "reference" / "status.json"
    eventually(lambda: status.exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    process.send_signal(signum)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == (-9 if signum == signal.SIGKILL else 128 + signum), (output, errors)
    assert not leftovers(folder)


SHARED = """
import sys
from ft.lab.selftest.checks import training
from ft.lab.selftest.table import Context
training.devices = lambda context: 1
training._ON_GPU = training._SMALL
context = Context("kill", sys.argv[1] + "/kill", sys.argv[1], None, 200.0)
print(training.kill(context)[0])
"""


@pytest.mark.long
def test_three_agents_stand_in_for_nodes_where_workers_share_a_gpu(tmp_path):
    """On a CPU, with the flags and the environment of one GPU."""
    done = python("-c", SHARED, tmp_path, limit_s=300)
    assert "losses equal, bit for bit" in done.stdout, (done.stdout, done.stderr)
    assert not leftovers(tmp_path)
