"""The control plane's decisions, driven by hand-made histories: who said what, when, and what has to follow."""

import pytest

from ft import events
from ft import messages as m
from ft.control.controller import decide
from ft.control.state import CLOSED, ENDED, GATHERING, OPENED, REPAIRING, RUNNING, Options, State

DP_PEERS = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
NEXT = {0: 1, 1: 0, 2: 3, 3: 2}
"""Who holds whose copy in a grid of PP 2 x DP 2."""


class Story:
    """Plays agents and workers of one run; ``tell`` gives the decision, ``after`` lets time pass."""

    def __init__(self, standbys: int = 1, nodes: int = 1, max_restarts: int = 2):
        self.now = 100.0
        self.standbys, self.nodes = standbys, nodes
        self.state = State(Options(nodes=nodes, world_size=4, max_restarts=max_restarts))
        self.count = {f"n{i}": 0 for i in range(nodes)}
        per_node = 4 // nodes
        for i in range(nodes):
            self.tell(m.AgentJoined(f"n{i}", i, "host", per_node, standbys))

    def tell(self, *reports):
        """Says all of it at once; returns orders and events together."""
        orders, said, reasons = [], [], []
        for report in reports:
            decision = decide(self.state, self.now, report)
            orders += decision.orders
            said += decision.events
            reasons += decision.reasons
        check_events(said)
        self.orders, self.said, self.reasons = orders, said, reasons
        return [type(order).__name__ for order in orders]

    def after(self, seconds: float, beating: bool = True):
        """``seconds`` pass, in steps of a heartbeat; returns the names of the orders given meanwhile."""
        names, orders, said, reasons, end = [], [], [], [], self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            for report in [m.AgentBeat(node) for node in self.count] if beating else [None]:
                names += self.tell(report)
                orders, said, reasons = orders + self.orders, said + self.said, reasons + self.reasons
        self.orders, self.said, self.reasons = orders, said, reasons
        return names

    def start(self, node: str = "n0", rank: int | None = None, ready: bool = True) -> str:
        name = f"{node}.w{self.count[node]}"
        self.count[node] += 1
        self.tell(m.WorkerStarted(name, node, 1000 + self.count[node], rank))
        self.opening = self.tell(m.WorkerReady(name, node, "host:1")) if ready else []
        return name

    def running(self, step: int = 10) -> "Story":
        """Four workers train, and the standbys are ready."""
        for rank in range(4):
            self.start(f"n{rank * self.nodes // 4}", rank)
        for rank, name in self.state.seats.items():
            self.tell(m.Observed("layout", {"dp_peers": {rank: DP_PEERS[rank]}, "shards": {rank: [f"shard {rank}"]}}))
            self.tell(m.WorkerResumed(name, 0, 0))
        for node in self.count:
            for _ in range(self.standbys):
                self.start(node)
        self.step = step
        return self

    def worker(self, rank: int) -> str:
        return self.state.seats[rank]

    def dies(self, rank: int, code: int = -9):
        name = self.worker(rank)
        return self.tell(m.WorkerExited(name, name.split(".")[0], code, True))

    def leave(self, *ranks: int, steps=None):
        """Workers of these logical ranks leave the closed epoch with snapshots of the last two steps."""
        names = []
        for rank in ranks:
            held = steps or [self.step - 1, self.step]
            copies = {str(owner): held for owner, holder in NEXT.items() if holder == rank}
            closed = self.state.epoch if self.state.phase == CLOSED else self.state.epoch - 1
            names += self.tell(m.WorkerReleased(self.worker(rank), closed, self.step, [], m.Holdings(held, copies)))
        return names

    def arrive(self, *ranks: int):
        return [n for rank in ranks for n in self.tell(m.WorkerArrived(self.worker(rank), self.state.epoch, []))]

    def repaired(self, *ranks: int, **changes):
        names = []
        for rank in ranks:
            values = {
                "worker": self.worker(rank),
                "epoch": self.state.epoch,
                "rank": rank,
                "step": self.state.repair.step,
                "topology": "t",
                "shards": [f"shard {rank}"],
                "sources": {"owned": "own"},
            }
            values |= {"rebuilt": 3, "kept": 2, "deferred": 1, "rebuild_s": 0.1, "restore_s": 0.1}
            names += self.tell(m.WorkerRepaired(**(values | changes)))
        return names

    def resume(self):
        return [
            n for name in list(self.state.seats.values()) for n in self.tell(m.WorkerResumed(name, self.state.epoch, 9))
        ]


