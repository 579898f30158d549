"""The parts of the control plane's judgement, each by itself."""

import json
from dataclasses import replace

import pytest
from control_world import World, kinds, only, opened

from ft.base.errors import UserError
from ft.faults import verdict
from ft.job import messages as m
from ft.job.agent.devices import FREE_S
from ft.job.control import history, liveness, repairs
from ft.job.control.liveness import WorkerView
from ft.job.control.membership import place_ranks
from ft.job.control.state import RUNNING, Agent, ControlState, Hold, Incident
from ft.job.control.timeouts import Timeouts
from ft.job.messages import Beat
from ft.job.parts import Holdings, Seat, Source
from ft.net.codec import from_json, to_json
from ft.platform.processes import OwnPauses

LIMITS = Timeouts()


@pytest.mark.parametrize(
    "kinds, message, category, action",
    [
        (["UserError", "FtError"], "no such file", verdict.USER, verdict.STOP),
        (["ReplaceNodeError", "FtError"], "bad NIC", verdict.HOST, verdict.REPLACE),
        (["RecoverableError", "FtError"], "group pp: timed out", verdict.TRANSIENT, verdict.RETRY),
        (["EpochClosed", "RecoverableError"], "epoch 3 is closed", verdict.TRANSIENT, verdict.RETRY),
        (["FallbackError", "FtError"], "no usable snapshot", verdict.NETWORK, verdict.RESTART),
        (["AcceleratorError", "RuntimeError"], "CUDA error: uncorrectable ECC error", verdict.DEVICE, verdict.REPLACE),
        (["AcceleratorError", "RuntimeError"], "an illegal memory access", verdict.DEVICE, verdict.REPLACE),
        (["AcceleratorError", "RuntimeError"], "CUDA error: unknown", verdict.DEVICE, verdict.REPLACE),
        (["RuntimeError"], "NVRM: Xid 79: GPU has fallen off the bus", verdict.DEVICE, verdict.REPLACE),
        (["AcceleratorError", "RuntimeError"], "device-side assert triggered", verdict.SOFTWARE, verdict.RESTART),
        (["OutOfMemoryError", "RuntimeError"], "CUDA out of memory.", verdict.SOFTWARE, verdict.RESTART),
        (["DistBackendError", "RuntimeError"], "ncclRemoteError: peer is gone", verdict.TRANSIENT, verdict.RETRY),
        (["DistBackendError", "RuntimeError"], "ncclSystemError: NIC", verdict.NETWORK, verdict.REPLACE),
        (["DistBackendError", "RuntimeError"], "ncclInvalidUsage", verdict.SOFTWARE, verdict.RESTART),
        (["DistNetworkError", "RuntimeError"], "socket gone", verdict.TRANSIENT, verdict.RETRY),
        (["ConnectionResetError", "ConnectionError", "OSError"], "reset", verdict.TRANSIENT, verdict.RETRY),
        (["RuntimeError"], "[gloo/transport/tcp] Connection closed by peer", verdict.TRANSIENT, verdict.RETRY),
        (["OSError"], "[Errno 28] No space left on device", verdict.NETWORK, verdict.REPLACE),
        (["OSError"], "[Errno 5] Input/output error: '/data'", verdict.NETWORK, verdict.REPLACE),
        (["MemoryError"], "", verdict.HOST, verdict.REPLACE),
        (["KeyError", "LookupError"], "'loss'", verdict.SOFTWARE, verdict.RESTART),
        ([], "", verdict.SOFTWARE, verdict.RESTART),
    ],
)
def test_exceptions_are_judged_by_the_table(kinds, message, category, action):
    found = verdict.of_error(kinds, message)
    assert (found.category, found.action) == (category, action)
    assert found.reason


