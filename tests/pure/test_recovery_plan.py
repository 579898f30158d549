"""Where a recovery's state comes from: copies, CheckFree, checkpoint, each in its turn."""

import random
import time

import pytest

from ft.job.control.recovery import CHECKFREE, CHECKPOINT, COPY, MIDDLE, PLUS, HostMemory, Stages, plan_from_memory
from ft.job.control.state import GridPosition
from ft.job.parts import Holdings, Neighbours, Source


def pipeline(pp=4, dp=1, tp=1, blocks=None, checkfree=MIDDLE, rebuilt=None, lends=True):
    """Ranks in the order tp, dp, pp; ``blocks``: layers of each stage."""
    blocks = blocks or [2] * pp
    places = {}
    for rank in range(pp * dp * tp):
        stage = rank // (dp * tp)
        places[rank] = GridPosition(stage, rank % tp, rank // tp % dp, 0, blocks[stage], lends=lends)
    return Stages(checkfree, places, rebuilt or {})


def memory(stages, held, copies=None, live=None, **more):
    """``held``: rank -> steps of its own; ``copies``: holder -> owner -> steps; ``live``: rank -> step of its model."""
    copies, live = copies or {}, live or {}
    holdings = {
        rank: Holdings(list(steps), {owner: list(of) for owner, of in copies.get(rank, {}).items()}, live.get(rank))
        for rank, steps in held.items()
    }
    peers: dict[tuple, list[int]] = {}
    for rank, place in stages.places.items():
        peers.setdefault((place.pp, place.tp), []).append(rank)
    dp_peers = {rank: peers[place.pp, place.tp] for rank, place in stages.places.items()}
    return HostMemory(list(stages.places), holdings, dp_peers, **more)


def all_but(stages, lost, steps=(7, 6)):
    return {rank: steps for rank in stages.places if rank not in lost}


def test_a_copy_goes_before_a_rebuild():
    stages = pipeline()
    plan = plan_from_memory(memory(stages, all_but(stages, [1]), {2: {1: [7, 6]}}), stages)
    assert (plan.name, plan.step, plan.sources[1], plan.rebuilt) == (COPY, 7, Source(2, 2), {})


def test_a_copy_of_an_earlier_step_goes_before_a_rebuild_at_a_later_one():
    stages = pipeline()
    plan = plan_from_memory(memory(stages, all_but(stages, [1]), {2: {1: [6]}}), stages)
    assert (plan.name, plan.step) == (COPY, 6)


def test_a_stage_without_a_copy_is_rebuilt_from_the_stages_beside_it():
    stages = pipeline()
    plan = plan_from_memory(memory(stages, all_but(stages, [1])), stages)
    assert (plan.name, plan.step, plan.rebuilt) == (CHECKFREE, 7, {1: Neighbours(0, 2)})
    assert plan.sources == {rank: Source(rank, rank) for rank in (0, 2, 3)}


def test_each_rank_is_rebuilt_from_those_of_its_own_place():
    stages = pipeline(pp=3, dp=2, tp=2)
    plan = plan_from_memory(memory(stages, all_but(stages, [4, 5, 6, 7])), stages)
    assert plan.rebuilt == {rank: Neighbours(rank - 4, rank + 4) for rank in (4, 5, 6, 7)}


def test_a_neighbour_may_itself_come_from_a_copy():
    stages = pipeline()
    plan = plan_from_memory(memory(stages, all_but(stages, [1, 2]), {3: {2: [7]}}), stages)
    assert plan.rebuilt == {1: Neighbours(0, 2)} and plan.sources[2] == Source(3, 3)


def test_two_stages_that_are_not_adjacent_are_rebuilt_at_once():
    stages = pipeline(pp=5)
    plan = plan_from_memory(memory(stages, all_but(stages, [1, 3])), stages)
    assert plan.rebuilt == {1: Neighbours(0, 2), 3: Neighbours(2, 4)}


@pytest.mark.parametrize(
    ("stages", "lost", "why"),
    [
        (pipeline(), [1, 2], "the adjacent stages 1 and 2 are both lost"),
        (pipeline(), [0], "stage 0 is lost, the first one, which only CheckFree+ rebuilds"),
        (pipeline(), [3], "stage 3 is lost, the last one, which only CheckFree+ rebuilds"),
        (pipeline(blocks=[2, 3, 2, 2]), [1], "(stage 0: 2, stage 1: 3, stage 2: 2)"),
    ],
)
def test_what_cannot_be_rebuilt_is_named_with_what_is_left(stages, lost, why):
    plan = plan_from_memory(memory(stages, all_but(stages, lost)), stages)
    assert (plan.name, plan.step) == (CHECKPOINT, None)
    assert plan.reason.startswith("both copies lost: of step 7, nobody has all that logical rank(s) ")
    assert why in plan.reason and plan.reason.endswith("what is left is the last persistent checkpoint")


def test_a_rank_whose_peer_has_its_weights_takes_them_and_its_stage_is_not_rebuilt():
    stages = pipeline(dp=2, tp=2)
    plan = plan_from_memory(memory(stages, all_but(stages, [5]), live={7: 7}), stages)
    assert (plan.name, plan.step, plan.lent, plan.rebuilt) == (CHECKFREE, 7, {5: 7}, {})
    assert plan.sources == {rank: Source(rank, rank) for rank in stages.places if rank != 5}
    assert "logical rank 5 takes the weights of its data-parallel peer 7" in plan.reason
    plan = plan_from_memory(memory(stages, all_but(stages, [0, 5, 8, 9, 10, 11]), live={7: 7, 2: 7}), stages)
    assert (plan.lent, sorted(plan.rebuilt)) == ({0: 2, 5: 7}, [8, 9, 10, 11]), "even at an end of the pipeline"


@pytest.mark.parametrize(
    ("stages", "lost", "live"),
    [
        (pipeline(dp=2), 2, {}),
        (pipeline(dp=2), 2, {3: 8}),
        (pipeline(dp=2, lends=False), 2, {3: 7}),
        (pipeline(dp=2, tp=2), 5, {4: 7, 6: 7, 3: 7}),
    ],
    ids=["updated", "another step", "no lender", "another part"],
)
def test_a_stage_lost_in_part_is_rebuilt_whole_if_no_peer_has_the_weights(stages, lost, live):
    plan = plan_from_memory(memory(stages, all_but(stages, [lost]), live=live), stages)
    whole = [rank for rank, place in stages.places.items() if place.pp == 1]
    assert (plan.name, plan.lent, sorted(plan.rebuilt)) == (CHECKFREE, {}, whole)


def test_without_checkfree_a_lost_stage_means_a_restart_as_ever():
    stages = pipeline(checkfree="")
    plan = plan_from_memory(memory(stages, all_but(stages, [1])), stages)
    assert plan.name == CHECKPOINT
    assert plan.reason == "both copies lost: of step 7, nobody has all that logical rank(s) 1 need"


def test_with_checkfree_plus_the_first_and_the_last_stage_have_one_neighbour():
    stages = pipeline(checkfree=PLUS)
    assert plan_from_memory(memory(stages, all_but(stages, [0])), stages).rebuilt == {0: Neighbours(None, 1)}
    assert plan_from_memory(memory(stages, all_but(stages, [3])), stages).rebuilt == {3: Neighbours(2, None)}


def test_what_an_interrupted_rebuild_left_in_part_is_rebuilt_whole_at_the_same_step_only():
    stages = pipeline(dp=2, rebuilt={1: 7})
    held = all_but(stages, [2, 3]) | {3: (7,)}
    assert plan_from_memory(memory(stages, held), stages).rebuilt == {2: Neighbours(0, 4), 3: Neighbours(1, 5)}
    stages = pipeline(dp=2, rebuilt={1: 5})
    assert plan_from_memory(memory(stages, held), stages).name == CHECKFREE, "step 6, of which rank 3 has nothing"


def test_with_checkfree_plus_a_rebuild_of_the_very_step_is_begun_anew_and_not_mixed_with_snapshots():
    stages = pipeline(checkfree=PLUS, rebuilt={0: 7})
    assert plan_from_memory(memory(stages, all_but(stages, [])), stages).rebuilt == {0: Neighbours(None, 1)}
    plan = plan_from_memory(memory(stages, all_but(stages, [3])), stages)
    assert plan.rebuilt == {0: Neighbours(None, 1), 3: Neighbours(2, None)}
    plan = plan_from_memory(memory(stages, all_but(stages, [1]), {2: {1: [7]}}), stages)
    assert (plan.name, plan.rebuilt, plan.sources[1]) == (CHECKFREE, {0: Neighbours(None, 1)}, Source(2, 2))
    plan = plan_from_memory(memory(stages, all_but(stages, [1])), stages)
    assert plan.rebuilt == {1: Neighbours(0, 2)}, "both at once cannot be; stage 0 has its own"
    assert plan_from_memory(memory(stages, all_but(stages, [], (8, 7))), stages).name == COPY
    stages = pipeline(rebuilt={1: 7})
    assert plan_from_memory(memory(stages, all_but(stages, [])), stages).name == COPY


def test_a_stage_whose_snapshots_are_unusable_is_rebuilt_and_one_that_could_not_be_is_not_tried_again():
    stages = pipeline()
    found = memory(stages, all_but(stages, [], (7,)), spoiled=[7], unusable={2: [7]})
    assert plan_from_memory(found, stages).rebuilt == {2: Neighbours(1, 3)}
    found = memory(stages, all_but(stages, [2], (7,)), unbuildable=[7])
    plan = plan_from_memory(found, stages)
    assert plan.name == CHECKPOINT and "at step 7 the neighbours' blocks turned out unusable" in plan.reason


def test_before_all_have_said_where_they_are_nothing_is_rebuilt():
    stages = pipeline()
    told = Stages(MIDDLE, {rank: place for rank, place in stages.places.items() if rank != 1})
    plan = plan_from_memory(memory(stages, all_but(stages, [1])), told)
    assert plan.name == CHECKPOINT and "logical rank(s) 1 have not said which stage they are of" in plan.reason


def test_whatever_is_lost_every_rank_has_one_origin_of_one_step_or_all_restart():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        stages = pipeline(rng.randint(2, 5), rng.randint(1, 2), rng.randint(1, 2), checkfree=rng.choice((MIDDLE, PLUS)))
        ranks = list(stages.places)
        alive = [rank for rank in ranks if rng.random() < 0.75]
        held = {rank: sorted(rng.sample((5, 6, 7), rng.randint(1, 2)), reverse=True) for rank in alive}
        copies = {rank: {rng.choice([r for r in ranks if r != rank]): [rng.choice((6, 7))]} for rank in alive}
        live = {rank: rng.choice((5, 6, 7, None)) for rank in alive}
        found = memory(stages, held, copies, live)
        plan = plan_from_memory(found, stages)
        if plan.name == CHECKPOINT:
            assert not plan.sources and not plan.rebuilt and plan.reason
            continue
        assert sorted([*plan.sources, *plan.rebuilt, *plan.lent]) == ranks
        assert bool(plan.rebuilt or plan.lent) == (plan.name == CHECKFREE)
        for rank, source in plan.sources.items():
            of_rank = held[rank] if source.owned == rank else copies[source.owned][rank]
            assert plan.step in of_rank
        for rank, beside in plan.rebuilt.items():
            assert all(neighbour in plan.sources or neighbour in plan.lent for neighbour in beside.there)
            assert {stages.places[n].pp - stages.places[rank].pp for n in beside.there} <= {-1, 1}
        for rank, peer in plan.lent.items():
            assert live[peer] == plan.step and plan.sources[peer] == Source(peer, peer)
            assert stages.places[peer].pp == stages.places[rank].pp and stages.places[peer].tp == stages.places[rank].tp


def test_a_thousand_lost_ranks_of_a_large_job_do_not_delay_the_decision():
    stages = pipeline(pp=16, dp=64, tp=4)
    copies = {rank: {rank - 4 if rank % 256 >= 4 else rank + 252: (7, 6)} for rank in stages.places}
    lost = range(0, 4096, 4)
    held = memory(stages, all_but(stages, set(lost)), {r: of for r, of in copies.items() if r not in set(lost)})
    began = time.process_time()
    plan = plan_from_memory(held, stages)
    assert plan.name == CHECKPOINT and time.process_time() - began < 2.0
