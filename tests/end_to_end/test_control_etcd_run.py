"""A real run whose nodes share no folder: etcd has the lease of the control plane, and its journal."""

from pathlib import Path

import pytest
from ft_runs import Running, flags, leftovers
from pythons import python
from waiting import eventually

from ft.base import events
from ft.platform import election
from ft.platform.network import free_port

LAYOUT = "--use-distributed-optimizer --tensor-model-parallel-size 2"  # inside a node; data parallel across
STEPS, NODES, LIMIT_S = 60, 3, 150.0


class Node(Running):
    """The `ft run` of one node, with a folder of its own."""

    def __init__(self, folder: Path, rank: int, options: str, script: str):
        folder.parent.mkdir()
        self.folder, self._log = folder, folder.with_name("run.out")
        words = ["--node-rank", rank, "--run-dir", folder, *options.split(), *script.split()]
        self._begin(words, FT_TOKEN="of this run alone")

    def named(self, name: str) -> list:
        return [event for event in events.read(self.folder / "events.jsonl") if event.name == name]


@pytest.fixture
def nodes(corpus, tmp_path, etcd):
    servers = etcd(3)
    options = f"--nnodes {NODES} --standby-nodes 1 --nproc-per-node 2 --control {servers.url} --local-addr 127.0.0.1 "
    options += f"--rdzv-endpoint 127.0.0.1:{free_port('127.0.0.1')}"
    script = f"pretrain_gpt.py {flags(corpus, LAYOUT, STEPS)}"
    found = [Node(tmp_path / f"node{rank}" / "run", rank, options, script) for rank in range(NODES)]
    yield found, servers
    for node in found:
        node.stop()


@pytest.mark.long
def test_nodes_without_a_shared_folder_survive_the_node_of_the_control_plane_and_an_etcd_server(nodes, reference):
    (first, second, third), servers = nodes
    second.wait_for(lambda: second.step() >= 3)
    second.wait_for(lambda: len([e for e in first.named("standby_ready") if e.node == "n2"]) >= 2)
    seen = [election.read(node.folder) for node in (second, third)]
    assert len({(lease.term, lease.node, lease.where) for lease in seen}) == 1, "all nodes see the same lease"
    servers.kill(servers.leader())
    second.wait_for(lambda: second.step() >= 10)
    before = election.read(second.folder)
    assert before.node == "n0"
    first.lose_power()
    second.wait_for(lambda: election.read(third.folder).term > before.term)
    ends = [second.wait(LIMIT_S), wait(third)]
    assert [done.code for done in ends] == [0, 0], "".join(done.explain() for done in ends)
    heir = {"n1": second, "n2": third}[election.read(second.folder).node]
    lost = [(event.node, event.detail["action"]) for event in heir.named("fault_detected")]
    assert ("n0", "replace") in lost, ends[0].explain()
    assert heir.named("control_back") and not heir.named("restarted"), ends[0].explain()
    journal = (heir.folder / "journal.jsonl").read_text()
    assert '"term":0' in journal and f'"term":{election.read(third.folder).term}' in journal, "the whole journal"
    assert ends[0].losses == reference(4, LAYOUT, STEPS)


def wait(node: Node):
    eventually(lambda: not leftovers(node.folder, 0.0), lambda: node.stop().explain(), LIMIT_S)
    return node.wait(LIMIT_S)


def test_an_earlier_run_of_the_same_name_is_refused(corpus, tmp_path, etcd):
    url = etcd(1).url
    words = ["-m", "ft", "run", "--nproc-per-node", "2", "--control", url, "--rdzv-id", "again"]
    codes = []
    for number in range(2):
        script = f"pretrain_gpt.py {flags(corpus, '', 2)}".split()
        done = python(*words, "--run-dir", tmp_path / str(number), *script, FT_TOKEN="a token of the site")
        codes.append(done.returncode)
    assert codes == [0, 2], done.stdout + done.stderr
    assert "earlier run with the name again" in done.stderr and "etcdctl del --prefix ft/again-" in done.stderr
