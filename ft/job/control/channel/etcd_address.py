"""Parser of etcd URLs: servers, path and user."""

import os
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from ft.base.errors import UserError

SCHEME = "etcd://"
USER = "ETCDCTL_USER"
"""Environment variable from which etcdctl reads USER:PASSWORD; this keeps the password off the command line."""


@dataclass(frozen=True)
class Address:
    """The content of an etcd URL.

    Attributes:
        servers: (host, port) of each server.
        path: path without slashes at its ends.
        user: (name, password), or None.
    """

    servers: tuple[tuple[str, int], ...]
    path: str
    user: tuple[str, str] | None

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Parse ``etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...][/PATH]``; a missing user is read from $ETCDCTL_USER.

        Raises:
            UserError: ``url`` is not valid.
        """
        parts = urlsplit(url)
        login, _, hosts = parts.netloc.rpartition("@")
        try:
            servers = []
            for server in hosts.split(","):
                host, _, port = server.rpartition(":")
                if not host:
                    raise ValueError(f"no HOST:PORT: {server!r}")
                servers.append((host.strip("[]"), int(port)))
        except ValueError as error:
            raise UserError(
                f"{without_password(url)} cannot be read ({error})", "give etcd://HOST:PORT[,HOST:PORT...]"
            ) from error
        name, _, password = (login or os.environ.get(USER, "")).partition(":")
        user = ((unquote(name), unquote(password)) if login else (name, password)) if name else None
        return cls(tuple(servers), parts.path.strip("/"), user)

    def __str__(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self.servers)


def without_password(url: str) -> str:
    """Return ``url`` with its password replaced by asterisks, for messages."""
    head, at, tail = url.rpartition("@")
    return f"{SCHEME}{head.removeprefix(SCHEME).partition(':')[0]}:***@{tail}" if at else url
