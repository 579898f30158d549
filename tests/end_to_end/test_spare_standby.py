"""Hot-swap inside SPARe's groups: a standby takes a lost worker's place; only without one are stacks reordered."""

import pytest
import replica_runs
from replica_runs import Done, train

from ft.base import events

STEPS, ALL = 16, (0, 1, 2)
FLAGS = "--use-distributed-optimizer --ft-hot-swap"
LONG = pytest.mark.long


def recovered(corpus, folder, faults: list[str], flags: str = FLAGS, standbys: int = 1) -> Done:
    given = replica_runs.flags(corpus, flags, STEPS)
    options = f"--ft-spare-redundancy 2 --standby {standbys}" + (f" --inject {','.join(faults)}" if faults else "")
    done = train(folder, given, replicas=3, nproc=6, options=options)
    done.check(STEPS, 1)
    return done


def kill(rank: int, phase: str, replica: int = 1, step: int = 6) -> str:
    return f"kill@replica={replica}:step={step}:rank={rank}:phase={phase}"


def orders(done: Done) -> list[tuple]:
    """Which groups trained each step, S, and which types were computed in addition."""
    commits = [step.commit for step in done.proof.lineage.steps]
    return [(each.healthy, each.behind, each.stack, each.patch) for each in commits]


UNDISTURBED = [(ALL, (), 1, ())] * STEPS


@pytest.mark.long
def test_with_a_standby_no_stack_is_reordered_and_no_bit_changes(corpus, tmp_path):
    plain = recovered(corpus, tmp_path / "plain", [])
    done = recovered(corpus, tmp_path / "run", [kill(1, "reduce")])
    assert not done.of(1, events.RESTARTED) and len(done.of(1, events.RESUMED)) == 2, done.explain()
    (restored,) = done.of(1, events.STATE_RESTORED)
    if restored.step < 5:
        pytest.skip("the copy of step 5 was late, so the group was a step behind, and the others did its part")
    assert orders(done) == UNDISTURBED, done.explain()
    assert done.losses_of(0) == plain.losses_of(0), done.explain()


def test_two_groups_that_lose_a_worker_in_one_step_are_both_repaired(corpus, tmp_path):
    done = recovered(corpus, tmp_path / "run", [kill(1, "backward"), kill(0, "backward", replica=2)])
    for replica in (1, 2):
        assert not done.of(replica, events.RESTARTED) and len(done.of(replica, events.RESUMED)) == 2, done.explain()


@pytest.mark.parametrize(
    ("faults", "standbys"),
    [
        pytest.param([kill(0, "forward"), kill(1, "leave", step=5)], 1, id="no copy"),
        pytest.param([kill(1, "forward"), kill(0, "restore")], 1, id="while it is repaired", marks=LONG),
    ],
)
def test_if_a_standby_does_not_help_the_others_do_the_groups_part(faults, standbys, corpus, tmp_path):
    slow = "slow@replica=0:step=2:rank=0:factor=2:for=300s"
    done = recovered(corpus, tmp_path / "run", [*faults, slow], standbys=standbys)
    assert done.of(1, events.RESTARTED) + done.of(1, events.CAUGHT_UP), done.explain()
    without = [(stack, patch) for healthy, _behind, stack, patch in orders(done) if healthy == (0, 2)]
    assert (1, (1,)) in without or orders(done)[5][0] == ALL, f"nobody computes the lost group's type\n{done.explain()}"


@LONG
def test_a_flipped_bit_beside_a_replaced_worker_costs_no_sample(corpus, tmp_path):
    flip = "bit-flip@replica=0:step=9:rank=1:operator=mm:phase=backward"
    done = recovered(corpus, tmp_path / "run", [kill(1, "reduce"), flip], f"{FLAGS} --ft-dmr piggyback")
    assert [event.step for event in done.of(0, events.DMR_MISMATCH)] == [9], done.explain()
    assert not done.of(1, events.RESTARTED), done.explain()
