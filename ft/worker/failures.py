"""What a worker tells of an error of its own."""

import traceback

from ft.base.errors import EpochClosed
from ft.job.messages import WorkerFailed
from ft.worker.acknowledged import send_until_acknowledged
from ft.worker.session import Session

_MESSAGE_LIMIT, _TRACE_LIMIT = 2000, 8000


def failure(session: Session, step: int, error: Exception) -> WorkerFailed:
    """What there is to report of an error; its trace goes into the worker's log. ``step``: the last committed one."""
    traceback.print_exception(error)
    kinds = [kind.__name__ for kind in type(error).__mro__[:-1]]
    message, trace = str(error)[:_MESSAGE_LIMIT], "".join(traceback.format_exception(error))[-_TRACE_LIMIT:]
    return WorkerFailed(session.worker, session.epoch, step, kinds, message, trace)


def report_failure(session: Session, step: int, error: Exception) -> None:
    """Reports an error, until the epoch is over; what comes of the end of the epoch needs no report."""
    if isinstance(error, EpochClosed) or session.closed:
        return
    session.progress.idles("failed")
    with send_until_acknowledged(session.link, failure(session, step, error)):
        session.wait_closed()
