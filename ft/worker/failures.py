"""Reports an exception in a worker (training process) to the control plane, which decides about the recovery."""

import traceback

from ft.base.errors import EpochClosed
from ft.job.messages import WorkerFailed
from ft.worker.acknowledged import send_until_acknowledged
from ft.worker.session import Session

_MESSAGE_LIMIT, _TRACE_LIMIT = 2000, 8000


def failure(session: Session, step: int, error: Exception) -> WorkerFailed:
    """Return the report of an exception, and print its traceback to the worker's log.

    Args:
        session: the worker's session.
        step: the last committed step (all ranks have finished its optimizer update).
        error: the exception.
    """
    traceback.print_exception(error)
    kinds = [kind.__name__ for kind in type(error).__mro__[:-1]]
    message, trace = str(error)[:_MESSAGE_LIMIT], "".join(traceback.format_exception(error))[-_TRACE_LIMIT:]
    return WorkerFailed(session.worker, session.epoch, step, kinds, message, trace)


def report_failure(session: Session, step: int, error: Exception) -> None:
    """Report an exception to the control plane, and return when the control plane has closed the epoch.

    An epoch is a version of the assignment of workers to ranks; closing it begins a recovery. If the epoch is closed
    already, the exception is a consequence of that and is not reported. The arguments are those of :func:`failure`.
    """
    if isinstance(error, EpochClosed) or session.closed:
        return
    session.progress.idles("failed")
    with send_until_acknowledged(session.link, failure(session, step, error)):
        session.wait_closed()
