"""Encoding of calls to etcd's JSON API: keys, ranges, transactions, errors and authentication.

In this API all keys and values are base64 text, and all numbers are strings.
"""

import base64
import contextlib
import http.client
import json
import socket
from dataclasses import dataclass

from ft.base import bounded_json
from ft.base.errors import FtError, UserError
from ft.job.control.channel.etcd_address import USER

_NO_SUCH, _DENIED, _COMPACTED, _AWAY, _UNKNOWN_CALLER = 5, 7, 11, (1, 2, 4, 8, 10, 14), 16
"""gRPC status codes. Those in _AWAY are temporary or can be repaired: cancelled, unknown, deadline exceeded, resource
exhausted (disk quota), aborted, unavailable (no leader).
"""


class EtcdError(FtError):
    """etcd has rejected a call. ``code`` is the gRPC status code."""

    def __init__(self, code: int, message: str):
        self.code = code
        super().__init__(f"etcd refuses: {message} (code {code})")

    @property
    def is_missing(self) -> bool:
        """Return whether the object of the call, such as a lease, does not exist."""
        return self.code == _NO_SUCH


class Compacted(FtError):
    """etcd no longer has the history that was requested; read the present state instead."""


class Away(Exception):
    """This server cannot serve the call now; another server or a later attempt may."""


@dataclass(frozen=True)
class Entry:
    """The present state of one key, or one change of it.

    Attributes:
        key: name of the key.
        value: its value, or None if the key was deleted.
        revision: etcd revision of the change.
    """

    key: str
    value: str | None
    revision: int

    @classmethod
    def read(cls, kv: dict, deleted: bool = False) -> "Entry":
        value = None if deleted else _text(kv.get("value", ""))
        return cls(_text(kv["key"]), value, int(kv["mod_revision"]))


def one(key: str) -> dict:
    """Return the range that consists of one key."""
    return {"key": b64(key)}


def below(prefix: str) -> dict:
    """Return the range of all keys that begin with ``prefix``."""
    return between(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))


def between(first: str, end: str) -> dict:
    """Return the range of all keys from ``first`` to before ``end``."""
    return {"key": b64(first), "range_end": b64(end)}


def put(key: str, value: str, lease: str = "0") -> dict:
    """Return the operation that sets a key, for ``Etcd.transact``.

    Args:
        key: the key.
        value: its new value.
        lease: id of the lease with whose end the key disappears; "0": the key stays.
    """
    return {"request_put": {"key": b64(key), "value": b64(value), "lease": lease}}


def delete(asked: dict) -> dict:
    """Return the operation that deletes all keys of a range, for ``Etcd.transact``."""
    return {"request_delete_range": asked}


def holds(key: str, value: str) -> dict:
    """Return the condition that a key has this value, for ``Etcd.transact``."""
    return {"key": b64(key), "target": "VALUE", "result": "EQUAL", "value": b64(value)}


def changed_at(key: str, revision: int) -> dict:
    """Return the condition that a key's last change has this revision (0: the key does not exist), for
    ``Etcd.transact``.
    """
    return {"key": b64(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def b64(text: str) -> str:
    """Return ``text`` encoded in base64."""
    return base64.b64encode(text.encode()).decode()


def revision_of(answer: dict) -> int:
    """Return the etcd revision at which a call was answered."""
    return int(answer["header"]["revision"])


def _text(value: str) -> str:
    return base64.b64decode(value).decode(errors="replace")


def exchange(connection: http.client.HTTPConnection, path: str, data: bytes, credential: str) -> dict:
    """Send one call and return the decoded answer.

    Args:
        connection: connection to an etcd server.
        path: the call, such as "kv/put".
        data: its arguments, as JSON.
        credential: result of :func:`log_in`; "": etcd's authentication is disabled.
    """
    connection.request("POST", f"/v3/{path}", data, {"Authorization": credential} if credential else {})
    return bounded_json.loads(connection.getresponse().read())


def log_in(connection: http.client.HTTPConnection, user: tuple[str, str]) -> str:
    """Return the credential for further calls, or "" if etcd's authentication is disabled."""
    answer = exchange(connection, "auth/authenticate", json.dumps({"name": user[0], "password": user[1]}).encode(), "")
    if "not enabled" in answer.get("error", ""):
        return ""
    if answer.get("code") == 3:
        raise refused(answer["error"])
    return checked(answer)["token"]


def is_unknown_caller(answer: dict) -> bool:
    """Return whether etcd does not, or no longer, accept the credential."""
    return answer.get("code") == _UNKNOWN_CALLER or "auth store is old" in str(answer.get("error"))


def checked(answer: dict) -> dict:
    """Return the answer, or raise its error. Also used for the parts of a stream.

    Raises:
        Compacted: the requested history is gone.
        Away: the server cannot serve the call now.
        UserError: the user is rejected.
        EtcdError: any other error.
    """
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
    """Return the error for a user that etcd rejects."""
    return UserError(f"etcd refuses: {message}", f"give etcd://USER:PASSWORD@HOST:PORT, or ${USER} (USER:PASSWORD)")


def why(error: Exception) -> str:
    """Describe an exception by its type and its text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def shut(connection: http.client.HTTPConnection | None) -> None:
    """Shut down a connection that another thread may be using, so that the thread's call fails."""
    own = connection.sock if connection is not None else None
    if own is not None:
        with contextlib.suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)
