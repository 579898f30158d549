"""Reads the situation that the recovery ladder decides on off the control plane's state."""

from ft.job.control.membership import place_ranks
from ft.job.control.recovery_plan import Memory, Stages
from ft.job.control.situation import Others, Restarts, Seats, Situation
from ft.job.control.state import State


def of_memory(state: State) -> Situation:
    """Return the situation of a recovery in which every seat has a worker, and every survivor has reported what it
    holds.
    """
    recovery = state.recovery
    assert recovery is not None
    memory = Memory(
        list(state.seats),
        {w.rank: w.release.holdings for w in state.seated() if w.rank is not None and w.release is not None},
        state.dp_peers,
        {rank for rank, all_of_it in state.complete.items() if all_of_it},
        recovery.spoiled,
        recovery.unusable,
        recovery.unbuildable,
    )
    joiners = [w.rank for w in state.seated() if w.rank is not None and w.empty]
    started = len(set(joiners).intersection(recovery.awaited))
    return Situation(
        state.newest_step(),
        memory,
        Stages(state.checkfree, state.places, state.rebuilt),
        Seats(joiners, len(joiners) - started, started),
        _others(state),
        restarts=_restarts(state),
        hot_swap=state.options.hot_swap,
    )


def without_memory(state: State, why: str) -> Situation:
    """Return the situation in which nothing in memory may be used; ``why``: the reason, for people."""
    memory = Memory(range(state.options.world_size), {}, {})
    return Situation(state.newest_step(), memory, others=_others(state), restarts=_restarts(state), barred=why)


def _others(state: State) -> Others:
    options = state.options
    return Others(options.replicas, reorders=options.reorders, are_unknown=options.replicas > 1)


def _restarts(state: State) -> Restarts:
    options = state.options
    has_room = place_ranks(state.agents.values(), options.world_size) is not None
    return Restarts(options.max_restarts, state.restarts, options.world_size, has_room)