@pytest.mark.parametrize(
    "code, category, action, word",
    [
        (-9, verdict.HOST, verdict.REPLACE, "SIGKILL"),
        (-11, verdict.HOST, verdict.REPLACE, "SIGSEGV"),
        (-7, verdict.HOST, verdict.REPLACE, "SIGBUS"),
        (-6, verdict.HOST, verdict.REPLACE, "SIGABRT"),
        (-200, verdict.HOST, verdict.REPLACE, "signal 200"),
        (1, verdict.SOFTWARE, verdict.RESTART, "code 1"),
        (2, verdict.USER, verdict.STOP, "code 2"),
        (0, verdict.SOFTWARE, verdict.REPLACE, "code 0"),
    ],
)
def test_exits_are_judged_by_code_and_signal(code, category, action, word):
    found = verdict.of_exit(code)
    assert (found.category, found.action) == (category, action)
    assert word in found.reason


def test_silence_says_what_the_process_is_at():
    assert "stopped" in verdict.of_silence(0.3, "T").reason
    assert "blocked in the kernel" in verdict.of_silence(1.2, "D").reason
    assert "alive but silent" in verdict.of_silence(1.2, "R").reason


def test_two_retries_are_enough():
    retry = verdict.of_error(["RecoverableError"], "lost")
    past: list[Incident] = []
    for at in (0.0, 10.0):
        assert history.weigh(past, at, 1, 5, retry).action == verdict.RETRY
        history.record(past, at, 1, 5, retry)
    assert history.weigh(past, 20.0, 1, 5, retry).action == verdict.REPLACE
    assert history.weigh(past, 20.0, 2, 5, retry).action == verdict.RETRY, "another rank"
    assert history.weigh(past, 500.0, 1, 50, retry).action == verdict.RETRY, "long ago"


def test_the_same_error_that_names_other_ranks_and_addresses_ends_the_run_after_one_restart():
    def error(rank: int, address: str) -> verdict.Verdict:
        return verdict.of_error(["ValueError"], f"rank {rank}: sample 17 at {address} has no tokens")

    past: list[Incident] = []
    first = error(2, "0x7f11a0")
    assert history.weigh(past, 0.0, 2, 5, first).action == verdict.RESTART
    history.record(past, 0.0, 2, 5, first)
    assert history.weigh(past, 9.0, 3, 5, error(3, "0x7f99c8")).action == verdict.STOP
    other = verdict.of_error(["ValueError"], "the tokenizer is missing")
    assert history.weigh(past, 9.0, 3, 5, other).action == verdict.RESTART


def test_history_is_bounded():
    past: list[Incident] = []
    for at in range(1000):
        history.record(past, float(at), 0, at, verdict.of_exit(-9))
    assert len(past) <= 200 and past[-1].step == 999


def test_the_default_timeouts_fit_each_other():
    assert LIMITS.check() is LIMITS


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"silent_s": 2.0}, "silent_s = 2 s is not longer than stall_s = 10 s"),
        ({"agent_lost_s": 0.1}, "agent_lost_s = 0.1 s is not longer than agent_beat_s = 0.25 s"),
        ({"stall_s": 20.0}, "collective_s = 15 s is not longer than stall_s = 20 s"),
        ({"drain_s": 90.0}, "repair_s = 60 s is not longer than drain_s = 90 s"),
        ({"beat_s": 0.0}, "beat_s is 0.0"),
        ({"beat_s": "soon"}, "beat_s is 'soon'"),
    ],
)
def test_timeouts_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        replace(LIMITS, **changes).check()


def test_timeouts_follow_the_step_time():
    slow = LIMITS.calibrated(20.0)
    assert (slow.stall_s, slow.drain_s) == (70.0, 80.0)
    assert LIMITS.calibrated(None).stall_s == LIMITS.start_s
    assert slow.beat_s == LIMITS.beat_s


def view(doing="compute", since_s=0.0, step_s=0.1, done=False):
    return WorkerView(Beat(0.0, 0, 5, doing, since_s, "here", step_s, 0), 0.0, done)


