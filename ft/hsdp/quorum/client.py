"""A replica's end of the quorum: its leader's, and its agent's."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft.control.codec import to_json
from ft.errors import FtError, RecoverableError, UserError
from ft.hsdp.quorum import wire
from ft.hsdp.quorum.limits import Limits
from ft.hsdp.quorum.link import Link
from ft.hsdp.quorum.values import NoQuorum, Quorum, Report

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
        self._left = b""
        self._link = Link(Path(run_dir), token, self._limits, self._greet, self._take, self._away)

    def hello(self, rows: Rows) -> None:
        """Begins the conversation: this life is there. Once, and first of all; returns at once.

        Args:
            rows: one of strings for each rank of the replica, in their order, for the other replicas: {"ring": address,
                "fetch": address}.
        """
        if self._own_rows is not None:
            raise FtError("hello is said once in a life")
        self._own_rows = rows
        self._link.start()

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
        with self._lock:
            last = to_json(self._last) if self._last is not None else None
            known = {str(replica): life for replica, (life, _) in self._rows.items()}
            asked = self._asked
        hello = {"kind": "hello", "replica": self.replica, "life": self.life, "rows": self._own_rows}
        frames = [wire.pack(hello | {"last": last, "known": known})]
        if asked is not None:
            frames.append(_report_frame(asked[0]))
        return [*frames, self._left] if self._left else frames

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


class ReplicaNotices:
    """The agent's: says what becomes of its replica, which its leader, when dead, cannot.

    Args:
        run_dir: of the whole run. replica: the agent's. token: of the run.
    """

    def __init__(self, run_dir: str | Path, replica: int, token: str, limits: Limits | None = None):
        self._replica, self._notice = replica, b""
        self._link = Link(
            Path(run_dir), token, limits or Limits(), lambda: [self._notice] if self._notice else [], _ignore, _ignore
        )
        self._link.start()

    def offline(self, life: int, reason: str) -> None:
        """Life ``life`` is over, or about to be: nobody should wait for it. Returns at once."""
        self._say({"what": "offline", "life": life, "reason": reason})

    def arriving(self, life: int) -> None:
        """Life ``life`` is being built. Returns at once."""
        self._say({"what": "arriving", "life": life})

    def close(self) -> None:
        """Ends the conversation."""
        self._link.close()

    def _say(self, values: dict[str, Any]) -> None:
        self._notice = wire.pack({"kind": "notice", "replica": self._replica, **values})
        self._link.send(self._notice)


def _report_frame(report: Report) -> bytes:
    return wire.pack({"kind": "report", "report": to_json(report)})


def _ignore(*_values: Any) -> None:
    pass
