"""A replica's end of the quorum: its leader's, and what is said of one that is given up."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft.base.errors import FtError, RecoverableError, UserError
from ft.job.quorum import wire
from ft.job.quorum.limits import Limits
from ft.job.quorum.link import Link
from ft.job.quorum.values import NoQuorum, Quorum, Report
from ft.net.codec import to_json

Rows = list[dict[str, str]]


class QuorumClient:
    """The leader's: asks who is in the next step. It finds the server by itself, and a new one when that dies.

    Args:
        run_dir: of the whole run. replica, life: who asks. token: of the run.
    """

    def __init__(self, run_dir: str | Path, replica: int, life: int, token: str, limits: Limits | None = None):
        self.replica, self.life = replica, life
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._own_rows: Rows | None = None
        self._rows: dict[int, tuple[int, Rows]] = {}
        self._last: Quorum | None = None
        self._asked: tuple[Report, Future[Quorum]] | None = None
        self._never: FtError | None = None
        self._left = self._aside = b""
        self._link = Link(Path(run_dir), token, self._limits, self._greet, self._take, self._away)

    def arriving(self) -> None:
        """This life has begun, and will say hello soon. First of all; returns at once."""
        self._link.start()

    def hello(self, rows: Rows) -> None:
        """This life is there. Once, before it asks; returns at once.

        Args:
            rows: one of strings for each rank of the replica, in their order, for the other replicas: {"ring": address,
                "fetch": address}.
        """
        if self._own_rows is not None:
            raise FtError("hello is said once in a life")
        self._own_rows = rows
        if not self._link.is_started:
            self._link.start()
            return
        for frame in self._greet():
            self._link.send(frame)

    def ask(self, report: Report) -> "Future[Quorum]":
        """Asks for the quorum of the next step; returns at once, whatever the network does.

        Returns:
            the quorum to come. The future raises NoQuorum: there will be none for this replica; RecoverableError: no
            server is to be found for ``Limits.away_s``, or it was asked again; UserError: the token is refused.
        """
        future: Future[Quorum] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            report = replace(report, number=self._last.number if self._last else 0)
            previous, self._asked = self._asked, (report, future)
            self._aside = b""
            never = self._never
            if never is not None:
                self._asked = None
        if previous is not None:
            previous[1].set_exception(RecoverableError("it was asked again"))
        if never is not None:
            future.set_exception(never)
        else:
            self._link.send(_report_frame(report))
        return future

    def rows(self, replica: int, life: int) -> Rows:
        """What ``hello`` of that life was given. Known for all members of a quorum before its future is done.

        Raises:
            FtError: it is no member's.
        """
        with self._lock:
            if replica == self.replica and life == self.life and self._own_rows is not None:
                return self._own_rows
            found = self._rows.get(replica)
        if found is None or found[0] != life:
            raise FtError(f"the addresses of life {life} of replica {replica} are not known: it is in no quorum")
        return found[1]

    def aside(self) -> None:
        """The next question will take longer than steps do: until then this replica is waited for with patience."""
        with self._lock:
            self._aside = wire.pack({"kind": "aside"})
        self._link.send(self._aside)

    def leave(self, reason: str) -> None:
        """This life of the replica is over: it asks no more, and the others need not wait for it. What it has asked
        fails."""
        self._left = wire.pack({"kind": "leave", "reason": reason})
        self._fail(RecoverableError(f"this replica has left: {reason}"))
        self._link.send(self._left)

    def close(self) -> None:
        """Ends the conversation; what was said before is still sent, if the network takes it. A future that waits
        fails."""
        self._link.close()
        self._fail(RecoverableError("the client was closed"))

    # --- in the link's thread ---------------------------------------------------------------------------------------

    def _greet(self) -> list[bytes]:
        if self._own_rows is None:
            return [_notice(self.replica, what="arriving", life=self.life)]
        with self._lock:
            last = to_json(self._last) if self._last is not None else None
            known = {str(replica): life for replica, (life, _) in self._rows.items()}
            asked, said = self._asked, (self._aside, self._left)
        hello = {"kind": "hello", "replica": self.replica, "life": self.life, "rows": self._own_rows}
        frames = [wire.pack(hello | {"last": last, "known": known})]
        if asked is not None:
            frames.append(_report_frame(asked[0]))
        return [*frames, *filter(None, said)]

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "quorum":
            self._answered(Quorum.parse(message.get("quorum")))
        elif kind == "rows":
            with self._lock:
                self._rows[int(message["replica"])] = (int(message["life"]), message["rows"])
        elif kind == "none":
            self._fail(NoQuorum(str(message.get("reason"))))

    def _answered(self, quorum: Quorum) -> None:
        with self._lock:
            if self._asked is None or quorum.lives.get(self.replica) != self.life:
                return  # the answer to a question that was asked again since
            if self._last is not None and quorum.number <= self._last.number:
                return
            self._last, future, self._asked = quorum, self._asked[1], None
        future.set_result(quorum)

    def _away(self, seconds: float, error: UserError | None) -> None:
        if error is not None:
            self._never = error
            self._fail(error)
        elif seconds > self._limits.away_s:
            self._fail(RecoverableError(f"no quorum server is to be found for {seconds:.0f} s"))

    def _fail(self, error: FtError) -> None:
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            asked[1].set_exception(error)


class FailureNotice:
    """Says that a replica is given up, to every server of the run: nobody should wait for another life of it.

    Args:
        run_dir: of the whole run. replica: which. life: its last one, -1 if it never had one. token: of the run.
    """

    def __init__(self, run_dir: str | Path, replica: int, life: int, reason: str, token: str):
        notice = _notice(replica, what="given up", life=life, reason=reason)
        self._link = Link(Path(run_dir), token, Limits(), lambda: [notice], _ignore, _ignore)
        self._link.start()

    def close(self) -> None:
        """Ends the conversation."""
        self._link.close()


def _report_frame(report: Report) -> bytes:
    return wire.pack({"kind": "report", "report": to_json(report)})


def _notice(replica: int, **values: Any) -> bytes:
    return wire.pack({"kind": "notice", "replica": replica, **values})


def _ignore(*_values: Any) -> None:
    pass
