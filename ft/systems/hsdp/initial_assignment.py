"""Initial assignment of samples to FT-HSDP replicas, when a replica starts.

The assignment says which replica gets which samples, and the positions are the numbers of samples that the replicas
have taken (:mod:`ft.systems.hsdp.samples`). The replica may begin a run, resume from a checkpoint, or return to a run
that continues.
"""

from typing import Any

from ft.base.errors import UserError
from ft.systems.hsdp import loader_state
from ft.systems.hsdp.loader_state import LoaderState
from ft.systems.hsdp.place import ReplicaContext
from ft.systems.hsdp.position import KEY, parse
from ft.systems.hsdp.samples import SampleAssignment


def initial_assignment(
    place: ReplicaContext, extra: dict[str, Any], step: int, consumed: int, block: int
) -> tuple[SampleAssignment, dict[int, int]]:
    """Return which replica gets which samples from now on, and the position of each replica in its stream: the number
    of samples that it has taken.

    Args:
        place: this replica.
        extra: the trainer's extra state from the checkpoint; it contains an assignment if the checkpoint was written by
            a run with replicas.
        step: number of committed steps.
        consumed: samples that all replicas together have taken in these steps.
        block: samples that all ranks of a replica together take in one microbatch.
    """
    if KEY in extra:
        assignment, positions = parse(extra[KEY])
    elif consumed:
        # The checkpoint was written by a run without replicas, in which a single stream contained all samples.
        assignment, positions = SampleAssignment(1, 1), {0: consumed}
    elif place.comes_back and (stored := _read_loader_state(place)) is not None:
        # This determines only how many samples the dataset needs; the assignment and the positions that are used for
        # training come with the state that this replica fetches from the others.
        assignment, positions = stored.assignment, dict(stored.positions)
    else:
        assignment, positions = SampleAssignment(place.replicas, block), {}
    return assignment.after(positions, step, place.replicas, block)


def _read_loader_state(place: ReplicaContext) -> LoaderState | None:
    """Return the contents of the file ``loader_state``; None if it is missing or damaged, as a returning replica can do
    without it.
    """
    try:
        return loader_state.read(place.run_dir)
    except UserError as error:
        print(
            f"{error.problem}; the size of the dataset is computed as at the beginning of the run instead", flush=True
        )
        return None
