"""The orders in which megatron-core's stages run their units: 1F1B and interleaved 1F1B.

The units of a stage are the forwards and backwards of microbatches through its model chunks, in a fixed order.
"""

from dataclasses import dataclass

from ft.base.errors import UserError
from ft.systems.schedule.units import Unit


@dataclass(frozen=True)
class Pipeline:
    """The shape of a schedule.

    Args:
        stages: P, the number of pipeline stages.
        microbatches: number of microbatches of one iteration.
        chunks: number of model chunks per stage; with more than one, the schedule is interleaved.
        comm_us: time from the end of a unit until its result is at the next stage, in microseconds.
        blocking: whether a stage waits until its own message has been sent, as megatron-core does without
            overlap_p2p_comm.
        group: number of microbatches that run through a chunk before the next chunk has its turn
            (microbatch_group_size_per_virtual_pipeline_stage); 0 for the default, P.

    Raises:
        UserError: no such schedule exists.
    """

    stages: int
    microbatches: int
    chunks: int = 1
    comm_us: float = 0.0
    blocking: bool = True
    group: int = 0

    def __post_init__(self):
        fix = "give at least one of each"
        if min(self.stages, self.microbatches, self.chunks) < 1 or self.comm_us < 0 or self.group < 0:
            raise UserError(f"no pipeline has {self}", fix)
        if self.chunks > 1:
            group, rest = self.group or self.stages, self.microbatches % (self.group or self.stages)
            if self.stages < 2 or group < self.stages or 0 < rest < self.stages:
                problem = f"an interleaved schedule cannot run {self.microbatches} microbatches in groups of {group}"
                fix = f"give two or more stages, and groups of at least {self.stages} microbatches, also the last one"
                raise UserError(problem, fix)


def orders(pipeline: Pipeline) -> tuple[tuple[Unit, ...], ...]:
    """Return each stage's units in the order in which it runs them.

    A stage begins with as many forwards as are needed to fill the stages behind it. Then it runs one forward and one
    backward in turn, and finally the remaining backwards (as megatron-core's ``get_pp_rank_microbatches`` and
    ``get_schedule_table`` define).
    """
    return tuple(_order(pipeline, stage) for stage in range(pipeline.stages))


def _order(pipeline: Pipeline, stage: int) -> tuple[Unit, ...]:
    chunks, behind = pipeline.chunks, pipeline.stages - stage - 1
    table = _table(pipeline.microbatches, chunks, pipeline.group or pipeline.stages)
    forwards = [Unit(stage, microbatch, chunk, False) for microbatch, chunk in table]
    backwards = [Unit(stage, microbatch, chunks - 1 - chunk, True) for microbatch, chunk in table]
    first = behind if chunks == 1 else 2 * behind + (chunks - 1) * (pipeline.group or pipeline.stages)
    first = min(first, len(table))
    steady = [unit for pair in zip(forwards[first:], backwards, strict=False) for unit in pair]
    return (*forwards[:first], *steady, *backwards[len(table) - first :])


def _table(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) of a stage's forwards: a group of microbatches passes one chunk after the other."""
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]


def needs(pipeline: Pipeline, unit: Unit) -> Unit | None:
    """Return the unit whose result is the input of ``unit``; it may be on the same stage.

    The result is None if the input of ``unit`` is training data.
    """
    stage, microbatch, chunk, backward = unit
    last = pipeline.stages - 1
    if not backward:
        if stage > 0:
            return Unit(stage - 1, microbatch, chunk, False)
        return Unit(last, microbatch, chunk - 1, False) if chunk > 0 else None
    if stage < last:
        return Unit(stage + 1, microbatch, chunk, True)
    if chunk < pipeline.chunks - 1:
        return Unit(0, microbatch, chunk + 1, True)
    return Unit(stage, microbatch, chunk, False)


def receiver(pipeline: Pipeline, unit: Unit) -> Unit | None:
    """Return the unit that uses the result of ``unit``: the next forward or backward of the same microbatch.

    The unit may be on the same stage. The result is None if no other unit needs the result.
    """
    stage, microbatch, chunk, backward = unit
    last = pipeline.stages - 1
    if backward:
        if stage > 0:
            return Unit(stage - 1, microbatch, chunk, True)
        return Unit(last, microbatch, chunk - 1, True) if chunk > 0 else None
    if stage < last:
        return Unit(stage + 1, microbatch, chunk, False)
    if chunk < pipeline.chunks - 1:
        return Unit(0, microbatch, chunk + 1, False)
    return Unit(stage, microbatch, chunk, True)
