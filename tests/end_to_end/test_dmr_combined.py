"""DMR together with other protections: in replicas, with SPARe's stacks, and with CheckFree+."""

import ft_runs
import pytest
from replica_runs import flags, together, train
from test_hsdp_run import DISTRIBUTED

from ft.base import events

DOUBLE = "--ft-dmr piggyback"
STAGES = "--pipeline-model-parallel-size 2 --overlap-grad-reduce --use-distributed-optimizer"


def flip(replica: int, step: int, rank: int, what: str) -> str:
    return f"bit-flip@replica={replica}:step={step}:rank={rank}:{what}"


def test_flips_in_replicas_change_no_bit_of_any_replica(corpus, tmp_path):
    """Each is found before gradients leave the replica, in operators, in a message and in the other replica as well."""
    faults = [
        flip(0, 4, 0, "operator=mm:phase=forward"),
        flip(1, 4, 1, "operator=mm:phase=backward"),
        flip(1, 7, 1, "operator=p2p"),
    ]
    how = {"replicas": 2, "nproc": 4, "good": together(12)}
    plain = train(tmp_path / "plain", flags(corpus, STAGES), **how)
    done = train(tmp_path / "run", flags(corpus, f"{STAGES} {DOUBLE}"), options=f"--inject {','.join(faults)}", **how)
    done.check(12, 0)
    for replica in (0, 1):
        assert done.losses_of(replica) == plain.losses_of(replica), done.explain()
        clean = [event.step for event in done.of(replica, events.DMR_CLEAN)]
        assert clean == ([4] if replica == 0 else [4, 7]), done.explain()
    digests = {commit.step: commit.digest for commit in plain.proof.lines[0]}
    assert {commit.step: commit.digest for commit in done.proof.lines[1]} == digests, done.explain()


@pytest.mark.long
def test_what_is_wrong_when_gradients_are_sent_makes_one_replica_catch_up(corpus, tmp_path):
    """A wrong optimizer operator, a device that is always wrong, and a model that differs without any operator."""
    faults = [
        flip(1, 4, 0, "operator=sqrt:phase=optimizer"),
        "corrupt-tensor@replica=2:step=8:rank=0",
        flip(0, 12, 0, "operator=mm:mode=stuck:phase=backward"),
    ]
    done = train(
        tmp_path / "run",
        flags(corpus, f"{DISTRIBUTED} {DOUBLE}", 40),
        replicas=3,
        nproc=3,
        options=f"--inject {','.join(faults)},slow@replica=1:step=13:rank=0:factor=2:for=300s",
    )
    done.check(40, 3)
    said = done.output + done.logs_of(1) + done.logs_of(2)
    assert "step 4 was computed wrongly after its gradients were sent" in done.logs_of(1), done.explain()
    assert "the model of members 2 differs from that of the majority" in said, done.explain()
    assert "replica 2 drops its state" in done.logs_of(2), done.explain()
    caught_up = {replica: [event.step for event in done.of(replica, events.CAUGHT_UP)] for replica in (1, 2)}
    assert caught_up == {1: [5], 2: [8]}, done.explain()
    (evicted,) = [event for event in done.of(0, events.DMR_VERDICT) if event.detail["action"] == "evict"]
    assert evicted.step == 12 and evicted.detail["blamed"] == [0], done.explain()


def test_hot_swap_inside_replicas_replaces_a_killed_worker_and_one_that_computes_wrongly(corpus, tmp_path):
    faults = [
        flip(0, 3, 1, "operator=mm:phase=forward"),
        "kill@replica=1:step=5:rank=1:phase=backward",
        flip(0, 8, 0, "operator=mm:mode=stuck:phase=backward"),
    ]
    how = {"replicas": 2, "nproc": 4, "good": together(12)}
    plain = train(tmp_path / "plain", flags(corpus, DISTRIBUTED, batch=8), **how)
    wanted = flags(corpus, f"{DISTRIBUTED} --ft-hot-swap {DOUBLE}", batch=8)
    done = train(tmp_path / "run", wanted, options=f"--standby 1 --inject {','.join(faults)}", **how)
    done.check(12, 0)
    for replica in (0, 1):
        assert done.losses_of(replica) == plain.losses_of(replica), done.explain()
        assert not done.of(replica, events.RESTARTED) and len(done.of(replica, events.EPOCH_OPENED)) == 2, (
            done.explain()
        )
    assert together(12)(done), done.explain()


@pytest.mark.long
def test_a_flip_and_a_lost_group_in_one_step_of_spare_cost_no_sample(corpus, tmp_path):
    faults = ["kill@replica=2:step=5:rank=0:phase=backward", flip(1, 5, 0, "operator=mm:phase=backward")]
    spare, how = "--ft-spare-redundancy 2", {"replicas": 3, "nproc": 3}
    plain = train(tmp_path / "plain", flags(corpus, DISTRIBUTED), options=spare, **how)
    done = train(
        tmp_path / "run",
        flags(corpus, f"{DISTRIBUTED} {DOUBLE}"),
        options=f"{spare} --inject {','.join(faults)}",
        **how,
    )
    done.check(12, 0)
    # While the group is away, the sums have another order, and how many steps that takes is not fixed.
    assert done.losses() == pytest.approx(plain.losses(), rel=1e-5), done.explain()
    assert any(event.step == 5 for event in done.of(1, events.DMR_MISMATCH)), done.explain()


def test_flips_on_routes_with_swapped_stages_change_no_bit(corpus, tmp_path):
    plus = "--use-distributed-optimizer --pipeline-model-parallel-size 4 --ft-hot-swap --ft-checkfree-plus"
    faults = "bit-flip@step=3:rank=2:operator=p2p,bit-flip@step=4:rank=1:operator=mm:phase=backward"
    plain = ft_runs.ft_run(tmp_path / "plain", ft_runs.flags(corpus, plus), standby=0)
    done = ft_runs.ft_run(
        tmp_path / "run", ft_runs.flags(corpus, f"{plus} {DOUBLE}"), standby=0, options=f"--inject {faults}"
    )
    assert done.code == 0 and done.losses == plain.losses, done.explain()
    assert [event.step for event in done.named(events.DMR_CLEAN)] == [3, 4], done.explain()
