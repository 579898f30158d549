"""Replicas on hosts of their own, whose network fails: whoever can reach the others trains on, equal and without a gap,
and the one that was left out is back once the network is."""

import signal

import pytest
import replica_runs
from nodes import Lab, why_not
from nodes.fleet import Fleet
from replica_runs import proof

from ft.base.errors import ENDED_EARLY

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

ENDLESS = 100_000
ALL = (0, 1, 2)


class Replicas(Fleet):
    """One replica on each host; the launcher of the first has the quorum server."""

    def __init__(self, lab, folder, flags):
        count = len(lab.hosts)
        super().__init__(
            lab, folder, flags, standby_nodes=0, nproc=1, options=f"--standby 0 --ft-hsdp-replicas {count}"
        )

    def step(self):
        return max((lines[-1].step for lines in proof(self.folder).lines.values() if lines), default=0)

    def healthy(self):
        """Those that trained the newest step."""
        newest = max((lines[-1] for lines in proof(self.folder).lines.values() if lines), key=lambda c: c.quorum)
        return newest.healthy

    def end(self):
        """All are told to save and end."""
        for node in self.nodes:
            node.process.send_signal(signal.SIGTERM)
        return self.wait()


@pytest.mark.long
def test_a_partition_between_replicas_leaves_one_out_and_never_stops_the_others(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("FT_HSDP_DIGESTS", "1")
    flags = replica_runs.flags(corpus, f"--save {tmp_path}/saved", ENDLESS)
    with Lab(3, seed=7) as lab, Replicas(lab, tmp_path / "run", flags) as fleet:
        fleet.wait_steps(5)
        _, first, second = lab.hosts
        first.degrade(loss=0.02, delay_s=0.005)
        fleet.wait_steps(10)
        first.repair()
        for one, others in ((second, [first]), (first, [lab.hosts[0], second])):
            fleet.wait_for(lambda: fleet.healthy() == ALL, what="all replicas")
            for sources, targets in (([one], others), (others, [one])):
                lab.impair(sources, targets, blocked=True)
            fleet.wait_for(lambda: len(fleet.healthy()) == 2, what="two that go on")
            fleet.wait_steps(10)
            for host in lab.hosts:
                host.repair()
        fleet.wait_for(lambda: fleet.healthy() == ALL, what="all replicas")
        done = fleet.end()
    found = proof(fleet.folder)
    problems = found.problems(found.steps[-1], 2)
    assert done.code == ENDED_EARLY and not problems, f"{problems}\n{fleet.explain()}"
