"""Exceptions that end a step other than by its commit."""

from ft.base.errors import RecoverableError


class Retry(RecoverableError):
    """No rank of this replica has committed anything of the step, so it is done again in another quorum."""


class RunIsOver(RecoverableError):
    """The other replicas have done the last step of the run, so nothing is left to do here."""
