"""The agent's pure parts: folders, liveness, environments, what the pool imports. Flags: ``conversations/launch``."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pythons import python

from ft.base import files
from ft.base.errors import UserError
from ft.base.flags import Parser
from ft.base.lines import Lines
from ft.commands import arguments
from ft.job import messages
from ft.job.agent import environment
from ft.job.agent.console import Console, last_lines
from ft.job.agent.options import Cluster, RunOptions, Script, resolve
from ft.job.agent.warm import search_path
from ft.job.control.timeouts import Timeouts
from ft.job.replicas import member
from ft.net.channel import Channel
from ft.platform import network, numa
from ft.platform.supervisor import Supervisor
from ft.record import inspections
from ft.worker.session import surroundings


def options(line: str, environ: dict | None = None):
    parser = Parser(allow_abbrev=False, is_launcher=True)
    arguments.add_flags(parser)
    return resolve(parser.parse_args(line.split()), environ or {})


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import json\n")
    return "train.py"


def _give_away(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    os.chown(path, 12345, 12345)


UNSAFE = {
    "every user can write to": lambda r: r.chmod(0o1777),
    "logs belongs to the user 12345": lambda r: _give_away(r / "logs"),
    "r belongs to the user 12345": _give_away,
    "token is a link": lambda r: (r / "token").symlink_to("/etc/passwd"),
    "n0.log is a link": lambda r: (r / "logs" / "n0.log").symlink_to("nowhere"),
    "r is a link of another user": lambda r: (
        r.rename(r.with_name("other")),
        r.symlink_to("other"),
        os.geteuid() and pytest.skip("only root can make the link of another user"),
        os.chown(r, 12345, 12345, follow_symlinks=False),
    ),
}


@pytest.mark.parametrize("says", UNSAFE)
def test_a_directory_that_others_can_change_is_refused(script, tmp_path, says):
    (tmp_path / "r" / "logs").mkdir(parents=True)
    options(f"--run-dir r {script}")
    UNSAFE[says](tmp_path / "r")
    with pytest.raises(UserError, match=says):
        options(f"--run-dir r {script}")


def test_what_a_run_writes_goes_through_no_link(tmp_path):
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "log").symlink_to("elsewhere")
    (tmp_path / ".plain.tmp").symlink_to("elsewhere")
    (tmp_path / "inspections").mkdir()
    for name in (".wanted.tmp", "server.jsonl"):
        (tmp_path / "inspections" / name).symlink_to("../elsewhere")
    for write in (
        lambda: Supervisor().start("json.tool", [], tmp_path / "log", print),
        lambda: Lines(tmp_path / "log"),
        lambda: files.replace(tmp_path / "plain", "content"),
        lambda: inspections.want(tmp_path, "asked for"),
        lambda: inspections.note_server(tmp_path, 1.0, {}),
    ):
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            write()
    assert (tmp_path / "elsewhere").read_text() == "kept"


OPTIONS = RunOptions(Script("train.py", False, []), Cluster(2, 1, 0, "10.0.0.1", 1), 4, 0, Path("/r"), "r", 3)
PLACE = environment.NodeContext(OPTIONS, "n1", "10.0.0.2", "@s", "/r/faults.n1.json")


def test_numpy_starts_no_threads_in_the_pool():
    given = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "4"}
    count = "import os, numpy; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run(
        [sys.executable, "-c", count],
        env={**given, **environment.defaults(given)},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert done.stdout == "1\n"


def test_the_search_path_is_pythons(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert search_path("x/y.py", False, ["p"]) == [str(tmp_path / "x"), "p"]
    assert search_path("x.y", True, ["p"]) == [str(tmp_path), "p"]


def test_a_port_that_is_taken_or_a_host_that_is_not_ours_is_said_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"cannot listen at 127\.0\.0\.1"):
            network.check_port("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError, match=r"cannot listen at 192\.0\.2\.1"):
        network.check_port("192.0.2.1", 29400)
    network.check_port("127.0.0.1", network.free_port())
    assert network.own_address("127.0.0.1", 29400, True) == "127.0.0.1"


def test_a_port_that_another_process_is_about_to_listen_on_is_not_given_again(monkeypatch):
    """Two runs that begin at the same time draw the same port; neither listens yet."""
    drawn = network.free_port()
    ask = f"""
from unittest import mock
from ft.platform import network
with mock.patch("random.SystemRandom.sample", return_value=[{drawn}, {drawn}]):
    print(network.free_port())
