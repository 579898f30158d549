"""What the launcher of replicas decides, as far as ``conversations/replicas`` does not show it."""

import json
from itertools import product

import pytest

from ft import faults as inject
from ft.base import events
from ft.base.errors import NOT_SAVED, UserError
from ft.commands import replicas as run
from ft.job.agent.options import Cluster, RunOptions, Script
from ft.job.replicas import flags, marks, member, places, policy
from ft.job.replicas.flags import ReplicaOptions
from ft.job.replicas.member import next_life
from ft.job.replicas.places import LauncherPart, parts_of
from ft.platform import election


def test_every_worker_of_every_node_belongs_to_exactly_one_replica():
    for nnodes, nproc, replicas, spare in product(range(1, 7), range(1, 9), range(1, 13), range(3)):
        nodes = range(nnodes + spare)
        try:
            parts = [part for node in nodes for part in parts_of(node, nnodes + spare, nproc, replicas, spare)]
        except UserError:
            continue
        training = [part for part in parts if not part.is_standby]
        assert {part.replica for part in training} == set(range(replicas))
        assert sum(part.nproc for part in training) == nnodes * nproc
        assert sum(part.nproc for part in parts) == (nnodes + spare) * nproc
        assert {part.world_size for part in parts} == {nnodes * nproc // replicas}
        places = [(part.replica, part.node_rank) for part in parts]
        assert len(set(places)) == len(places)
        assert all(part.node_rank < part.nodes == places_of(part.replica, parts) for part in parts)


def places_of(replica: int, parts: list[LauncherPart]) -> int:
    return sum(part.replica == replica for part in parts)


def test_a_replica_is_a_run_of_its_own_in_a_folder_of_its_own(tmp_path):
    script = Script("script.py", False, [])
    whole = RunOptions(script, Cluster(4, 3, 0, "10.0.0.1", 29400), 8, 0, tmp_path, "r", 9, True, "10.0.0.4")
    own = run.replica_options(parts_of(3, 4, 8, 2)[0], whole, ReplicaOptions(2))
    assert (own.run_dir, own.run_id) == (tmp_path / "replica-1", "r-replica-1")
    assert own.cluster == Cluster(2, 1, 0, "10.0.0.1", 29400, in_folder=True)
    first = run.replica_options(parts_of(2, 4, 8, 2)[0], whole, ReplicaOptions(2))
    assert first.cluster == Cluster(2, 0, 0, "10.0.0.4", 0, in_folder=True), "its own control plane is here"
    assert not own.hot_swap and own.world_size == 16 and (own.replicas, own.reorders) == (2, False)
    assert member.unpack(member.pack(own, [], 1.5)) == (own, [], 1.5)


def planned(*texts: str, replicas: int = 3, shape: LauncherPart | None = None, seed: int = 1) -> dict[int, list]:
    specs, seed = inject.read_specs(texts, None, seed)
    return places.plan_faults(specs, replicas, shape or LauncherPart(0, 1, 0, 2), seed)


def test_faults_drawn_from_a_distribution_hit_all_replicas_and_the_same_ones_again():
    text = "kill@every=exponential(mean=10s):rank=random:count=60"
    found = planned(text, seed=4)
    assert all(len(found[k]) > 5 for k in range(3)) and sum(map(len, found.values())) == 60
    assert planned(text, seed=4) == found != planned(text, seed=5)
    assert {f.rank for f in found[1]} == {0, 1}
    drawn = planned("kill@every=exponential(mean=10s):rank=1:replica=random:count=60")
    assert all(len(drawn[k]) > 5 for k in range(3))


def test_a_run_without_replicas_refuses_a_fault_of_one():
    with pytest.raises(UserError, match="no replicas"):
        inject.schedule(inject.parse("kill@replica=1:step=5"), 4, ["n0"], 0)


def test_a_new_agent_is_given_only_the_faults_that_have_not_happened(tmp_path):
    found = planned("kill@replica=0:step=1:rank=0", "kill@replica=0:step=2:rank=0")[0]
    with events.EventLog(tmp_path / "events.jsonl") as log:
        log.write(events.now(events.FAULT_INJECTED, node="n0", number=1, kind="kill"))
    assert [fault.number for fault in inject.left(found, tmp_path)] == [2]


def test_lives_go_on_from_all_that_was_there(tmp_path):
    assert next_life(tmp_path, 0) == next_life(tmp_path, 1) == 0
    standing = {"term": 3, "life": 1, "where": "", "node": "n0", "pid": 1, "count": 7}
    (tmp_path / "control.json").write_text(json.dumps(standing))
    assert next_life(tmp_path, 0) == 2
    assert next_life(tmp_path, 1) == 1, "its node 0 begins the next one"
    with events.EventLog(tmp_path / "events.jsonl") as log:
        log.write(events.now(events.RESTARTED, number=4, reason="a warm restart"))
    assert next_life(tmp_path, 0) == 5


def test_launchers_tell_one_another_who_has_ended(tmp_path):
    assert marks.read(tmp_path) == marks.Marks()
    marks.put(tmp_path, 0, policy.ENDS[0])
    marks.put(tmp_path, 2, marks.GIVEN_UP)
    marks.put(tmp_path, 3, policy.ENDS[NOT_SAVED])
    assert marks.read(tmp_path) == marks.Marks(frozenset({0, 3}), frozenset({2}))
    marks.clear(tmp_path, 3)
    marks.clear(tmp_path, 2)
    marks.clear(tmp_path, 1)
    assert marks.read(tmp_path) == marks.Marks(frozenset({0}))


def test_a_replica_that_comes_alone_is_reached_where_the_quorum_server_sees_it(tmp_path):
    script, here = Script("script.py", False, []), Cluster(1, 0, 0, "127.0.0.1", 0)
    whole = RunOptions(script, here, 2, 0, tmp_path, "r", 9, True)
    alone = flags.ReplicaOptions(3, only=2)
    assert run.reachable(whole, alone) == whole, "nobody is there yet"
    election.renew(tmp_path, election.LeaseRecord(0, 0, "tcp://127.0.0.1:4000", "", 1), election.QUORUM)
    assert run.reachable(whole, alone).local_addr == "127.0.0.1"
    assert run.reachable(whole, flags.ReplicaOptions(3)) == whole
