"""Profile a training run for DMR: what is attached to the trainer for one iteration, and the session that writes the
profile.

The engine follows the iteration as the DMR engine does, but verifies nothing. There are warm-up iterations, one
iteration that is recorded in full, timed iterations, and then the profile.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft.protection.contract import Layer, Trainer, Update
from ft.systems.dmr.plan.file import read_unstable, write_trace
from ft.systems.dmr.plan.trace import INTRA
from ft.systems.dmr.profile.assemble import assemble, measure
from ft.systems.dmr.profile.recorder import Recorder, StageRecord, Storages, Timed, key_of, stopwatch
from ft.systems.dmr.runtime.cursor import ExecutionCursor
from ft.systems.dmr.runtime.engine import Engine
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.functions import functions_of_core
from ft.systems.dmr.runtime.opaque import OpaqueCalls
from ft.systems.dmr.runtime.queue import Queue
from ft.systems.schedule.kinds import Pipeline
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.patches import double_execution

EXPERT_PARALLEL = INTRA[1]


class ProfilingEngine(Engine):
    """An ``Engine`` that records operators and waits, and compares nothing."""

    def __init__(self, cursor: ExecutionCursor, recorder: Recorder, device: torch.device):
        findings = Findings(device, 0)
        super().__init__(cursor, findings, Queue(findings), recorder)
        self._recorder = recorder

    def window(self, kind: str) -> None:
        """Begin to record a wait, see ``Engine``."""
        if self.is_active:
            self._recorder.waits(kind)

    def waited(self) -> None:
        """End the recording of a wait, see ``Engine``."""
        if self.is_active:
            self._recorder.waited()

    def dynamic_window(self, is_over: Callable[[], bool]) -> None:
        """Begin to record a wait whose duration differs in every iteration, see ``Engine``."""
        if self.is_active:
            self._recorder.waits(EXPERT_PARALLEL, dynamic=True)

    def communicates(self, *_: Any, **__: Any) -> None:
        """Do nothing: a profile does not need the results of collectives. See ``Engine``."""

    def completed(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing: a profile does not need the results of collectives. See ``Engine``."""


WARM_UP, TIMED = 2, 5
ITERATIONS = WARM_UP + 1 + TIMED
"""Number of training steps after which the profile is complete and the run ends."""
_USABLE = 0.95
"""Share of the memory of torch's allocator that tensors can fill; the rest is lost to fragmentation."""


class Profiling(Layer):
    """The layer that runs and records the iterations of a profiling run.

    Args:
        reports: whether this rank's record is the one of its stage.
        write: assembles and writes the profile from the records of all stages and the memory budget, on rank 0.
        end: ends the run after the current step. All ranks call it in the same step.
    """

    def __init__(
        self,
        trainer: Trainer,
        recorder: Recorder,
        engine: ProfilingEngine,
        reports: bool,
        write: Callable[[Sequence[StageRecord], float | None], None],
        end: Callable[[], None],
    ):
        self._trainer, self._recorder, self._engine, self._reports = trainer, recorder, engine, reports
        self._write, self._end = write, end
        self._done = 0
        self._timed: list[dict[tuple, Timed]] = []

    def update(self, step: Callable[[], Any]) -> Any:
        if self._engine.is_active:
            self._engine.before_update()
        return step()

    def compute(self, work: Callable[[], Update]) -> Update:
        """Run ``work``, a whole iteration, record it, and return its result. Collective in the last iteration, in which
        rank 0 collects and writes the profile.

        Raises:
            UserError: on rank 0: the file cannot be written, or the run cannot be planned.
        """
        if self._done < WARM_UP - 1:
            result = work()
        else:
            self._recorder.takes_notes = self._done == WARM_UP
            with self._engine.iteration(self._trainer.microbatches(self._trainer.batch_now)):
                result = work()
            if self._done >= WARM_UP:
                self._timed.append(self._recorder.times())
        self._done += 1
        if self._done == ITERATIONS:
            self._collect()
            self._end()
        return result

    def _collect(self) -> None:
        mine = replace(self._recorder.notes, times=self._medians()) if self._reports else None
        collected: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((mine, _budget(next(self._trainer.chunks[0].parameters()).device)), collected)
        if collected is not None:
            notes, budgets = zip(*collected, strict=True)
            budget = min((each for each in budgets if each is not None), default=None)
            self._write(sorted((each for each in notes if each is not None), key=lambda each: each.stage), budget)

    def _medians(self) -> tuple[Timed, ...]:
        """Return the times of each event of the fully recorded iteration: the medians over the timed iterations.

        Experts get different numbers of tokens in each iteration, so that an event may occur in no timed iteration; its
        times are then those of the recorded iteration.
        """
        noted, *timed = self._timed
        return tuple(
            _median([known[key] for known in timed if key in known] or [noted[key]])
            for key in map(key_of, self._recorder.notes.events)
        )


def _median(times: Sequence[Timed]) -> Timed:
    return Timed(statistics.median(time.gap_us for time in times), statistics.median(time.us for time in times))


def _budget(device: torch.device) -> float | None:
    """Return how many bytes tensors may take on a GPU, without those that CUDA, NCCL and libraries hold now.
    Return None for a CPU, because other processes share its memory.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return _USABLE * (free + torch.cuda.memory_reserved(device))


def install(path: Path, trainer: Trainer, unstable: str | None = None) -> Profiling:
    """Install the profiler, after model and optimizer are built, and return its layer. Call it on all ranks, with
    ``WITH_DMR`` patches.

    Args:
        path: file that rank 0 writes.
        unstable: a file of ``ft dmr selftest``, or None.

    Raises:
        UserError: the file ``unstable`` cannot be read.
    """
    chunks = trainer.chunks
    device = next(chunks[0].parameters()).device
    in_use = torch.cuda.memory_allocated if device.type == "cuda" else None
    cursor = ExecutionCursor()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    recorder = Recorder(
        cursor, stopwatch(device), lambda: Storages(lasting(chunks, trainer.optimizer), in_use, stage), stage
    )
    engine = ProfilingEngine(cursor, recorder, device)
    engine.watch_layers(chunks, TransformerLayer)
    engine.watch_opaque_calls(OpaqueCalls(engine, compares=False), functions_of_core(chunks[0].config))
    left_out = () if unstable is None else read_unstable(Path(unstable)).operators
    pipeline = _pipeline(chunks, trainer.microbatches(trainer.batch))
    # Taken before training, as a run with a plan takes its own: NVIDIA's trainer changes arguments while it trains.
    fingerprint = trainer.fingerprint()

    def write(records: Sequence[StageRecord], budget: float | None) -> None:
        write_trace(path, assemble(records, pipeline, measure(device), fingerprint, budget, left_out))

    said = f"the profile is complete: {path}"
    profiling = Profiling(trainer, recorder, engine, _reports_for_stage(), write, lambda: trainer.end(said))
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
