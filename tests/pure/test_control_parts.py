"""The parts of the control plane's judgement, each by itself."""

import json

import pytest
from control_world import World, kinds, only, opened

from ft.job import messages as m
from ft.job.control.state import RUNNING, ControlState
from ft.job.parts import Seat
from ft.net.codec import from_json, to_json


def test_the_whole_state_goes_through_json():
    world = World(standbys=2).run()
    world.kill(1)
    world.release(0)
    world.fail(0, "RecoverableError")
    text = json.dumps(to_json(world.state))
    assert from_json(ControlState, json.loads(text)) == world.state


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
    seats = opened(world.kill(2)).seats
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
