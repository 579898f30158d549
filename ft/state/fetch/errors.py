"""Exceptions of a state fetch, by which a rank gets its training state from the same rank of healthy replicas.

After either exception, the destination tensors hold a mixture of old and new bytes and must not be used.
"""

from ft.base.errors import FallbackError, RecoverableError


class Refused(RecoverableError):
    """No source holds this state any more, or none could deliver it in time. The fetch has to be retried at the next
    step.
    """


class BadState(FallbackError):
    """No source has the requested state: the sources' tensors have other names, shapes or dtypes, belong to another
    rank, or arrive damaged.
    """
