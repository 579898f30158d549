"""What workers, agents and the control plane tell each other: reports go up, orders come down.

Every message is a frozen dataclass of JSON values; ``encode`` and ``decode`` are the only way onto and off a wire.
``node`` names an agent (``"n0"``), ``worker`` a worker (``"n0.w3"``: the fourth process that agent started),
``rank`` a logical rank. Times are seconds.
"""

import json
from dataclasses import asdict, fields
from typing import Any

from ft.base.errors import FtError
from ft.job.messages.orders import Close, Finish, GivenUp, Kill, Master, Open, Repair, Restart, Resume, Spawn, Stop
from ft.job.messages.reports import (
    AgentBeat,
    AgentJoined,
    AgentLeaving,
    ControlBack,
    MasterChosen,
    Observed,
    WorkerArrived,
    WorkerDone,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerReleased,
    WorkerRepaired,
    WorkerResumed,
    WorkerSilent,
    WorkerStarted,
    WorkerSuspects,
)
from ft.job.messages.values import Beat, GroupReport, Holdings, Neighbours, Seat, Source

__all__ = [
    "ORDERS",
    "REPORTS",
    "AgentBeat",
    "AgentJoined",
    "AgentLeaving",
    "BadMessage",
    "Beat",
    "Close",
    "ControlBack",
    "Finish",
    "GivenUp",
    "GroupReport",
    "Holdings",
    "Kill",
    "Master",
    "MasterChosen",
    "Neighbours",
    "Observed",
    "Open",
    "Repair",
    "Restart",
    "Resume",
    "Seat",
    "Source",
    "Spawn",
    "Stop",
    "WorkerArrived",
    "WorkerDone",
    "WorkerExited",
    "WorkerFailed",
    "WorkerReady",
    "WorkerReleased",
    "WorkerRepaired",
    "WorkerResumed",
    "WorkerSilent",
    "WorkerStarted",
    "WorkerSuspects",
    "decode",
    "encode",
]


class BadMessage(FtError):
    """Bytes that are no message: not JSON, of an unknown kind, or with other fields than that kind has."""


REPORTS = (
    *(AgentJoined, AgentBeat, AgentLeaving, WorkerStarted, WorkerReady, WorkerExited, WorkerSilent, WorkerFailed),
    *(WorkerSuspects, WorkerReleased, WorkerArrived, WorkerRepaired, WorkerResumed, WorkerDone, Observed, Beat),
    *(MasterChosen, ControlBack),
)
ORDERS = (Close, Open, Repair, Resume, Kill, Spawn, Restart, GivenUp, Master, Finish, Stop)
_KINDS = {kind.__name__: kind for kind in (*REPORTS, *ORDERS)}
_NESTED = {
    ("WorkerReleased", "groups"): [GroupReport],
    ("WorkerArrived", "groups"): [GroupReport],
    ("WorkerReleased", "holdings"): Holdings,
    ("AgentBeat", "workers"): {"": Beat},
    ("Open", "seats"): {"": Seat},
    ("Repair", "sources"): {"": Source},
    ("Repair", "rebuilt"): {"": Neighbours},
}


def encode(message: Any) -> str:
    """One line of JSON, without its newline."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}, separators=(",", ":"))


def decode(text: str | bytes) -> Any:
    """The message that ``encode`` made.

    Raises:
        BadMessage: it is none.
    """
    try:
        values = json.loads(text)
        name = values.pop("kind")
        kind = _KINDS[name]
        known = {f.name for f in fields(kind)}
        if not values.keys() <= known:
            raise BadMessage(f"{name} has no field {sorted(values.keys() - known)}")
        return kind(**{key: _inflate(_NESTED.get((name, key)), value) for key, value in values.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadMessage(f"not a message ({type(error).__name__}: {error}): {text[:200]!r}") from error


def _inflate(shape: Any, value: Any) -> Any:
    if shape is None:
        return value
    if isinstance(shape, list):
        return [shape[0](**item) for item in value]
    if isinstance(shape, dict):
        return {key: shape[""](**item) for key, item in value.items()}
    return shape(**value)
