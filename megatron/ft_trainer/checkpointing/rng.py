"""Saves and restores a rank's random number generators: those of Python, numpy, torch, the device and megatron-core."""

import random

import numpy
import torch

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import random as core_random

KEY = "rng_state"


def grid() -> tuple[list[int], list[int], int]:
    """Return (shape of the grid of generator states: [pp, tp] or [pp, tp, dp]; this rank's position in it; this rank's
    number among the ranks that share the position).

    Data-parallel ranks share their states, unless they hold different experts.
    """
    dp_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    shape = [
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    ]
    place = [
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    ]
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        return [*shape, parallel_state.get_data_parallel_world_size(with_context_parallel=True)], [*place, dp_rank], 0
    return shape, place, dp_rank


def sharded() -> ShardedObject:
    """Return this rank's states with their position in the checkpoint. Format and keys are Megatron-LM's."""
    shape, place, replica = grid()
    tracker = core_random.get_cuda_rng_tracker()
    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": {
            name: core_random.convert_cuda_rng_state(state, to_graphable=False)
            for name, state in tracker.get_states().items()
        },
    }
    return ShardedObject(KEY, [states], tuple(shape), tuple(place), replica_id=replica)


def restore(loaded: list[dict]) -> None:
    """Restore the generators to the states in ``loaded``, the list with one entry that :func:`sharded` has stored."""
    (states,) = loaded
    tracker = core_random.get_cuda_rng_tracker()
    graphable = core_random.is_graph_safe_cuda_rng_tracker(tracker)
    random.setstate(states["random_rng_state"])
    numpy.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    tracker.set_states(
        {
            name: core_random.convert_cuda_rng_state(state, to_graphable=graphable)
            for name, state in states["rng_tracker_states"].items()
        }
    )
