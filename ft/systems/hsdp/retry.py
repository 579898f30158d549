"""How a step can end other than by its commit."""

from ft.base.errors import RecoverableError


class Retry(RecoverableError):
    """Nothing of the step is committed on any rank of this replica: it is done anew, in another quorum."""


class RunIsOver(RecoverableError):
    """The other replicas have done the last step of the run: there is nothing left to do here."""
