"""Run the DMR profiler: warm-up iterations, one iteration that is recorded in full, timed iterations, and the profile.

The profile lists the operators of an iteration, their durations, idle times and memory use. The planner of DMR (dual
modular redundancy, SpareTrain) reads it to decide when each operator is executed a second time.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ft.systems.dmr.plan.schedule import Pipeline
from ft.systems.dmr.plan.trace_file import write_trace
from ft.systems.dmr.profile.assemble import assemble
from ft.systems.dmr.profile.costs import measure
from ft.systems.dmr.profile.engine import ProfilingEngine
from ft.systems.dmr.profile.events import StageRecord, Timed
from ft.systems.dmr.profile.recorder import Recorder

Result = TypeVar("Result")
WARM_UP, TIMED = 2, 5
ITERATIONS = WARM_UP + 1 + TIMED
"""Number of training steps after which the profile is complete and the run ends."""


@dataclass(frozen=True)
class Target:
    """Where a profile is written and what it contains besides the measurements.

    Args:
        path: path of the profile.
        fingerprint: the properties of the run that a plan depends on (``ft.systems.dmr.plan.trace.FINGERPRINT``).
        pipeline: schedule of the run.
        budget: memory of a device in bytes; None if unknown.
        writes: True if this rank contributes the record of its pipeline stage.
        unstable: names of operators that are not reproducible (``ft.systems.dmr.runtime.unstable``).
    """

    path: Path
    fingerprint: Mapping[str, object]
    pipeline: Pipeline
    budget: float | None
    writes: bool
    unstable: frozenset[str] = frozenset()


class Profiling:
    """Runs and records the iterations of a profiling run, in place of
    ``ft.systems.dmr.runtime.protection.IterationVerifier``.

    Args:
        engine: follows the iteration.
        recorder: records operators, waits and memory of the iteration.
        stage: pipeline stage of this rank.
        target: where the profile is written.
        end: called with a reason, ends the run after the current step. All ranks call it in the same step.
    """

    def __init__(
        self, engine: ProfilingEngine, recorder: Recorder, stage: int, target: Target, end: Callable[[str], None]
    ):
        self._engine, self._recorder, self._stage, self._target, self._end = engine, recorder, stage, target, end
        self._done = 0
        self._timed: list[dict[tuple, Timed]] = []

    def before_update(self) -> None:
        """Notify the engine that the optimizer step is about to begin."""
        if self._engine.is_active:
            self._engine.before_update()

    def run_iteration(self, step: int, microbatches: int, work: Callable[[], Result]) -> Result:
        """Run ``work``, a whole iteration, record it, and return its result. Collective in the last iteration, in which
        rank 0 collects and writes the profile.

        Args:
            step: number of the iteration.
            microbatches: number of microbatches of the iteration.
            work: runs the iteration.

        Raises:
            UserError: on rank 0: the file cannot be written, or the run cannot be planned.
        """
        if self._done < WARM_UP - 1:
            result = work()
        else:
            self._recorder.takes_notes = self._done == WARM_UP
            with self._engine.iteration(microbatches):
                result = work()
            if self._done >= WARM_UP:
                self._timed.append(self._recorder.times())
        self._done += 1
        if self._done == ITERATIONS:
            self._write()
            self._end(f"the profile is complete: {self._target.path}")
        return result

    def _write(self) -> None:
        mine = StageRecord(self._stage, self._recorder.notes, self._medians()) if self._target.writes else None
        collected: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, collected)
        if collected is None:
            return
        records = sorted((each for each in collected if each is not None), key=lambda each: each.stage)
        target = self._target
        costs = measure(self._engine.findings.device)
        rest = (target.fingerprint, target.budget, target.unstable)
        write_trace(target.path, assemble(records, target.pipeline, costs, *rest))

    def _medians(self) -> tuple[Timed, ...]:
        """Return the times of each event of the fully recorded iteration: the medians over the timed iterations.

        Experts get different numbers of tokens in each iteration, so that an event may occur in no timed iteration; its
        times are then those of the recorded iteration.
        """
        noted, *timed = self._timed
        return tuple(
            _median([known[key] for known in timed if key in known] or [noted[key]])
            for key in (event.key for event in self._recorder.notes.events)
        )


def _median(times: Sequence[Timed]) -> Timed:
    return Timed(statistics.median(time.gap_us for time in times), statistics.median(time.us for time in times))


def device_memory(device: torch.device) -> float | None:
    """Return the memory of a device in bytes; None on a CPU, whose memory is shared with other processes."""
    return float(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None
