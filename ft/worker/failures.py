"""Reports an exception of this worker to the control plane."""

import traceback

from ft.base.errors import EpochClosed
from ft.job.messages import WorkerFailed
from ft.worker.acknowledged import send_until_acknowledged
from ft.worker.session import Session

_MESSAGE_LIMIT, _TRACE_LIMIT = 2000, 8000


def failure(session: Session, step: int, error: Exception) -> WorkerFailed:
    """Return the report of an exception, and print its traceback to the log. ``step``: the last committed step."""
    traceback.print_exception(error)
    kinds = [kind.__name__ for kind in type(error).__mro__[:-1]]
    message, trace = str(error)[:_MESSAGE_LIMIT], "".join(traceback.format_exception(error))[-_TRACE_LIMIT:]
    return WorkerFailed(session.worker, session.epoch, step, kinds, message, trace)


def report_failure(session: Session, step: int, error: Exception) -> None:
    """Report an exception until the epoch is over. Consequences of the end of the epoch are not reported."""
    if isinstance(error, EpochClosed) or session.closed:
        return
    session.progress.idles("failed")
    with send_until_acknowledged(session.link, failure(session, step, error)):
        session.wait_closed()
