"""What the launcher of replicas decides: who runs where, who is started again, when it is over."""

import argparse
import json
from itertools import product

import pytest

from ft import faults as inject
from ft.base import events
from ft.base.errors import ENDED_EARLY, NOT_SAVED, UserError
from ft.commands import arguments
from ft.commands import replicas as run
from ft.job.agent.options import Cluster, RunOptions, Script
from ft.job.quorum.limits import Limits
from ft.job.replicas import flags, marks, member, places, policy
from ft.job.replicas.flags import Replicas
from ft.job.replicas.member import next_life
from ft.job.replicas.places import LauncherPart, devices_of, parts_of
from ft.job.replicas.policy import AGAIN, DONE, END, GIVE_UP, TELL, WAIT, ReplicaView, after_exit, judge
from ft.platform import election
from ft.systems.hsdp.place import ReplicaContext
from ft.systems.spare import placement
from ft.systems.spare.ruler import ruler


def read(words: argparse.Namespace) -> flags.Replicas:
    return flags.read(words, ruler, placement.read)


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_flags(parser)
    return parser.parse_args([*words, "script.py", "--lr", "1"])


# --- who runs where --------------------------------------------------------------------------------------------------


def test_replicas_of_one_node_share_its_workers_in_order():
    parts = parts_of(node_rank=0, nnodes=1, nproc=6, replicas=3)
    assert [(part.replica, part.first, part.nproc, part.shared) for part in parts] == [
        (0, 0, 2, True),
        (1, 2, 2, True),
        (2, 4, 2, True),
    ]
    assert {part.world_size for part in parts} == {2}