def check_events(said) -> None:
    for name, values in said:
        events.check(events.observed(name, {"wall": 0.0, "monotonic": 0.0, **values}))


def test_the_first_epoch_opens_when_every_logical_rank_has_a_worker():
    story = Story()
    for rank in range(3):
        story.start(rank=rank)
        assert story.opening == []
    story.start(rank=3)
    assert story.opening == ["Open"] and story.orders[0].fresh and story.orders[0].epoch == 0


def test_standbys_are_started_only_when_training_runs():
    story = Story(standbys=2)
    for rank in range(4):
        story.start(rank=rank)
    said = [story.tell(m.WorkerResumed(story.worker(rank), 0, 0)) for rank in range(4)]
    assert said == [[], [], [], ["Spawn"]] and story.orders[0].count == 2


def test_a_death_with_a_ready_standby_is_one_decision():
    story = Story().running()
    assert story.dies(2) == ["Close", "Open"]
    opened = story.orders[1]
    assert opened.joiners == [2] and opened.seats["2"].worker == "n0.w4" and not opened.fresh
    assert opened.seats["2"].local_rank == 2
    assert "SIGKILL" in story.reasons[0]


def test_a_whole_recovery():
    story = Story().running()
    story.dies(2)
    assert story.leave(0, 1, 3) == [] and story.state.phase == OPENED
    assert story.arrive(2) == ["Repair"]
    repair = story.orders[0]
    assert repair.step == 10 and repair.sources["2"] == m.Source(owned=3, replicated=3)
    assert repair.sources["0"] == m.Source(0, 0)
    assert story.repaired(0, 1, 2) == [] and story.repaired(3) == ["Resume"]
    assert story.resume() == ["Spawn"] and story.state.phase == RUNNING


def test_the_newest_step_that_everyone_has_is_restored():
    story = Story().running()
    story.dies(2)
    story.leave(0, 1)
    story.leave(3, steps=[8, 9])
    assert story.arrive(2) == ["Repair"] and story.orders[0].step == 9


def test_without_a_standby_one_is_started_and_then_seated():
    story = Story(standbys=0).running()
    assert story.dies(1) == ["Close", "Spawn"]
    story.start()
    assert story.opening == ["Open"] and story.worker(1) == "n0.w4"


def test_a_spawned_worker_that_never_comes_ends_in_a_warm_restart():
    story = Story(standbys=0).running()
    story.dies(1)
    story.leave(0, 2, 3)
    assert "Restart" in story.after(200)


def test_two_deaths_one_after_the_other_are_one_recovery():
    story = Story(standbys=2).running()
    assert story.dies(0) == ["Close", "Open"]
    assert story.dies(3) == ["Close", "Open"] and story.state.epoch == 2
    assert story.orders[1].joiners == [0, 3]
    story.leave(1, 2)
    assert story.arrive(0, 3) == ["Repair"]


def test_a_death_during_repair_opens_another_epoch():
    story = Story(standbys=2).running()
    story.dies(0)
    story.leave(1, 2, 3)
    story.arrive(0)
    assert story.state.phase == REPAIRING
    assert story.dies(2) == ["Close", "Open"]
    assert set(story.orders[1].joiners) == {0, 2}, "rank 0 never got its state: it still needs it"


def test_a_joiner_that_dies_is_replaced():
    story = Story(standbys=2).running()
    story.dies(0)
    assert story.dies(0) == ["Close", "Open"] and story.worker(0) == "n0.w5"


def test_an_idle_standby_that_dies_is_replaced_without_an_epoch():
    story = Story().running()
    names = story.tell(m.WorkerExited("n0.w4", "n0", -9, True))
    assert names == ["Spawn"] and story.state.phase == RUNNING and story.state.epoch == 0