def test_who_computes_while_others_wait_is_the_culprit():
    found = liveness.stalled({"a": view("wait", 30.0), "b": view("compute", 11.0), "c": view()}, LIMITS)
    assert [culprit.worker for culprit in found] == ["b"]
    assert found[0].limit_s == pytest.approx(10.3)


def test_the_age_of_a_beat_counts():
    beat = Beat(2.0, 0, 5, "compute", 5.0, "here", 0.1, 0)
    assert WorkerView(beat, 1.5).since_s == 8.5


def device_wait(since_s):
    """A worker whose collective is unfinished on its device."""
    return WorkerView(Beat(0.0, 0, 5, "wait", since_s, "tp, allreduce", 0.1, at_step_s=since_s), 0.0)


def test_who_has_not_begun_its_operation_on_the_device_is_the_culprit():
    views = {"a": device_wait(10.5), "b": view("compute", 10.4), "c": device_wait(10.5)}
    assert [culprit.worker for culprit in liveness.stalled(views, LIMITS)] == ["b"]
    assert liveness.at_a_standstill(views, LIMITS) == []


def test_nobody_is_accused_while_all_have_unfinished_operations_on_their_devices():
    views = {"a": device_wait(16.0), "b": device_wait(17.0)}
    assert liveness.stalled(views, LIMITS) == [] and liveness.endless(views, LIMITS) == []
    assert len(liveness.at_a_standstill(views, LIMITS)) == 2, "the epoch is closed: who does not leave it is replaced"


def silent_view(doing, since_s, age_s):
    return WorkerView(Beat(age_s, 0, 5, doing, since_s, "here", 0.1, 0, at_step_s=since_s), 0.2)


@pytest.mark.parametrize("doing", ["compute", "wait"])
def test_who_sends_no_heartbeats_is_not_believed_to_wait(doing):
    others = {"a": view("wait", 30.0), "b": view("wait", 30.0)}
    assert liveness.stalled({**others, "c": silent_view(doing, 0.05, 9.9)}, LIMITS) == [], "the lock is held for 10 s"
    (found,) = liveness.stalled({**others, "c": silent_view(doing, 0.05, 10.2)}, LIMITS)
    assert found.worker == "c" and "without heartbeats" in found.where
    assert liveness.at_a_standstill({**others, "c": silent_view("wait", 30.0, 2.0)}, LIMITS) == []
    assert liveness.at_a_standstill({**others, "c": silent_view("wait", 30.0, 0.5)}, LIMITS)


def at_step(seconds, doing="compute", step_s=2.0):
    return WorkerView(Beat(0.0, 0, 5, doing, 1.0, "step 6", step_s, 0, at_step_s=seconds), 0.0)


def test_a_step_that_does_not_end_is_noticed_if_nobody_waits_for_it():
    assert liveness.endless({"a": at_step(619.0), "b": at_step(3.0)}, LIMITS) == []
    (found,) = liveness.endless({"a": at_step(621.0), "b": at_step(3.0)}, LIMITS)
    assert (found.worker, found.limit_s) == ("a", 620.0)
    assert liveness.endless({"a": at_step(899.0, step_s=None)}, LIMITS) == [], "it may compile in its first step"
    assert liveness.endless({"a": at_step(901.0, step_s=None)}, LIMITS)
    assert liveness.endless({doing: at_step(999.0, doing) for doing in ("wait", "aside", "idle")}, LIMITS) == []


def test_a_standstill_needs_everybody():
    views = {"a": view("wait", 16.0), "b": view("wait", 17.0)}
    assert [c.worker for c in liveness.at_a_standstill(views, LIMITS)] == ["a", "b"]
    assert liveness.at_a_standstill({**views, "c": view()}, LIMITS) == []
    assert liveness.at_a_standstill({**views, "c": view("idle", done=True)}, LIMITS)
    assert liveness.at_a_standstill({"a": view("wait", 14.0)}, LIMITS) == []
    assert liveness.at_a_standstill({}, LIMITS) == []


