"""The control plane has a lost pipeline stage rebuilt: hand-made histories, without data parallelism."""

from control_world import World, kinds, only, opened

from ft.job import messages as m
from ft.job.control.state import RUNNING


def pipeline(standbys=2) -> World:
    """Four stages of a rank each; rank r's copy is at r + 1."""
    world = World(dp=False, standbys=standbys).run()
    for rank in range(4):
        place = {"pp": rank, "tp": 0, "dp": 0, "cp": 0, "blocks": 2}
        world.say(m.Observed("layout", {"places": {str(rank): place}, "checkfree": "middle"}))
    return world


def lose(world: World, *ranks: int) -> list:
    for rank in ranks:
        world.kill(rank)
    world.release()
    return world.arrive()


def test_a_stage_lost_with_its_copy_is_rebuilt_and_all_go_on():
    world = pipeline()
    repair = only(lose(world, 1, 2), m.Repair)
    assert (repair.step, repair.rebuilt) == (5, {1: m.Neighbours(0, 2)})
    assert repair.sources == {0: m.Source(0, 0), 2: m.Source(3, 3), 3: m.Source(3, 3)}
    assert m.decode(m.encode(repair)) == repair
    assert "of step 5, stage 1 is rebuilt from the stages beside (CheckFree)" in world.last
    assert kinds(world.repair()) == ["Resume"]
    world.resume()
    assert world.state.phase == RUNNING
    assert world.events("invariants_checked")[-1]["violations"] == []
    assert world.events("state_restored")[-1]["sources"]["1"] == "rebuilt:0+2"


def test_whoever_was_to_be_rebuilt_and_was_not_violates_an_invariant():
    world = pipeline()
    lose(world, 1, 2)
    orders = world.repair(r1={"sources": {"owned": "own", "replicated": "own"}})
    assert "I3 (optimizer availability): rank 1 has no source of its optimizer shard" in only(orders, m.Stop).message


def test_who_had_a_source_and_was_rebuilt_all_the_same_violates_it_too():
    world = pipeline()
    lose(world, 1, 2)
    orders = world.repair(r2={"sources": {"owned": "rebuilt:1+3", "replicated": "rebuilt:1+3"}})
    assert "rank 2 has no source of its optimizer shard" in only(orders, m.Stop).message


def test_two_adjacent_stages_lead_to_the_checkpoint_and_to_places_anew():
    world = pipeline(standbys=3)
    restart = only(lose(world, 1, 2, 3), m.Restart)
    assert "the adjacent stages 1 and 2 are both lost" in restart.reason
    assert restart.reason.endswith("what is left is the last persistent checkpoint")
    assert not world.state.places


def test_a_death_during_the_rebuild_has_it_ordered_again():
    world = pipeline()
    lose(world, 1, 2)
    world.repair(0, 1)
    spawned = world.kill(1)
    (name,) = world.start_spawned(spawned)
    assert opened(world.ready(name)).seats[1].worker == name
    held = {rank: m.Holdings([5], {}) for rank in (0, 3)} | {3: m.Holdings([5], {2: [5]})}
    world.release(holdings=held)
    repair = only(world.arrive(), m.Repair)
    assert (repair.step, repair.rebuilt) == (5, {1: m.Neighbours(0, 2)})


def test_neighbours_whose_blocks_are_unusable_lead_to_the_checkpoint():
    world = pipeline()
    lose(world, 1, 2)
    world.fail(1, "FallbackError", "FtError", message="linear_fc1.weight holds values that are not finite")
    orders = world.release() + world.arrive()
    assert "at step 5 the neighbours' blocks turned out unusable" in only(orders, m.Restart).reason


def test_a_snapshot_that_is_damaged_everywhere_makes_its_stage_a_lost_one():
    world = pipeline()
    lose(world, 3)
    world.fail(1, "FallbackError", "FtError", message="own snapshot is damaged, and so is the copy")
    repair = only(world.release() + world.arrive(), m.Repair)
    assert repair.rebuilt == {1: m.Neighbours(0, 2)}
