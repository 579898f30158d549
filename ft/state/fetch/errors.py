"""What a fetch can end with. Either way the destination holds a mixture by then and must not be used."""

from ft.base.errors import FallbackError, RecoverableError


class Refused(RecoverableError):
    """No source has this state any more, or none could deliver it in time: to be tried again for the next step."""


class BadState(FallbackError):
    """What the sources have is not the state that was asked for: other tensors, another rank's, or damaged bytes."""