def test_replicas_are_consecutive_sets_of_whole_nodes():
    found = [parts_of(node_rank, 6, 8, 3) for node_rank in range(6)]
    assert [(part.replica, part.node_rank) for (part,) in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(part == LauncherPart(part.replica, 2, part.node_rank, 8) and part.world_size == 16 for (part,) in found)


def test_several_whole_replicas_fit_on_each_of_several_nodes():
    parts = parts_of(node_rank=1, nnodes=2, nproc=4, replicas=4)
    assert [(part.replica, part.first, part.nproc, part.nodes) for part in parts] == [(2, 0, 2, 1), (3, 2, 2, 1)]


@pytest.mark.parametrize(("nnodes", "nproc", "replicas"), [(1, 6, 4), (4, 1, 3), (2, 3, 4), (4, 6, 6), (3, 2, 2)])
def test_a_world_that_cannot_be_divided_is_refused_with_the_numbers(nnodes, nproc, replicas):
    with pytest.raises(UserError, match=str(replicas)) as caught:
        parts_of(0, nnodes, nproc, replicas)
    assert str(nnodes) in str(caught.value) and str(nproc) in str(caught.value) and caught.value.fix


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


def test_standby_nodes_are_dealt_out_to_replicas_in_turn():
    found = [parts_of(node_rank, 9, 8, 2, standby_nodes=3)[0] for node_rank in range(9)]
    assert [(part.replica, part.node_rank) for part in found[:6]] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [(part.replica, part.node_rank) for part in found[6:]] == [(0, 3), (1, 3), (0, 4)]
    assert [part.is_standby for part in found] == [False] * 6 + [True] * 3
    assert {part.world_size for part in found} == {24}
    assert [part.nodes for part in found] == [5, 5, 5, 4, 4, 4, 5, 4, 5]


def test_a_standby_node_has_a_part_of_each_replica_of_the_node_that_it_stands_for():
    first, second = parts_of(2, 3, 4, 4, standby_nodes=1), parts_of(0, 3, 4, 4, standby_nodes=1)
    assert [(part.replica, part.first, part.nproc, part.node_rank) for part in first] == [(0, 0, 2, 1), (1, 2, 2, 1)]
    assert [part.nodes for part in second] == [2, 2] and [part.is_standby for part in second] == [False, False]
    assert [part.nodes for part in parts_of(1, 3, 4, 4, standby_nodes=1)] == [1, 1]


def test_each_replica_of_a_node_sees_its_own_devices():
    second = LauncherPart(1, 1, 0, 2, first=2, shared=True)
    assert devices_of(second, None, 6) == "2,3"
    assert devices_of(second, "7, 6,5,4", 4) == "5,4"
    assert devices_of(second, None, 0) is None, "a node without devices"
    assert devices_of(second, None, 1) is None, "workers share what there is"
    assert devices_of(LauncherPart(1, 2, 0, 8), None, 8) is None, "the node is the replica's alone"


def test_a_replica_is_a_run_of_its_own_in_a_folder_of_its_own(tmp_path):
    script = Script("script.py", False, [])
    whole = RunOptions(script, Cluster(4, 3, 0, "10.0.0.1", 29400), 8, 0, tmp_path, "r", 9, True, "10.0.0.4")
    own = run.replica_options(parts_of(3, 4, 8, 2)[0], whole, Replicas(2))
    assert (own.run_dir, own.run_id) == (tmp_path / "replica-1", "r-replica-1")
    assert own.cluster == Cluster(2, 1, 0, "10.0.0.1", 29400, in_folder=True)
    first = run.replica_options(parts_of(2, 4, 8, 2)[0], whole, Replicas(2))
    assert first.cluster == Cluster(2, 0, 0, "10.0.0.4", 0, in_folder=True), "its own control plane is here"
    assert not own.hot_swap and own.world_size == 16 and (own.replicas, own.reorders) == (2, False)
    assert member.unpack(member.pack(own, [], 1.5)) == (own, [], 1.5)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ft-hsdp-wait", "1s"], "no number of replicas"),
        (["--ft-hsdp-replicas", "2", "--ft-hsdp-replica", "2"], "between 0 and 1"),
        (["--ft-hsdp-replicas", "2", "--ft-hsdp-min-replicas", "3"], "between 1 and the 2"),
        (["--ft-hsdp-replicas", "2", "--ft-hsdp-wait", "1d"], "--ft-hsdp-wait 86400s is not below"),
        (["--ft-hsdp-replicas", "2", "--ft-hsdp-chunk", "12"], "--ft-hsdp-chunk 12 is not a multiple of 8"),
        (["--ft-hsdp-replicas", "2", "--ft-hsdp-chunk", "2GiB"], "between 8 and"),
        (["--ft-spare-redundancy", "2"], "no number of replicas"),
        (["--ft-hsdp-replicas", "4", "--ft-spare-redundancy", "3"], "redundancy 3 cannot be placed on 4 groups"),
        (["--ft-hsdp-replicas", "3", "--ft-spare-redundancy", "1"], "redundancy"),
        (
            ["--ft-hsdp-replicas", "3", "--ft-spare-redundancy", "2", "--ft-hsdp-lr-scaling", "sqrt"],
            "--ft-hsdp-lr-scaling sqrt",
        ),
        (["--ft-hsdp-replicas", "2", "--ft-hsdp-replica", "1", "--ft-transport", "mpi"], "one MPI job"),
    ],
)
def test_bad_flags_are_refused(words, says):
    with pytest.raises(UserError, match=says) as caught:
        read(given(*words))
    assert caught.value.fix


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        *(("--ft-hsdp-wait", wait, "ms, s, m (or min), h or d") for wait in ("-1", "nan", "5")),
        *(("--ft-hsdp-replicas", number, "not a whole number from 1 to") for number in ("0", "-1")),
        ("--ft-hsdp-streams", "17", "not a whole number from 1 to 16"),
        ("--ft-hsdp-chunks", "0", "not a whole number from 1 to 1,024"),
    ],
)
def test_a_wrong_value_is_refused_with_what_can_be_given(flag, value, says, capsys):
    with pytest.raises(SystemExit):
        given("--ft-hsdp-replicas", "2", flag, value)
    assert says in capsys.readouterr().err


def test_what_was_asked_for_reaches_workers_and_the_quorum_server():
    assert not flags.wanted(given("--nproc-per-node", "2"))
    words = ("--ft_hsdp_replicas", "3", "--ft-hsdp-min-replicas", "2", "--ft-hsdp-wait", "500ms")
    asked = read(given(*words))
    assert asked.environment() == {
        "FT_HSDP_REPLICAS": "3",
        "FT_HSDP_MIN_REPLICAS": "2",
        "FT_HSDP_LR_SCALING": "sqrt",
        "FT_HSDP_STREAMS": "1",
        "FT_HSDP_CHUNKS": "2",
        "FT_HSDP_WAIT": "0.5",
    }
    sizes = read(given("--ft-hsdp-replicas", "2", "--ft-hsdp-chunk", "8MiB", "--ft-hsdp-chunks", "4"))
    place = ReplicaContext.from_environment(
        sizes.environment() | {"FT_HSDP_REPLICA": "0", "FT_HSDP_RUN_DIR": "/tmp", "FT_HSDP_REPLICAS": "2"}
    )
    assert (place.chunk_bytes, place.chunks) == (8 << 20, 4)
    never = read(given("--ft-hsdp-replicas", "2", "--ft-hsdp-wait", "0"))
    assert never.environment()["FT_HSDP_WAIT"] == "0"
    limits = Limits(**never.server_options("127.0.0.1")["limits"]).check()
    assert limits.wait_s == limits.arrive_s == 0.0
    given_to_server = server_options(asked)
    options = given_to_server.options
    assert (options.replicas, options.min_replicas, options.limits.wait_s) == (3, 2, 0.5)
    assert given_to_server.where == "tcp://10.0.0.1:0"
    assert server_options(flags.Replicas(3)).options.limits.wait_s == type(options.limits)().wait_s