def test_a_hung_worker_is_killed_and_replaced():
    story = Story().running()
    assert story.tell(m.WorkerSilent("n0.w1", "n0", 0.4, "T")) == ["Kill", "Close", "Open"]
    assert story.orders[0].worker == "n0.w1" and "stopped" in story.reasons[0]
    assert story.tell(m.WorkerExited("n0.w1", "n0", -9, True)) == [], "its end was ordered"


def beats(story, epoch=0, **doing):
    """Heartbeats: ``w0=("compute", 3.0)``; the others wait."""
    found = {}
    for rank, name in story.state.seats.items():
        what, since = doing.get(f"w{rank}", ("wait", 0.5))
        found[name] = m.Beat(0.0, epoch, 10, what, since, where="step 11", step_s=0.1)
    return m.AgentBeat("n0", found)


def test_who_computes_while_the_others_wait_is_hung():
    story = Story().running()
    assert story.tell(beats(story, w1=("compute", 1.0))) == []
    assert story.tell(beats(story, w1=("compute", 30.0))) == ["Kill", "Close", "Open"]
    assert story.orders[0].worker == "n0.w1"


def test_who_saves_while_the_others_wait_is_not_hung():
    story = Story().running()
    assert story.tell(beats(story, w1=("aside", 30.0))) == []


def test_all_waiting_for_long_is_a_broken_connection():
    story = Story().running()
    waiting = {f"w{rank}": ("wait", 60.0) for rank in range(4)}
    assert story.tell(beats(story, **waiting)) == ["Close", "Open"]
    assert story.orders[1].joiners == []


def test_a_lost_connection_with_nobody_dead_is_recovered_in_place():
    story = Story().running()
    assert story.tell(m.WorkerSuspects("n0.w0", 0, "g", "Connection reset")) == []
    assert story.after(1.0) == ["Close", "Open"]
    assert story.orders[1].joiners == [] and "in place" in story.reasons[0]


def test_the_death_behind_a_lost_connection_is_the_cause():
    story = Story().running()
    story.tell(m.WorkerSuspects("n0.w0", 0, "g", "Connection reset"))
    assert story.dies(1) == ["Close", "Open"] and story.orders[1].joiners == [1]
    assert story.after(1.0) == []


def failed(story, rank: int, *kinds: str, message: str = "what"):
    return story.tell(m.WorkerFailed(story.worker(rank), story.state.epoch, 10, [*kinds, "Exception"], message))


def recover_in_place(story):
    story.leave(0, 1, 2, 3)
    story.repaired(0, 1, 2, 3)
    story.resume()


def test_a_transient_exception_twice_in_place_then_the_worker_is_replaced():
    story = Story().running()
    for _ in range(2):
        assert failed(story, 1, "RecoverableError") == ["Close", "Open"]
        assert story.orders[1].joiners == []
        recover_in_place(story)
    assert failed(story, 1, "RecoverableError") == ["Kill", "Close", "Open"]
    assert story.orders[2].joiners == [1] and "no longer taken for transient" in story.reasons[0]


@pytest.mark.parametrize(
    ("kinds", "message", "orders"),
    [
        (["ReplaceNodeError"], "bad node", ["Kill", "Close", "Open"]),
        (["AcceleratorError", "RuntimeError"], "CUDA error: uncorrectable ECC error", ["Kill", "Close", "Open"]),
        (["OutOfMemoryError", "RuntimeError"], "CUDA out of memory", ["Kill", "Close", "Open"]),
        (["OSError"], "[Errno 28] No space left on device", ["Kill", "Close", "Open"]),
        (["DistNetworkError", "RuntimeError"], "Connection reset", ["Close", "Open"]),
        (["ValueError"], "shapes differ", ["Close", "Restart"]),
        (["FallbackError"], "no copy is sound", ["Close", "Restart"]),
        (["UserError"], "no such flag", ["Stop"]),
    ],
)
def test_what_an_exception_asks_for(kinds, message, orders):
    story = Story().running()
    assert failed(story, 1, *kinds, message=message) == orders


def test_the_same_software_error_at_the_same_step_again_ends_the_run():
    story = Story().running()
    assert failed(story, 1, "ValueError") == ["Close", "Restart"]
    for rank in range(4):
        story.start(rank=rank)
    assert failed(story, 1, "ValueError") == ["Stop"]
    assert story.orders[0].code == 1 and "same error" in story.orders[0].message


