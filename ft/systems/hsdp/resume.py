"""Which samples are left, for a run that begins, goes on from a checkpoint, or has a replica that comes back."""

from typing import Any

from ft.base.errors import UserError
from ft.systems.hsdp import loader_state
from ft.systems.hsdp.loader_state import LoaderState
from ft.systems.hsdp.place import Place
from ft.systems.hsdp.position import KEY, parse
from ft.systems.hsdp.samples import Deal


def where_replicas_stood(
    place: Place, extra: dict[str, Any], step: int, consumed: int, block: int
) -> tuple[Deal, dict[int, int]]:
    """Who gets which samples from now on, and how many each replica has taken of its own.

    Args:
        extra: the trainer's, as the checkpoint had it; a checkpoint of a run without replicas has nothing of them.
        step, consumed: committed steps, and samples that all took in them.
        block: samples that a replica's ranks take in one microbatch.
    """
    if KEY in extra:
        deal, positions = parse(extra[KEY])
    elif consumed:
        deal, positions = Deal(1, 1), {0: consumed}
    elif place.comes_back and (noted := _noted(place)) is not None:
        # For the size of the data; where it stands it hears from the others.
        deal, positions = noted.deal, dict(noted.positions)
    else:
        deal, positions = Deal(place.replicas, block), {}
    return deal.after(positions, step, place.replicas, block)


def _noted(place: Place) -> LoaderState | None:
    """The file that all write; a replica that comes back does without one that a crash has torn."""
    try:
        return loader_state.read(place.run_dir)
    except UserError as error:
        print(f"{error.problem}; what the run began with is taken for the size of the data", flush=True)
        return None