def server_options(asked: flags.Replicas):
    from ft.job.quorum.server import parse_options

    return parse_options(json.dumps(asked.server_options("10.0.0.1")))


# --- faults ----------------------------------------------------------------------------------------------------------


def planned(*texts: str, replicas: int = 3, shape: LauncherPart | None = None, seed: int = 1) -> dict[int, list]:
    specs, seed = inject.read_specs(texts, None, seed)
    return places.plan_faults(specs, replicas, shape or LauncherPart(0, 1, 0, 2), seed)


def test_a_fault_goes_to_the_replica_that_it_names():
    found = planned("kill@replica=1:step=5:rank=0", "kill-control@step=3:replica=2")
    assert [(f.kind, f.step, f.rank, f.number) for f in found[1]] == [("kill", 5, 0, 2)]
    assert [(f.kind, f.number) for f in found[2]] == [("kill-control", 1)]
    assert found[0] == []


def test_without_a_replica_ranks_count_over_all_of_them():
    found = planned("kill@step=5:rank=3,hang@step=2:rank=4")
    assert [(f.kind, f.rank) for f in found[1]] == [("kill", 1)]
    assert [(f.kind, f.rank) for f in found[2]] == [("hang", 0)]


def test_faults_drawn_from_a_distribution_hit_all_replicas_and_the_same_ones_again():
    text = "kill@every=exponential(mean=10s):rank=random:count=60"
    found = planned(text, seed=4)
    assert all(len(found[k]) > 5 for k in range(3)) and sum(map(len, found.values())) == 60
    assert planned(text, seed=4) == found != planned(text, seed=5)
    assert {f.rank for f in found[1]} == {0, 1}
    drawn = planned("kill@every=exponential(mean=10s):rank=1:replica=random:count=60")
    assert all(len(drawn[k]) > 5 for k in range(3))


@pytest.mark.parametrize("text", ["kill@step=5:rank=6", "kill@replica=3:step=5", "kill@replica=1:step=5:rank=2"])
def test_a_victim_that_does_not_exist_is_refused(text):
    with pytest.raises(UserError, match="there is no"):
        planned(text)


def test_a_run_without_replicas_refuses_a_fault_of_one():
    with pytest.raises(UserError, match="no replicas"):
        inject.schedule(inject.parse("kill@replica=1:step=5"), 4, ["n0"], 0)


def test_a_new_agent_is_given_only_the_faults_that_have_not_happened(tmp_path):
    found = planned("kill@replica=0:step=1:rank=0", "kill@replica=0:step=2:rank=0")[0]
    with events.EventLog(tmp_path / "events.jsonl") as log:
        log.write(events.now(events.FAULT_INJECTED, node="n0", number=1, kind="kill"))
    assert [fault.number for fault in inject.left(found, tmp_path)] == [2]


# --- who is started again --------------------------------------------------------------------------------------------


def test_an_agent_that_was_killed_is_started_again_at_once():
    answer = after_exit(-9, "killed by SIGKILL", [5.0])
    assert (answer.action, answer.pause_s) == (AGAIN, 0.0) and "SIGKILL" in answer.reason
    assert after_exit(-9, "killed by SIGKILL", [1.0, 1.0, 1.0, 1.0, 500.0]).pause_s == 0.0, "it had settled"


def test_one_that_dies_again_and_again_is_started_later_and_later_and_then_given_up():
    answers = [after_exit(1, "exited with code 1", [1.0] * count) for count in range(1, 9)]
    pauses = [answer.pause_s for answer in answers if answer.action == AGAIN]
    assert pauses == sorted(pauses) and len(set(pauses)) == len(pauses) == policy.MOST_SHORT_LIVES - 1
    assert all(answer.action == GIVE_UP for answer in answers[policy.MOST_SHORT_LIVES - 1 :])


