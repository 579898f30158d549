"""Hot-swap inside replicas: a standby takes the place of a lost worker, and its replica does not leave the quorum."""

import pytest
import replica_runs
from replica_runs import Done, all_injected, together, train

from ft.base import events

DISTRIBUTED = "--use-distributed-optimizer"
STEPS = 12
LONG = pytest.mark.long
ALL = frozenset(range(3))


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> list[float]:
    """The losses of a run without a fault."""
    flags = replica_runs.flags(corpus, f"{DISTRIBUTED} --ft-hot-swap", STEPS)
    how = {"replicas": 3, "nproc": 6, "options": "--standby 1", "good": together(STEPS)}
    done = train(tmp_path_factory.mktemp("undisturbed") / "run", flags, **how)
    done.check(STEPS, 0)
    return done.losses_of(0)


def recovered(corpus, folder, faults: str, failures: int, standbys: int = 1, **how) -> Done:
    flags = replica_runs.flags(corpus, f"{DISTRIBUTED} --ft-hot-swap", STEPS)
    options = f"--standby {standbys} --inject {faults}"
    done = train(folder / "run", flags, replicas=3, nproc=6, options=options, **how)
    done.check(STEPS, failures)
    return done


@pytest.mark.parametrize(
    ("fault", "replica"),
    [
        pytest.param("kill@replica=1:step=5:rank=0:phase=forward", 1, marks=LONG),
        pytest.param("kill@replica=1:step=5:rank=1:phase=forward", 1, marks=LONG),
        pytest.param("kill@replica=1:step=5:rank=0:phase=reduce", 1, marks=LONG),
        ("kill@replica=1:step=5:rank=1:phase=reduce", 1),
        ("hang@replica=2:step=6:rank=1:phase=backward", 2),
    ],
)
def test_a_standby_replaces_a_worker_of_a_replica_and_no_step_is_done_without_the_replica(
    fault, replica, corpus, undisturbed, tmp_path
):
    done = recovered(corpus, tmp_path, fault, failures=0, good=together(STEPS))
    assert len(done.injected()) == 1 and not done.of(replica, events.RESTARTED), done.explain()
    assert len(done.of(replica, events.RESUMED)) == 2, done.explain()
    assert all(frozenset(step.commit.healthy) == ALL for step in done.proof.lineage.steps), done.explain()
    for other in ALL - {replica}:
        assert done.losses_of(other) == undisturbed, done.explain()


def test_a_replica_whose_copies_are_a_step_older_catches_up_without_a_restart(corpus, tmp_path):
    fault = "kill@replica=1:step=5:rank=0:phase=optimizer"  # the others commit the step
    done = recovered(corpus, tmp_path, fault, failures=1)
    assert len(done.injected()) == 1 and not done.of(1, events.RESTARTED), done.explain()


@pytest.mark.parametrize(
    ("faults", "standbys", "failures"),
    [
        ("kill@replica=1:step=5:rank=0:phase=forward,kill@replica=1:step=4:rank=1:phase=leave", 1, 2),
        ("kill@replica=1:step=5:rank=1:phase=forward", 0, 1),
    ],
    ids=["without a copy", "without a standby"],
)
def test_a_replica_that_cannot_be_repaired_is_restarted_as_a_whole(faults, standbys, failures, corpus, tmp_path):
    slow = "slow@replica=0:step=2:rank=0:factor=2:for=300s"
    done = recovered(corpus, tmp_path, f"{faults},{slow}", failures, standbys)
    assert done.injected() and done.of(1, events.RESTARTED), done.explain()


def lost_with_its_copy(replica: int, step: int, rank: int) -> str:
    """The copy of each rank's state is at the next rank, which dies before it can send it."""
    where = f"kill@replica={replica}:step={step}"
    return f"{where}:rank={rank}:phase=forward,{where}:rank={rank + 1}:phase=rebuild"


@pytest.mark.parametrize(
    ("lost", "again"),
    [
        pytest.param(0, "", marks=LONG),
        (1, ""),
        pytest.param(0, ",kill@replica=1:step=5:rank=1:phase=resume", marks=LONG),
    ],
    ids=["the first rank", "another rank", "and one dies before the others have a copy of what it has not"],
)
def test_a_replica_that_has_lost_a_ranks_copies_takes_the_state_of_another_one_in_place(lost, again, corpus, tmp_path):
    flags = replica_runs.flags(corpus, f"{DISTRIBUTED} --ft-hot-swap", 40)
    faults = lost_with_its_copy(1, 5, lost) + again
    slow = "slow@replica=0:step=2:rank=0:factor=2:for=300s"
    how = {"options": f"--standby 2 --inject {faults},{slow}", "good": all_injected(3 + bool(again))}
    done = train(tmp_path / "run", flags, replicas=2, nproc=6, **how)
    done.check(40, 2)
    assert len(done.injected()) == 3 + bool(again) and not done.of(1, events.RESTARTED), done.explain()
    assert "another replica" in [repair.detail["level"] for repair in done.of(1, events.REPAIR_ORDERED)], done.explain()
    assert done.of(1, events.CAUGHT_UP), done.explain()


def test_replicas_that_have_all_lost_a_ranks_copies_load_the_checkpoint_in_place(corpus, tmp_path):
    steps, flags = 14, replica_runs.flags(corpus, f"{DISTRIBUTED} --ft-hot-swap --save {tmp_path}/save", 14)
    faults = [lost_with_its_copy(replica, 9, 1) for replica in range(2)]
    how = {"options": f"--standby 2 --inject {','.join(faults)}", "good": all_injected(4)}
    done = train(tmp_path / "run", f"{flags} --save-interval 4", replicas=2, nproc=6, **how)
    done.check(steps, 3)
    assert len(done.injected()) == 4, done.explain()
    assert not any(done.of(replica, events.RESTARTED) for replica in range(2)), done.explain()
    loaded = ["iter_0000008 in" in done.logs_of(replica) for replica in range(2)]
    assert any(loaded), done.explain()  # the other one may find that a state is there by then
    assert all(loaded[replica] or done.of(replica, events.CAUGHT_UP) for replica in range(2)), done.explain()
