"""Where a recovery's state comes from, at random and in a large job. Single cases are in ``conversations/ladder``."""

import random
import time

from ft.job.control.recovery import CHECKFREE, CHECKPOINT, MIDDLE, PLUS, HostMemory, Stages, plan_from_memory
from ft.job.control.state import GridPosition
from ft.job.parts import Holdings, Source


def pipeline(pp, dp, tp, checkfree=MIDDLE):
    """Ranks in the order tp, dp, pp, with two layers in each stage."""
    ranks = range(pp * dp * tp)
    places = {rank: GridPosition(rank // (dp * tp), rank % tp, rank // tp % dp, 0, 2) for rank in ranks}
    return Stages(checkfree, places)


def memory(stages, held, copies, live):
    """``held``: rank -> steps of its own; ``copies``: holder -> owner -> steps; ``live``: rank -> step of its model."""
    holdings = {
        rank: Holdings(list(steps), {owner: list(of) for owner, of in copies.get(rank, {}).items()}, live.get(rank))
        for rank, steps in held.items()
    }
    peers: dict[tuple, list[int]] = {}
    for rank, place in stages.places.items():
        peers.setdefault((place.pp, place.tp), []).append(rank)
    dp_peers = {rank: peers[place.pp, place.tp] for rank, place in stages.places.items()}
    return HostMemory(list(stages.places), holdings, dp_peers)


def test_whatever_is_lost_every_rank_has_one_origin_of_one_step_or_all_restart(seed):
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
    alive = {rank: (7, 6) for rank in stages.places if rank not in set(lost)}
    held = memory(stages, alive, {rank: of for rank, of in copies.items() if rank in alive}, {})
    began = time.process_time()
    plan = plan_from_memory(held, stages)
    assert plan.name == CHECKPOINT and time.process_time() - began < 2.0