def test_bad_input_is_not_tried_again_and_an_end_is_an_end():
    assert after_exit(2, "exited with code 2", [1000.0]).action == GIVE_UP
    assert after_exit(0, "exited with code 0", [1.0]).action == DONE


def test_lives_go_on_from_all_that_was_there(tmp_path):
    assert next_life(tmp_path, 0) == next_life(tmp_path, 1) == 0
    standing = {"term": 3, "life": 1, "where": "", "node": "n0", "pid": 1, "count": 7}
    (tmp_path / "control.json").write_text(json.dumps(standing))
    assert next_life(tmp_path, 0) == 2
    assert next_life(tmp_path, 1) == 1, "its node 0 begins the next one"
    with events.EventLog(tmp_path / "events.jsonl") as log:
        log.write(events.now(events.RESTARTED, number=4, reason="a warm restart"))
    assert next_life(tmp_path, 0) == 5


# --- when it is over -------------------------------------------------------------------------------------------------

UP = ReplicaView(up=True)
BUILDING = ReplicaView(up=True, gathering=True)
WAITING = ReplicaView(up=False)
FINISHED = ReplicaView(up=False, code=0)
FAILED = ReplicaView(up=False, code=3, given_up=True)


def verdict(*views: ReplicaView, finished_s: float | None = None, lost=(), least: int = 1, told=()) -> policy.Verdict:
    return judge(dict(enumerate(views)), finished_s, set(lost), len(views), least, told)


def test_the_run_goes_on_while_enough_replicas_are_left():
    assert verdict(UP, UP).what == verdict(UP, WAITING).what == verdict(UP, FAILED, lost=[1]).what == WAIT
    ended = verdict(UP, FAILED, lost=[1], least=2)
    assert (ended.what, ended.code) == (END, 3) and "1 of 2" in ended.reason
    assert verdict(FAILED, FAILED, lost=[0, 1]).code == 3
    bad_input = ReplicaView(up=False, code=2, given_up=True)
    assert verdict(FAILED, bad_input, lost=[0, 1]).code == 2


def test_the_run_ends_well_when_all_have_finished_or_some_have_and_the_rest_was_told():
    assert verdict(FINISHED, UP, finished_s=5.0).what == WAIT, "it may be saving"
    assert verdict(FINISHED, FINISHED, finished_s=0.0) == policy.Verdict(END, "the run has finished")
    assert verdict(FINISHED, FAILED, finished_s=0.0, lost=[1]).code == 0
    assert verdict(FINISHED, WAITING, finished_s=0.0).replicas == (1,)
    assert verdict(FINISHED, WAITING, finished_s=0.0, told=[1]).what == WAIT


def test_the_run_ends_early_or_unsaved_as_its_replicas_do():
    early, unsaved = ReplicaView(up=False, code=ENDED_EARLY), ReplicaView(up=False, code=NOT_SAVED)
    assert after_exit(ENDED_EARLY, "", [1.0]).action == after_exit(NOT_SAVED, "", [1.0]).action == DONE
    assert verdict(early, early, finished_s=0.0).code == ENDED_EARLY
    assert verdict(FINISHED, early, finished_s=0.0, told=[1]).code == 0, "one that has done all steps suffices"
    assert verdict(FINISHED, unsaved, finished_s=0.0).code == NOT_SAVED, "one writes the checkpoint for all"


def test_a_replica_that_is_rebuilt_when_the_others_have_finished_is_told():
    again = ReplicaView(up=True, restarts_then=3, restarts=4)
    assert verdict(FINISHED, again, finished_s=1.0).what == TELL
    before = ReplicaView(up=True, restarts_then=4, restarts=4, gathering=True)
    assert verdict(FINISHED, before, finished_s=1.0).what == WAIT, "it was on its way"
    assert verdict(FINISHED, before, finished_s=policy.LATE_S + 1).what == TELL


def test_a_launcher_alone_with_lost_replicas_ends_though_others_go_on():
    assert judge({2: FAILED}, None, {2}, 3, 1).what == END


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
    alone = flags.Replicas(3, only=2)
    assert run.reachable(whole, alone) == whole, "nobody is there yet"
    election.renew(tmp_path, election.LeaseRecord(0, 0, "tcp://127.0.0.1:4000", "", 1), election.QUORUM)
    assert run.reachable(whole, alone).local_addr == "127.0.0.1"
    assert run.reachable(whole, flags.Replicas(3)) == whole