def test_lost_agents_are_those_that_are_quiet_while_others_are_not():
    assert liveness.lost_agents(10.0, {"n0": 9.9, "n1": 4.0}, LIMITS) == [("n1", 6.0)]
    assert liveness.lost_agents(10.0, {"n0": 1.0, "n1": 4.0}, LIMITS) == []


def test_sources_take_the_newest_step_that_everybody_has():
    peers = {0: [0, 1], 1: [0, 1]}
    held = {0: Holdings([4, 5], {1: [4]})}
    step, found, _ = repairs.choose([0, 1], held, peers)
    assert step == 4 and found == {0: Source(0, 0), 1: Source(0, 0)}


def test_the_shard_of_a_lost_rank_may_be_elsewhere_than_its_replicated_state():
    peers = {rank: [0, 1, 2] for rank in range(3)}
    held = {0: Holdings([5], {}), 2: Holdings([5], {1: [5]})}
    assert repairs.choose(range(3), held, peers)[1][1] == Source(owned=2, replicated=0)


def test_a_whole_group_that_is_lost_comes_from_copies_elsewhere_if_those_are_complete():
    peers = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    held = {0: Holdings([5], {2: [5]}), 1: Holdings([4, 5], {3: [4, 5]})}
    step, found, _ = repairs.choose(range(4), held, peers, complete=[2, 3])
    assert step == 5 and found[2] == Source(0, 0) and found[3] == Source(1, 1)
    step, _, why = repairs.choose(range(4), held, peers, complete=[2])
    assert step is None and "rank(s) 3" in why


def test_no_source_says_who_lacks_what():
    step, found, why = repairs.choose([0, 1], {0: Holdings([5])}, {0: [0, 1], 1: [0, 1]})
    assert step is None and found == {} and why == "of step 5, nobody has all that logical rank(s) 1 need"
    assert repairs.choose([0], {}, {})[2] == "nobody holds a snapshot"


def node(rank, seats, standbys=0, devices=0, **changes):
    return Agent(m.AgentJoined(f"n{rank}", rank, "host", seats, standbys, devices=devices), 0.0, seats, **changes)


@pytest.mark.parametrize(
    "agents, ranks",
    [
        ([node(0, 2), node(1, 2)], {"n0": [0, 1], "n1": [2, 3]}),
        ([node(0, 2), node(1, 2, gone="dead"), node(2, 0, 2)], {"n0": [0, 1], "n2": [2, 3]}),
        ([node(0, 2), node(1, 2, suspect="bad"), node(2, 0, 2)], {"n0": [0, 1], "n2": [2, 3]}),
        ([node(0, 2), node(1, 2, suspect="bad")], {"n0": [0, 1], "n1": [2, 3]}),
        ([node(0, 2, 2), node(1, 2, gone="dead")], {"n0": [0, 1, 2, 3]}),
        ([node(0, 2, 1), node(1, 2, gone="dead")], None),
        ([node(0, 2, 2, devices=2), node(1, 2, gone="dead")], None),
        ([node(0, 2, 2, devices=4), node(1, 2, gone="dead")], {"n0": [0, 1, 2, 3]}),
        ([node(0, 4, 1, devices=4, unusable={1: "broken"})], None),
        ([node(0, 2, 1, devices=2, unusable={1: "broken"}), node(1, 2, 1, devices=3)], {"n0": [0], "n1": [1, 2, 3]}),
    ],
)
def test_ranks_of_a_restart_go_to_sound_nodes_first_and_to_no_more_than_have_devices(agents, ranks):
    assert place_ranks(agents, 4) == ranks


def test_the_whole_state_goes_through_json():
    world = World(standbys=2).run()
    world.kill(1)
    world.release(0)
    world.fail(0, "RecoverableError")
    text = json.dumps(to_json(world.state))
    assert from_json(ControlState, json.loads(text)) == world.state


