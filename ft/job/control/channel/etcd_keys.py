"""Key names and signatures of the control channel on etcd.

The keys are below a prefix that only this life of this run uses (the time between two starts from the checkpoint)::

    down/head             state of the channel (``Head``), written by the control plane
    down/alive            rewritten by the control plane several times a second; expires soon after its death
    down/order/NUMBER     an order
    box/NODE/report/NUMBER  a report, until the control plane has recorded it
    box/NODE/beat         the agent's newest heartbeat
    box/NODE/taken        number of the agent's last recorded report

Each value begins with a signature (:func:`ft.net.handshake.proof`) over key and content, keyed by the run's token.
Values without a valid signature are ignored.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote, unquote

from ft.base import bounded_json
from ft.net.handshake import PROOF_BYTES, is_equal, proof

_DIGITS = 16
_HEX = PROOF_BYTES * 2
_PURPOSE = "ft-etcd-2"


@dataclass(frozen=True)
class Head:
    """State of the channel.

    Attributes:
        reign: number of control planes that the channel has had, including the present one.
        is_resumed: whether ``ControlChannel.resume`` has finished.
        first: number of the oldest order.
        following: number of the next order to be published.
        lease: etcd lease of all keys, which expires some time after the run.
    """

    reign: int
    is_resumed: bool = False
    first: int = 0
    following: int = 0
    lease: str = "0"

    def encode(self) -> str:
        return json.dumps(asdict(self))


class Keys:
    """Key names, and signatures of values.

    Args:
        prefix: path of the channel, without a slash at its end.
        token: secret of the run.
    """

    def __init__(self, prefix: str, token: str):
        self.prefix = prefix + "/"
        self.down, self.boxes = f"{prefix}/down/", f"{prefix}/box/"
        self.head, self.alive, self.orders = self.down + "head", self.down + "alive", self.down + "order/"
        self._token = token

    def order(self, number: int) -> str:
        return f"{self.orders}{number:0{_DIGITS}}"

    def report(self, node: str, number: int) -> str:
        return f"{self.reports(node)}{number:0{_DIGITS}}"

    def reports(self, node: str) -> str:
        return f"{self.box(node)}report/"

    def box(self, node: str) -> str:
        return f"{self.boxes}{quote(node, safe='')}/"

    def beat(self, node: str) -> str:
        return self.box(node) + "beat"

    def taken(self, node: str) -> str:
        return self.box(node) + "taken"

    def split(self, key: str) -> tuple[str, str, int]:
        """Return (kind, node, number) of a key.

        For example ("order", "", 3), ("report", "n0", 7) or ("head", "", 0); ("", "", 0) for any other key.
        """
        match key.removeprefix(self.prefix).split("/"):
            case ["down", ("head" | "alive") as kind]:
                return kind, "", 0
            case ["down", "order", number] if _is_number(number):
                return "order", "", int(number)
            case ["box", node, ("beat" | "taken") as kind]:
                return kind, unquote(node), 0
            case ["box", node, "report", number] if _is_number(number):
                return "report", unquote(node), int(number)
        return "", "", 0

    def sign(self, key: str, text: str) -> str:
        """Return ``text`` with its signature, as the value for ``key``."""
        return proof(self._token, _PURPOSE, "value", key, text).hex() + text

    def read(self, key: str, value: str | None) -> str | None:
        """Return the text in a value of ``key``, or None if its signature is not valid."""
        text = (value or "")[_HEX:]
        is_own = is_equal(self.sign(key, text).encode(), (value or "").encode())
        return text if is_own else None

    def read_head(self, value: str | None) -> Head | None:
        text = self.read(self.head, value)
        return None if text is None else Head(**bounded_json.loads(text))

    def read_number(self, key: str, value: str | None) -> int:
        """Return the number in a value of ``key``, or 0 if there is none."""
        text = self.read(key, value) or ""
        return int(text) if _is_number(text) else 0


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= _DIGITS


def digest(token: str) -> str:
    """Return a short digest of the token, which distinguishes the channels of different runs with the same name."""
    return proof(token, _PURPOSE, "path").hex()[:8]


def pack(count: int, text: str) -> str:
    """Return the text of a heartbeat; a larger ``count`` marks a newer heartbeat."""
    return f"{count} {text}"


def unpack(packed: str) -> tuple[int, Any]:
    """Return the (count, text) that :func:`pack` has encoded; the count is -1 in anything else."""
    count, _, text = packed.partition(" ")
    return int(count) if _is_number(count) else -1, text
