"""What a board in etcd consists of, and how its owner's entries are told from anybody else's.

Below ``PREFIX``, which only this life of this run uses::

    down/head             the state of the board (``Head``), of the control plane
    down/alive            rewritten several times a second by the control plane; gone soon after it is
    down/order/NUMBER     an order
    box/NODE/report/NUMBER  a report, until it is on record
    box/NODE/beat         the agent's newest heartbeat
    box/NODE/taken        the number of its last report on record

Each value carries a proof (:func:`ft.net.handshake.proof`) over its key and itself. A value without one is ignored.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote, unquote

from ft.net.handshake import PROOF_BYTES, is_equal, proof

_DIGITS = 16
_HEX = PROOF_BYTES * 2
_PURPOSE = "ft-etcd-2"


@dataclass(frozen=True)
class Head:
    """State of the board.

    Attributes:
        reign: counts the control planes that this board has had. is_resumed: ``ControlChannel.resume`` is done.
        first: number of the oldest order. following: of the next one to be published.
        lease: of all that shall be gone some time after the run.
    """

    reign: int
    is_resumed: bool = False
    first: int = 0
    following: int = 0
    lease: str = "0"

    def encode(self) -> str:
        return json.dumps(asdict(self))


class Keys:
    """Names and signatures.

    Args:
        prefix: without a slash at its end. token: of the run.
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
        """A key's (kind, node, number): ("order", "", 3), ("report", "n0", 7), ("head", "", 0); else ("", "", 0)."""
        match key.removeprefix(self.prefix).split("/"):
            case ["down", ("head" | "alive") as kind]:
                return kind, "", 0
            case ["down", "order", number] if number.isdecimal():
                return "order", "", int(number)
            case ["box", node, ("beat" | "taken") as kind]:
                return kind, unquote(node), 0
            case ["box", node, "report", number] if number.isdecimal():
                return "report", unquote(node), int(number)
        return "", "", 0

    def sign(self, key: str, text: str) -> str:
        """The value for ``key`` that says ``text``."""
        return proof(self._token, _PURPOSE, "value", key, text).hex() + text

    def read(self, key: str, value: str | None) -> str | None:
        """What a member of the run has said with ``value``; None: none has."""
        text = (value or "")[_HEX:]
        is_own = is_equal(self.sign(key, text).encode(), (value or "").encode())
        return text if is_own else None

    def read_head(self, value: str | None) -> Head | None:
        text = self.read(self.head, value)
        return None if text is None else Head(**json.loads(text))

    def read_number(self, key: str, value: str | None) -> int:
        """0 where there is none."""
        return int(self.read(key, value) or 0)


def digest(token: str) -> str:
    """Tells boards of different runs with the same name apart."""
    return proof(token, _PURPOSE, "path").hex()[:8]


def pack(count: int, text: str) -> str:
    """A heartbeat: the larger ``count`` is the newer one."""
    return f"{count} {text}"


def unpack(packed: str) -> tuple[int, Any]:
    count, _, text = packed.partition(" ")
    return int(count), text
