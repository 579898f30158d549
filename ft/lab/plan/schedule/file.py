"""File format of a pipeline schedule: JSON with everything that a runner needs to execute the schedule.

A *way* is the sequence of stages that a microbatch passes through. Its name is "normal" or "swapped"; in the latter the
first two and the last two stages are swapped (CheckFree+; CheckFree, section 4.3). ``ways`` maps each name to the list
of stages. ``swapped`` lists the microbatches that take the swapped way.

``steps`` contains one list for each physical stage. The stage executes its steps in order:

- ``{"do": "forward" | "backward", "microbatch": 3, "way": "swapped", "position": 1}``: run the forward or backward pass
  of the microbatch. ``position`` is the index of this stage in the way. At position 0 the input comes from the
  embedding; at the last position the output goes to the output layer. ``chunk`` is present if stages have several
  model chunks.
- ``{"do": "transfer", "ops": [...]}``: call ``batch_isend_irecv`` once with all ops in their order, and wait for them.
  An op is ``{"op": "send" | "receive", "peer": 2, "microbatch": 3, "what": "activation" | "gradient"}``. Steps may lie
  between an op and the pass that produces or needs its tensor, so the runner has to keep the tensor meanwhile.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.systems.schedule.program import NORMAL, SWAPPED, Message, Place, Program, Routes, Step, Unit, straight

_FORMAT, _VERSION = "ft-schedule", 1
_WHAT = {False: "activation", True: "gradient"}


def as_values(program: Program, kind: str) -> dict[str, Any]:
    """Return the program as JSON values.

    Args:
        program: the schedule: for each stage its units (forward or backward of a microbatch) and messages.
        kind: name of the kind of schedule, one of :data:`ft.systems.schedule.choose.KINDS`.
    """
    routes = program.routes
    chunks = 1 + max(place.chunk for place in routes.ways[0])
    names = _way_names(routes, chunks)
    steps = [[_step(program, names, chunks, stage, step) for step in one] for stage, one in enumerate(program.stages)]
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "kind": kind,
        "stages": routes.stages,
        "chunks": chunks,
        "microbatches": len(routes.ways),
        "ways": {name: [list(place) if chunks > 1 else place.stage for place in way] for way, name in names.items()},
        "swapped": [i for i, way in enumerate(routes.ways) if names[way] == SWAPPED],
        "steps": steps,
    }


def _way_names(routes: Routes, chunks: int) -> dict[tuple[Place, ...], str]:
    normal = straight(routes.stages, chunks)
    return {way: NORMAL if way == normal else SWAPPED for way in routes.ways}


def _step(program: Program, names: Mapping, chunks: int, stage: int, step: Step) -> dict[str, Any]:
    routes = program.routes
    if not isinstance(step, Unit):
        return {"do": "transfer", "ops": [_op(chunks, stage, message) for message in step]}
    value = {
        "do": "backward" if step.backward else "forward",
        "microbatch": step.microbatch,
        "way": names[routes.ways[step.microbatch]],
        "position": routes.position(step),
    }
    return value | ({"chunk": step.chunk} if chunks > 1 else {})


def _op(chunks: int, stage: int, message: Message) -> dict[str, Any]:
    sends = message.source == stage
    value = {
        "op": "send" if sends else "receive",
        "peer": message.target if sends else message.source,
        "microbatch": message.unit.microbatch,
        "what": _WHAT[message.unit.backward],
    }
    return value | ({"chunk": message.unit.chunk} if chunks > 1 else {})


def write(values: Mapping[str, Any], path: Path) -> None:
    """Write the file, one step per line.

    Raises:
        UserError: the file cannot be written.
    """
    head = {name: value for name, value in values.items() if name != "steps"}
    stages = ["  [\n   " + ",\n   ".join(map(json.dumps, steps)) + "\n  ]" for steps in values["steps"]]
    lines = [f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items()]
    text = "{\n" + "".join(lines) + ' "steps": [\n' + ",\n".join(stages) + "\n ]\n}\n"
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"the schedule cannot be written: {error}", "give --out a path that can be written") from error
