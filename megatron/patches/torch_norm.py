"""torch's norms in core's sequence parallelism."""

import copy
import functools
from collections.abc import Callable


def under_sequence_parallel(plain: Callable) -> Callable:
    """`plain` with what Apex's norm does under sequence parallelism: its parameters are marked for the
    all-reduce over the tensor-parallel ranks, each of which saw a part of the sequence only."""

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
