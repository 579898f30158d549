"""Errors of a fetch. After either of them the destination holds a mixture of old and new bytes and must not be used."""

from ft.base.errors import FallbackError, RecoverableError


class Refused(RecoverableError):
    """No source holds this state any more, or none could deliver it in time; the fetch is to be retried for the next
    step.
    """


class BadState(FallbackError):
    """The sources do not hold the state that was asked for: other tensors, that of another rank, or damaged bytes."""