def test_a_loop_knows_when_it_did_not_run():
    pauses = OwnPauses(0.25)
    assert pauses.look(100.0) == 0.0, "nothing is known about the time before the first look"
    assert [pauses.look(at) for at in (100.25, 101.5, 125.5, 125.75, 128.75)] == [0.0, 0.0, 24.0, 0.0, 3.0]
    assert pauses.since(100.0) == pauses.since(101.5) == 27.0
    assert pauses.since(115.5) == 13.0 and pauses.since(125.5) == 3.0 and pauses.since(128.75) == 0.0


def test_ranks_are_numbers_in_a_message_and_names_of_fields_in_its_json():
    seat = {"worker": "n0.w3", "node": "n0", "address": "h:1", "local_rank": 3, "domains": {}}
    text = json.dumps({"kind": "Open", "epoch": 2, "seats": {"3": seat}, "joiners": [3], "fresh": False})
    order = m.decode(text)
    assert order.seats == {3: Seat("n0.w3", "n0", "h:1", 3)}
    assert json.loads(m.encode(order))["seats"] == {"3": seat}
    for wrong in ("three", "3.0", ""):
        with pytest.raises(m.BadMessage, match="seats"):
            m.decode(text.replace('"3": {', f'"{wrong}": {{'))


def test_where_nodes_stand_is_in_every_map_and_who_held_which_copy_in_every_repair():
    world = World(nodes=2, standby_nodes=1)
    for i, (node, standbys) in enumerate(world.standbys_of.items()):
        seats = world.seats_per_node if i < 2 else 0
        world.say(m.AgentJoined(node, i, f"host{i}", seats, standbys, domains={"rack": f"r{i}"}))
    world.begin(world.start_workers())
    for rank in range(4):
        world.say(m.Observed("layout", {"copies": {str(rank): [(rank + 2) % 4]}}))
    orders = world.kill(2)
    seats = opened(orders).seats
    assert {rank: seat.domains["rack"] for rank, seat in seats.items() if rank < 2} == {0: "r0", 1: "r0"}
    world.release(0, 1, 3)
    repair = only(world.arrive(), m.Repair)
    assert repair.copies == {0: [2], 1: [3], 2: [0], 3: [1]}
    assert m.decode(m.encode(repair)) == repair


def test_reports_may_come_twice():
    world, twice = World().run(), World().run()

    def doubled(*reports, say=twice.say):
        return [order for report in reports for order in say(report) + say(report)]

    twice.say = doubled
    for one in (world, twice):
        one.kill(2)
        one.recover()
    assert kinds(world.orders) == kinds(twice.orders)
    assert twice.state.phase == RUNNING and twice.state.epoch == 1


def full(nodes=2, standbys=1, more=0, **how):
    """Return a training run of 4 workers, on nodes with a device for each of their workers and ``more`` others."""
    return World(4, nodes, standbys, devices=4 // nodes + more, **how).run()


def devices(orders, ranks=range(4)):
    return [opened(orders).seats[rank].local_rank for rank in ranks]


def test_a_device_that_is_never_released_is_given_up_for_another():
    world = full(nodes=1, more=1, standbys=2)
    world.state.agents["n0"].unusable[4] = "it is broken"
    assert "Open" not in kinds(world.say(m.WorkerSilent(world.worker(1), "n0", 0.3, "D")))
    orders = world.wait(LIMITS.device_s + 1)
    assert "n0.w1 has not released it within" in world.events("device_unusable")[0]["reason"]
    assert "cannot hold" in only(orders, m.Stop).message
    assert LIMITS.device_s > FREE_S, "an agent that still looks at the device is not overdue"


def test_an_unsound_device_is_not_used_again():
    world = full(nodes=1, more=1)
    world.state.agents["n0"].held["earlier"] = Hold(4, world.now)
    world.kill(2)
    assert not world.say(m.DeviceReleased("n0.w2", "n0", 2, "the driver asks for a reset"))
    assert devices(world.say(m.DeviceReleased("earlier", "n0", 4))) == [0, 1, 4, 3]
    assert world.events("device_unusable") == [
        {"node": "n0", "device": 2, "reason": "the driver asks for a reset"},
    ]
