"""Topology files: ours and Slurm's."""

import argparse
import socket

import pytest

from ft.base.errors import UserError
from ft.commands import arguments
from ft.job.agent.options import resolve
from ft.platform.slurm import read_topology

OURS = """
# two racks, two power feeds
a[1-2]   rack=r1 power=x
b1,b2    rack=r2      # a comment
b[1-2]   power=y
"""
TREE = """
SwitchName=s0 Nodes=n[0-1]
SwitchName=s1 \\
    Nodes=n[2-3]  LinkSpeed=100
switchname=s2 nodes=n4
SwitchName=mid Switches=s[0-1]
SwitchName=side Switches=s2
SwitchName=core Switches=mid,side
"""


@pytest.fixture
def read(tmp_path):
    def of(text: str):
        path = tmp_path / "topology"
        path.write_text(text)
        return read_topology(path)

    return of


def test_our_format(read):
    topology = read(OURS)
    assert topology.find(["a1"], "n0") == ("a1", {"rack": "r1", "power": "x"})
    assert topology.find(["elsewhere", "b2"], "n0") == ("b2", {"rack": "r2", "power": "y"})
    assert read("n0 rack=a\nn1 rack=b\n").find(["localhost"], "n1") == ("n1", {"rack": "b"})


def test_slurms_tree_without_its_root(read):
    hosts = read(TREE).hosts
    assert hosts["n0"] == {"switch": "s0", "switch2": "mid"}
    assert hosts["n3"] == {"switch": "s1", "switch2": "mid"}
    assert hosts["n4"] == {"switch": "s2", "switch2": "side"}


def test_slurms_blocks(read):
    hosts = read("BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n3\nBlockSizes=2\n").hosts
    assert hosts == {"n1": {"block": "b1"}, "n2": {"block": "b1"}, "n3": {"block": "b2"}}


def test_one_leaf_is_still_a_failure_domain(read):
    assert read("SwitchName=only Nodes=n[1-2]\n").hosts["n1"] == {"switch": "only"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ["is empty"]),
        ("host\n", ["line 1", "HOSTS KIND=NAME"]),
        ("rack=r1 host\n", ["line 1", "HOSTS KIND=NAME"]),
        ("a rack=r1\nb rack\n", ["line 2", "KIND=NAME"]),
        ("a[1- rack=r1\n", ["line 1", "brackets"]),
        ("a node=r1\n", ["line 1", "'node'"]),
        ("a rack=r1\na rack=r2\n", ["line 2", "rack r2", "rack r1"]),
        ("a rack=r1\nb power=p\n", ["a has no power"]),
        ("SwitchName=s0 Nodes=n1\nSwitchName=s0 Nodes=n2\n", ["line 2", "line 1"]),
        ("SwitchName=s0 Switches=s9\n", ["line 1", "no switch s9"]),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", ["a, b", "below each other"]),
        ("SwitchName=a Nodes=n1\nSwitchName=b Switches=a\nSwitchName=c Switches=a\n", ["below b and c"]),
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1\n", ["n1", "a and b"]),
        ("SwitchName=a Colour=red\n", ["line 1", "colour"]),
        ("SwitchName=a Nodes\n", ["line 1", "KEY=VALUE"]),
    ],
)
def test_bad_files_are_refused_with_the_line(read, text, said):
    with pytest.raises(UserError) as raised:
        read(text)
    assert all(words in raised.value.problem for words in said), raised.value.problem


def test_files_that_are_not_there_or_not_text(tmp_path):
    for path, said in ((tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(UserError, match=said):
            read_topology(path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text"):
        read_topology(tmp_path / "bytes")


def test_a_host_that_is_missing_is_named_with_those_that_are_there(read):
    with pytest.raises(UserError, match=r"c1 or n7 \(its agent\): it has a1, a2, b1, b2"):
        read(OURS).find(["c1"], "n7")
    with pytest.raises(UserError, match="this host, n9: it has n0"):  # Slurm's names are hosts', never agents'
        read(TREE).find(["n9"], "n0")


def domains(line: str, environment: dict | None = None) -> dict:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_flags(parser)
    return resolve(parser.parse_args(line.split()), environment or {}).domains


def test_ft_run_finds_its_own_node_in_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    host = socket.gethostname()
    (tmp_path / "ours").write_text(f"n1 rack=b\n{host} rack=a\n")
    (tmp_path / "slurms").write_text("SwitchName=s7 Nodes=node[1-4]\n")
    assert domains("train.py") == {}
    assert domains("--topology ours train.py") == {"rack": "a"}
    assert domains("--topology slurms train.py", {"SLURMD_NODENAME": "node3"}) == {"switch": "s7"}
    with pytest.raises(UserError, match="does not have this host"):
        domains("--topology slurms train.py")
    (tmp_path / "ours").write_text("n0 rack=a\nn1 rack=b\n")
    second = "--nnodes 2 --node-rank 1 --rdzv-endpoint h:1 --run-dir r"
    assert domains(f"{second} --topology ours train.py") == {"rack": "b"}