def test_both_copies_lost_ends_in_a_warm_restart():
    story = Story(standbys=2).running()
    story.dies(2)
    story.dies(3)
    story.leave(0, 1)
    assert story.arrive(2, 3) == ["Close", "Restart"] and "both copies lost" in " ".join(story.reasons)
    assert story.state.phase == GATHERING and story.orders[1].ranks == {"n0": [0, 1, 2, 3]}


def test_warm_restarts_are_limited():
    story = Story(max_restarts=0).running()
    assert failed(story, 1, "ValueError") == ["Stop"] and "--max-restarts" in story.orders[0].message


def test_a_lost_node_loses_all_its_workers_together():
    story = Story(nodes=2, standbys=2).running()
    lost = {f"n1.w{i}" for i in range(4)}
    for _ in range(40):
        story.now += 0.25
        if "Open" in story.tell(m.AgentBeat("n0")):
            break
    opened = story.orders[-1]
    assert opened.joiners == [2, 3] and not lost & {seat.worker for seat in opened.seats.values()}
    assert {seat.node for seat in opened.seats.values()} == {"n0"}


def test_a_survivor_that_does_not_leave_is_killed_and_replaced():
    story = Story(standbys=2).running()
    story.dies(0)
    story.leave(1, 2)
    names = story.after(60)
    assert names[:3] == ["Kill", "Close", "Open"] and story.orders[0].worker == "n0.w3"
    assert set(story.orders[2].joiners) == {0, 3}


@pytest.mark.parametrize(
    ("changes", "invariant"),
    [
        ({"topology": "other"}, "I1"),
        ({"shards": ["shard 0"]}, "I2"),
        ({"sources": {}}, "I3"),
        ({"step": 7}, "I4"),
    ],
)
def test_a_violated_invariant_ends_the_run_loudly(changes, invariant):
    story = Story().running()
    story.dies(2)
    story.leave(0, 1, 3)
    story.arrive(2)
    story.repaired(0, 1, 2)
    assert story.repaired(3, **changes) == ["Stop"]
    assert invariant in story.orders[0].message and story.orders[0].code == 1


def test_stale_and_repeated_reports_change_nothing():
    story = Story().running()
    exited = m.WorkerExited(story.worker(2), "n0", -9, True)
    story.tell(exited)
    epoch = story.state.epoch
    assert story.tell(exited, exited) == []
    assert story.tell(m.WorkerFailed("n0.w0", 0, 10, ["ValueError"], "late")) == []
    assert story.tell(m.WorkerSuspects("n0.w0", 0, "g", "late"), m.WorkerResumed("n0.w0", 0, 3)) == []
    assert story.tell(m.WorkerArrived("n0.w4", 0, []), m.WorkerExited("nobody", "n0", 1, True)) == []
    assert story.state.epoch == epoch


def test_the_run_ends_when_all_are_done():
    story = Story().running()
    assert [story.tell(m.WorkerDone(story.worker(rank), 0, 12)) for rank in range(4)] == [[], [], [], ["Finish"]]
    assert story.state.phase == ENDED and story.dies(1, 0) == []


def test_a_death_while_others_are_done_is_recovered():
    story = Story().running()
    for rank in range(3):
        story.tell(m.WorkerDone(story.worker(rank), 0, 12))
    assert story.dies(3) == ["Close", "Open"]
    assert not any(story.state.workers[name].done for name in story.state.seats.values())


def test_a_signal_ends_the_run_with_its_code():
    story = Story().running()
    assert story.tell(m.AgentLeaving("n0", 15)) == ["Stop"] and story.orders[0].code == 143


def test_a_script_that_never_attaches_has_torchruns_rules():
    story = Story()
    for rank in range(4):
        story.start(rank=rank, ready=False)
    assert [story.tell(m.WorkerExited(f"n0.w{i}", "n0", 0, False)) for i in range(4)] == [[], [], [], ["Finish"]]
    other = Story()
    for rank in range(4):
        other.start(rank=rank, ready=False)
    assert other.tell(m.WorkerExited("n0.w1", "n0", 3, False)) == ["Stop"] and other.orders[0].code == 3
