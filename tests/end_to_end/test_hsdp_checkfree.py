"""CheckFree inside replicas: a stage lost with all copies is estimated in place, until an exact state is there."""

import math

import pytest
import replica_runs
from replica_runs import Done, all_injected, together, train

from ft.base import events

STEPS = 12
STAGES = "--num-layers {0} --pipeline-model-parallel-size {0} --ft-hot-swap --ft-snapshot-peers 0"
LONG = pytest.mark.long


def recovered(corpus, folder, layout: str, ranks: int, kills: list[tuple[int, int]]) -> Done:
    """Run two replicas; ``kills``: (replica, rank) of each worker that dies in step 5.

    Two ranks have nobody but each other: there one dies in the recovery from an error, when both have restored the same
    step. Else the other one may not have noticed the end of the step before yet, and has no weights to lend.
    """
    lost = [f"replica={replica}:rank={rank}" for replica, rank in kills]
    if ranks > 2:
        faults = [f"kill@{who}:step=5:phase=forward" for who in lost]
    else:
        faults = [f"exception@{who}:step=5:phase=forward:error=recoverable" for who in lost]
        faults += [f"kill@{who}:step=4:phase=resume" for who in lost]
    flags = replica_runs.flags(corpus, layout, STEPS, 8)
    options = f"--standby 1 --inject {','.join(faults)}"
    how = {"options": options, "good": lambda done: together(4)(done) and all_injected(len(faults))(done)}
    done = train(folder / "run", flags, replicas=2, nproc=2 * ranks, **how)
    done.check(STEPS, 1)
    assert len(done.injected()) == len(faults), done.explain()
    assert not done.of(0, events.RESTARTED) + done.of(1, events.RESTARTED), done.explain()
    ours, theirs = ({step["step"]: step["loss"] for step in done.metrics_of(replica)} for replica in range(2))
    assert all(ours[step] == theirs[step] for step in ours.keys() & theirs.keys()), done.explain()
    assert all(map(math.isfinite, [*ours.values(), *theirs.values()])), done.explain()
    return done


def undisturbed(corpus, folder, layout: str, ranks: int) -> list[float]:
    flags = replica_runs.flags(corpus, layout, STEPS, 8)
    return train(folder / "plain", flags, replicas=2, nproc=2 * ranks, good=together(STEPS)).losses()


def test_an_estimated_stage_gives_way_to_the_exact_one_of_another_replica(corpus, tmp_path):
    layout = f"{STAGES.format(3)} --ft-checkfree"
    done = recovered(corpus, tmp_path, layout, 3, [(1, 1)])
    (rebuilt,) = done.of(1, events.STAGE_REBUILT)
    assert rebuilt.detail["stage"] == 1 and not done.of(0, events.STAGE_REBUILT)
    assert len(done.of(1, events.CAUGHT_UP)) >= 3, "every rank of the replica has fetched the exact state"
    (later,) = [step.commit for step in done.proof.lineage.steps if step.number == rebuilt.step + 1]
    assert later.behind in ((1,), ()), done.explain()
    plain = undisturbed(corpus, tmp_path, layout, 3)
    assert done.losses() == pytest.approx(plain, rel=0.1), "half of the samples of a step are trained on later"
    assert done.losses()[: rebuilt.step] == plain[: rebuilt.step]


@pytest.mark.parametrize(
    ("layout", "ranks", "kills", "stages"),
    [
        pytest.param(f"{STAGES.format(3)} --ft-checkfree", 3, [(0, 1), (1, 1)], {0: 1, 1: 1}, id="the same stage"),
        pytest.param(
            f"{STAGES.format(4)} --ft-checkfree", 4, [(0, 1), (1, 2)], {0: 1, 1: 2}, id="two stages", marks=LONG
        ),
        pytest.param(
            f"{STAGES.format(4)} --ft-checkfree-plus", 4, [(0, 0), (1, 0)], {0: 0, 1: 0}, id="first stage", marks=LONG
        ),
        pytest.param(
            "--use-distributed-optimizer --ft-hot-swap --ft-snapshot-peers 0 --ft-checkfree",
            2,
            [(0, 1), (1, 1)],
            {0: 0, 1: 0},
            id="in part",
        ),
    ],
)
def test_what_all_replicas_have_lost_is_estimated_and_one_estimate_is_trained_on(
    layout, ranks, kills, stages, corpus, tmp_path
):
    done = recovered(corpus, tmp_path, layout, ranks, kills)
    for replica, stage in stages.items():
        assert {event.detail["stage"] for event in done.of(replica, events.STAGE_REBUILT)} == {stage}, done.explain()
    assert sum(done.losses()[-4:]) < sum(done.losses()[:4])
