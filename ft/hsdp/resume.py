"""Which samples are left, for a run that begins, goes on from a checkpoint, or has a replica that comes back."""

from typing import Any

from ft.hsdp import loader_state
from ft.hsdp.place import Place
from ft.hsdp.position import KEY, parse
from ft.hsdp.samples import Deal


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
    elif place.comes_back and (noted := loader_state.read(place.run_dir)) is not None:
        # For the size of the data; where it stands it hears from the others.
        deal, positions = noted.deal, dict(noted.positions)
    else:
        deal, positions = Deal(place.replicas, block), {}
    return deal.after(positions, step, place.replicas, block)
