"""What goes over the wire to and from an etcd server: keys, ranges, transactions, errors and the log-in.

All values of the interface are base64, all numbers strings.
"""

import base64
import contextlib
import http.client
import json
import socket
from dataclasses import dataclass

from ft.base.errors import FtError, UserError
from ft.job.control.channel.etcd_address import USER

_NO_SUCH, _DENIED, _COMPACTED, _AWAY, _UNKNOWN_CALLER = 5, 7, 11, (1, 2, 4, 8, 10, 14), 16
"""gRPC's status codes. Those of _AWAY pass, or can be mended: cancelled, unknown, deadline, exhausted (disk quota),
aborted, unavailable (no leader)."""


class EtcdError(FtError):
    """etcd has answered, and will not do it. ``code``: gRPC's."""

    def __init__(self, code: int, message: str):
        self.code = code
        super().__init__(f"etcd refuses: {message} (code {code})")

    @property
    def is_missing(self) -> bool:
        """A lease that is over, say."""
        return self.code == _NO_SUCH


class Compacted(FtError):
    """The history that was asked for is kept no longer: ask for the present."""


class Away(Exception):
    """This server cannot do it now."""


@dataclass(frozen=True)
class Entry:
    """One key as it is, or as it was changed to.

    Attributes:
        value: None: deleted. revision: of the change.
    """

    key: str
    value: str | None
    revision: int

    @classmethod
    def read(cls, kv: dict, deleted: bool = False) -> "Entry":
        value = None if deleted else _text(kv.get("value", ""))
        return cls(_text(kv["key"]), value, int(kv["mod_revision"]))


def one(key: str) -> dict:
    """The range of a single key."""
    return {"key": b64(key)}


def below(prefix: str) -> dict:
    """The range of all keys that begin with ``prefix``."""
    return between(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))


def between(first: str, end: str) -> dict:
    """The range of all keys from ``first`` to before ``end``."""
    return {"key": b64(first), "range_end": b64(end)}


def put(key: str, value: str, lease: str = "0") -> dict:
    """For ``transact``."""
    return {"request_put": {"key": b64(key), "value": b64(value), "lease": lease}}


def delete(asked: dict) -> dict:
    """For ``transact``: all in a range."""
    return {"request_delete_range": asked}


def holds(key: str, value: str) -> dict:
    """For ``transact``: the key has this value."""
    return {"key": b64(key), "target": "VALUE", "result": "EQUAL", "value": b64(value)}


def changed_at(key: str, revision: int) -> dict:
    """For ``transact``: the key's last change; 0: it is not there."""
    return {"key": b64(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def revision_of(answer: dict) -> int:
    return int(answer["header"]["revision"])


def _text(value: str) -> str:
    return base64.b64decode(value).decode(errors="replace")


def exchange(connection: http.client.HTTPConnection, path: str, data: bytes, credential: str) -> dict:
    connection.request("POST", f"/v3/{path}", data, {"Authorization": credential} if credential else {})
    return json.loads(connection.getresponse().read())


def log_in(connection: http.client.HTTPConnection, user: tuple[str, str]) -> str:
    """What has to go with each call; "" where everybody may do everything."""
    answer = exchange(connection, "auth/authenticate", json.dumps({"name": user[0], "password": user[1]}).encode(), "")
    if "not enabled" in answer.get("error", ""):
        return ""
    if answer.get("code") == 3:
        raise refused(answer["error"])
    return checked(answer)["token"]


def is_unknown_caller(answer: dict) -> bool:
    """The pass is not, or no longer, a valid one."""
    return answer.get("code") == _UNKNOWN_CALLER or "auth store is old" in str(answer.get("error"))


def checked(answer: dict) -> dict:
    """The answer, unless it is an error; of a stream's, too."""
    error = answer.get("error")
    if error is None:
        return answer
    if isinstance(error, dict):
        answer, error = {"code": error.get("grpc_code", 2), **error}, str(error.get("message"))
    code = int(answer.get("code", 2))
    if code == _COMPACTED:
        raise Compacted(error)
    if code in _AWAY:
        raise Away(error)
    if code in (_DENIED, _UNKNOWN_CALLER) or "user name is empty" in error:
        raise refused(error)
    raise EtcdError(code, error)


def refused(message: str) -> UserError:
    return UserError(f"etcd refuses: {message}", f"give etcd://USER:PASSWORD@HOST:PORT, or ${USER} (USER:PASSWORD)")


def why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def shut(connection: http.client.HTTPConnection | None) -> None:
    own = connection.sock if connection is not None else None
    if own is not None:
        with contextlib.suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)
