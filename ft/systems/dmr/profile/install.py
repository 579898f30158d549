"""Construction of the profiler for double execution (SpareTrain), for one rank of a run of megatron-core."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ft.systems.dmr.plan.schedule import Pipeline
from ft.systems.dmr.profile.engine import ProfilingEngine
from ft.systems.dmr.profile.recorder import Recorder
from ft.systems.dmr.profile.session import Profiling, Target, device_memory
from ft.systems.dmr.profile.stopwatch import stopwatch
from ft.systems.dmr.profile.storages import Storages
from ft.systems.dmr.runtime.cursor import ExecutionCursor
from ft.systems.dmr.runtime.functions import functions_of_core
from ft.systems.dmr.runtime.opaque import OpaqueCalls
from ft.systems.dmr.unstable import read_unstable
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.patches import double_execution


def install(
    path: Path,
    chunks: Sequence,
    optimizer: Any,
    microbatches: int,
    *,
    fingerprint: Mapping[str, Any],
    unstable: Path | None = None,
    end: Callable[[str], None],
) -> Profiling:
    """Install the profiler, after model and optimizer are built. Call it on all ranks, with ``WITH_DMR`` patches.

    Args:
        path: file that rank 0 writes.
        chunks: ``DistributedDataParallel`` model chunks.
        optimizer: megatron-core's optimizer.
        microbatches: microbatches of an iteration, on each rank.
        fingerprint: of the run (``ft.systems.dmr.plan.trace.FINGERPRINT``).
        unstable: a file of ``ft dmr selftest``, or None.
        end: as in ``Profiling``.

    Raises:
        UserError: the file ``unstable`` cannot be read.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    device = next(chunks[0].parameters()).device
    in_use = torch.cuda.memory_allocated if device.type == "cuda" else None
    course = ExecutionCursor()
    recorder = Recorder(course, stage, stopwatch(device), lambda: Storages(lasting(chunks, optimizer), in_use))
    engine = ProfilingEngine(course, recorder, device)
    engine.watch_layers(chunks, TransformerLayer)
    engine.watch_opaque_calls(OpaqueCalls(engine, compares=False), functions_of_core(chunks[0].config))
    left_out = frozenset() if unstable is None else frozenset(read_unstable(unstable).operators)
    target = Target(
        path, fingerprint, _pipeline(chunks, microbatches), device_memory(device), _reports_for_stage(), left_out
    )
    profiling = Profiling(engine, recorder, stage, target, end)
    double_execution.listen(engine)
    return profiling


def _pipeline(chunks: Sequence, microbatches: int) -> Pipeline:
    config, stages = chunks[0].config, parallel_state.get_pipeline_model_parallel_world_size()
    group = 0 if len(chunks) == 1 else config.microbatch_group_size_per_vp_stage or 0
    return Pipeline(stages, microbatches, len(chunks), blocking=not config.overlap_p2p_comm, group=group)


def _reports_for_stage() -> bool:
    """Return whether this rank reports for its stage: the first data-parallel and tensor-parallel rank does."""
    data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return parallel_state.get_tensor_model_parallel_rank() == 0 and data == 0


def lasting(chunks: Sequence, optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that stay in memory between iterations: parameters, gradients and optimizer state."""
    for chunk in chunks:
        yield from chunk.module.buffers()
        for parameter in chunk.parameters():
            yield parameter
            yield from (grad for grad in (getattr(parameter, "main_grad", None), parameter.grad) if grad is not None)
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in each.param_groups:
            yield from group["params"]
        for values in each.state.values() if hasattr(each, "state") else ():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))
