"""The pieces of the simulation of SPARe: failure clocks, restarts, schemes, and confidence."""

import math

import numpy as np
import pytest

from ft.lab.simulate.spare.clocks import Clocks, Trace, Weibull
from ft.lab.simulate.spare.restart import extend, ignore, replace
from ft.lab.simulate.spare.schemes import Replication, block_sizes, replication_endurance
from ft.lab.simulate.spare.study import build, estimate
from ft.systems.spare.controller import Controller
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import ruler

# --- failure clocks ---------------------------------------------------------------------------------------------------


def test_the_mean_time_between_failures_is_what_was_asked_for():
    rng = np.random.default_rng(5)
    for shape in (0.78, 1.0, 2.0):
        times = Weibull(500.0, shape).after(np.zeros(40_000), np.arange(40_000), rng)
        assert times.mean() == pytest.approx(500.0, rel=0.03)


def clocks(times: list[tuple[float, int]], groups: int) -> Clocks:
    return Clocks(Trace(times), groups, np.random.default_rng(0))


def hour(groups: int) -> np.ndarray:
    return np.full(groups, 3600.0)


def test_extend_waits_for_a_group_that_fails_in_its_restart():
    found = clocks([(10.0, 0), (1000.0, 1)], 3)
    assert found.failed(20.0) == [0]
    assert extend(20.0, found, hour) == 1000.0 + 3600.0
    assert found.next == math.inf


def test_extend_lets_a_group_that_is_ready_fail_while_it_waits():
    found = clocks([(10.0, 0), (1000.0, 1), (4000.0, 2)], 3)
    found.failed(20.0)
    end = extend(20.0, found, hour)
    assert end == 4600.0
    assert found.failed(end) == [2]


def test_replace_has_all_groups_at_the_end_of_one_restart():
    found = clocks([(10.0, 0), (1000.0, 1), (3700.0, 2)], 3)
    found.failed(20.0)
    assert replace(20.0, found, hour) == 3620.0
    assert found.failed(3620.0) == [] and found.next == 3700.0


def test_ignore_stops_the_clocks():
    found = clocks([(10.0, 0), (1000.0, 1)], 3)
    found.failed(20.0)
    assert ignore(20.0, found, hour) == 3620.0
    assert found.next == 1000.0 + 3600.0


# --- schemes ----------------------------------------------------------------------------------------------------------


def test_what_spare_loses_is_for_the_controller_to_say():
    crew, controller = build(24, "spare", 3), Controller(Placement(24, ruler(24, 3)))
    hosts = controller.placement.hosts(7)
    assert crew.lose([5]) == (False, 1) and crew.stack == 1  # at S = 1 nobody else computes type 5
    crew.committed()
    assert crew.stack == 2
    controller.lose([5])
    for lost in ([0, 1], [int(hosts[0])], [int(group) for group in hosts[1:]]):
        lost = [group for group in lost if controller.alive[group]]
        found = controller.lose(lost)
        loss = crew.lose(lost)
        assert (loss.wiped, bool(loss.patch)) == (bool(found.wipe_out), bool(found.patch_types))
        if not loss.wiped:
            crew.committed()
        assert crew.stack == controller.stack
    assert found.wipe_out
    crew.reset()
    assert crew.stack == 1 and not crew.lose([5]).wiped
    assert crew.lose([group for group in range(24) if group != 5]).wiped


def test_losses_in_one_step_are_judged_by_what_was_computed_in_it():
    crew, controller = build(24, "spare", 3), Controller(Placement(24, ruler(24, 3)))
    first, second = 5, controller.placement.hosts(5)[1]  # at S = 1, type 5 goes from the one to the other
    assert crew.lose([first]).patch == 1
    assert crew.lose([second]).patch == 1, "its own type at one group, and type 5 at the third of its hosts"
    crew.committed()
    controller.lose([first, second])
    assert crew.stack == controller.stack


def test_blocks_of_replication_and_the_short_one():
    assert block_sizes(200, 3) == [3] * 66 + [2]
    crew = Replication(8, 3)
    assert not crew.lose([0, 1, 3, 6]).wiped
    assert crew.lose([7]).wiped
    crew.reset()
    assert not crew.lose([7]).wiped


@pytest.mark.parametrize(("groups", "degree"), [(40, 1), (40, 2), (200, 3), (50, 4)])
def test_the_endurance_of_replication_is_that_of_random_failures(groups, degree):
    rng, counts = np.random.default_rng(6), []
    crew = Replication(groups, degree)
    for _ in range(1500):
        crew.reset()
        order = rng.permutation(groups).tolist()
        counts.append(next(k for k in range(1, groups + 1) if crew.lose([order[k - 1]]).wiped))
    assert np.mean(counts) == pytest.approx(replication_endurance(groups, degree), rel=0.04)


def test_confidence_is_students():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert estimate([5.0]).half_width is None and math.isinf(estimate([1.0, math.inf]).mean)
