"""Makes torch's norm layers usable with core's sequence parallelism."""

import copy
import functools
from collections.abc import Callable


def under_sequence_parallel(plain: Callable) -> Callable:
    """Wrap `plain`, so that under sequence parallelism the norm's parameters are marked for an all-reduce.

    Each tensor-parallel rank sees a part of the sequence only, so gradients have to be summed over these ranks. Apex's
    norm does the same.
    """

    @functools.wraps(plain)
    def new(cls, config, *args, **kwargs):
        if not config.sequence_parallel:
            return plain(cls, config, *args, **kwargs)
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        norm = plain(cls, unsplit, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new
