"""Random faults in a simulated cluster whose agents and workers keep to the protocol: every run comes to its end."""

import random

import pytest
from control_sim import LIMITS, Sim

from ft import messages as m
from ft.control.state import ENDED

CHUNKS, SEEDS_EACH = 10, 30
LONGEST_S = 1500.0


def check_epochs(orders):
    """Epochs are opened one after the other; after each Close comes, in time, an Open, a Restart or the end."""
    newest, is_open, closed_at = -1, False, None
    for when, order in orders:
        if isinstance(order, m.Open | m.Restart | m.Stop):
            if closed_at is not None:
                assert when - closed_at <= LIMITS.ready_s + 2 * LIMITS.drain_s, (closed_at, when, order)
            closed_at = None
        if isinstance(order, m.Open):
            assert not is_open and order.epoch == newest + 1, order
            newest, is_open = order.epoch, True
        elif isinstance(order, m.Close):
            assert is_open and order.epoch == newest, order
            is_open, closed_at = False, when
        elif isinstance(order, m.Repair | m.Resume):
            assert is_open and order.epoch == newest, order
        elif isinstance(order, m.Restart):
            is_open = False
        elif isinstance(order, m.Finish | m.Stop):
            assert order is orders[-1][1], "an order after the end"


def play(seed):
    sim = Sim(seed)
    sim.plan(sim.random.choice([1, 2, 4, 8, 16]))
    sim.run(LONGEST_S)
    check_epochs(sim.orders)
    assert sim.state.phase == ENDED, f"{sim.state.phase} since {sim.state.since:.1f}, it is {sim.now:.1f}"
    return sim


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_run_ends_well_or_says_why_not(chunk):
    first = random.SystemRandom().randrange(1 << 32)
    for seed in range(first, first + SEEDS_EACH):
        print("seed", seed)
        sim = play(seed)
        last = sim.orders[-1][1]
        assert isinstance(last, m.Finish) or last.message
