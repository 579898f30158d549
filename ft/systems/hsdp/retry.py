"""Exceptions that end a training step of an FT-HSDP replica without a commit."""

from ft.base.errors import RecoverableError


class Retry(RecoverableError):
    """No rank of this replica has committed the step, so the replica repeats it with a new set of replicas (quorum)."""


class RunIsOver(RecoverableError):
    """The other replicas have done the last step of the run, so this replica has nothing left to do."""


class PassIsOver(RecoverableError):
    """A forward and backward pass of a step is complete whose gradients this replica only keeps; the step goes on."""