"""
    assert int(python("-c", ask).stdout) != drawn
    for _ in range(network._RESERVED_AT_ONCE):
        network.free_port()
    assert int(python("-c", ask).stdout) == drawn


def test_a_channel_gives_whole_lines_and_then_the_end():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall(b"hello\none\ntw")
    assert channel.receive_line() == b"hello"
    assert channel.receive() == [b"one"]
    theirs.sendall(b"o\n")
    theirs.close()
    assert channel.receive() == [b"two"]
    assert channel.receive() is None and channel.gone
    channel.close()


def test_a_channel_keeps_what_the_other_side_does_not_take_yet():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    line = messages.encode(messages.Stop(1, "x" * 1000))
    for _ in range(1000):
        channel.send(line)
    assert channel.wants_write
    taken = b""
    theirs.settimeout(5)
    while taken.count(b"\n") < 1000:
        taken += theirs.recv(1 << 20)
        channel.flush()
    assert not channel.wants_write
    assert {messages.decode(text) for text in taken.splitlines()} == {messages.Stop(1, "x" * 1000)}
    channel.close()
    theirs.close()


def test_a_terminal_obeys_the_output_of_workers_only(tmp_path, capsys):
    console = Console(False)
    console.say("from \x1b[2J\x9b a member")
    console.complain(str(UserError("\x1b[2Jproblem", "fi\rx")))
    (log := tmp_path / "log").write_text("\x1b[1mbold\n")
    console.follow([log], fresh=True)
    console.close()
    console.poll()
    said = capsys.readouterr()
    assert said.out == "ft: from \\x1b[2J\\x9b a member\n\x1b[1mbold\n"
    assert said.err == "ft: \\x1b[2Jproblem\nft:   fix: fi\\x0dx\n"


def test_the_console_shows_logs_as_they_grow(tmp_path, capsys):
    first, last = tmp_path / "0.log", tmp_path / "1.log"
    console = Console(quiet=True)
    console.follow([first, last], fresh=True)
    console.say("not in quiet mode")
    first.write_text("one\ntwo\nthr")
    console.poll()
    assert capsys.readouterr().out == "one\ntwo\n"
    with open(first, "a") as file:
        file.write("ee\n")
    last.write_text("other\n")
    console.poll()
    assert capsys.readouterr().out == "three\nother\n"
    successor = tmp_path / "2.log"
    successor.write_text("of its time as a standby\n")
    console.follow([first, successor], fresh=False)
    with open(successor, "a") as file:
        file.write("seated\n")
    console.poll()
    assert capsys.readouterr().out == "seated\n"
    assert last_lines(first, 2) == ["two", "three"]
    assert last_lines(tmp_path / "absent") == []


def test_workers_are_bound_to_the_cpus_near_their_gpu_as_far_as_they_may_use_them(tmp_path):
    (device := tmp_path / "sys/bus/pci/devices/0000:3b:00.0").mkdir(parents=True)
    (node := tmp_path / "sys/devices/system/node/node1").mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    own = sorted(os.sched_getaffinity(0))
    (node / "cpulist").write_text(f"{own[0]},500-501\n")
    assert numa.cpus_near("0000:3B:00.0", tmp_path) == {own[0], 500, 501}
    program = (
        "import os, pathlib, sys, threading; from ft.platform import numa\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "bound = numa.bind('0000:3b:00.0', {'FT_NUMA_BINDING': sys.argv[2]}, pathlib.Path(sys.argv[1]))\n"
        "print(sorted(bound), [sorted(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')])"
    )
    for switch, bound, of_threads in (("", [own[0]], [own[0]]), ("off", [], own)):
        if bound == own:  # a machine with one CPU: there is nothing to choose
            continue
        said = python("-c", program, tmp_path, switch)
        assert said.stdout == f"{bound} {[of_threads] * 2}\n"
    (device / "numa_node").write_text("-1\n")
    assert numa.cpus_near("0000:3b:00.0", tmp_path) == numa.cpus_near("0000:ff:00.0", tmp_path) == set()


def test_ft_run_finds_its_own_host_in_the_file_of_the_topology(script, tmp_path):
    (tmp_path / "ours").write_text(f"n1 rack=b\n{socket.gethostname()} rack=a\n")
    (tmp_path / "slurms").write_text("SwitchName=s7 Nodes=node[1-4]\n")
    assert options(f"--topology ours {script}").domains == {"rack": "a"}
    with pytest.raises(UserError, match="does not have this host"):
        options(f"--topology slurms {script}")


def test_given_limits_reach_agents_workers_and_replicas(script, tmp_path):
    (tmp_path / "limits.yaml").write_text("stall_s: 12")
    given = options(f"--limits limits.yaml --run-dir r {script}")
    assert given.timeouts == Timeouts(stall_s=12.0)
    assert member.unpack(member.pack(given, [], None))[0].timeouts == given.timeouts
    env = environment.worker_environment(replace(PLACE, options=given), "n0.w0", 0, 0, 0, ("h", 1))
    assert Timeouts.of_worker(env) == given.timeouts and Timeouts.of_worker({}) == Timeouts()
    assert json.loads(surroundings(env)["limits"]) == {"stall_s": 12.0}, "compared between the workers"
