"""All messages between workers, agents and the control plane, with their JSON encoding.

A worker is a training process, an agent is the supervisor process of one node, and the control plane is the process
that decides how the job recovers. Reports go from workers and agents to the control plane, orders from the control
plane to agents and workers. Every message is a frozen dataclass of JSON values; all senders use ``encode`` and all
receivers ``decode``. A field ``node`` is the name of an agent (``"n0"``), ``worker`` the name of a worker (``"n0.w3"``:
the fourth process that this agent started), and ``rank`` a logical rank: a position in the parallel grid
(TP x CP x EP x DP x PP) that outlives the process that holds it. Times are in seconds.
"""

import json
from typing import Any

from ft.base import bounded_json
from ft.job.messages.orders import (
    Close,
    Finish,
    GivenUp,
    Kill,
    Look,
    Master,
    Notice,
    Open,
    Reach,
    Repair,
    Restart,
    Resume,
    Spawn,
    Stop,
)
from ft.job.messages.reports import (
    AgentBeat,
    AgentJoined,
    AgentLeaving,
    ControlBack,
    DeviceReleased,
    EndWanted,
    HangCause,
    HangJudged,
    Looked,
    LookTaken,
    LookWanted,
    MasterChosen,
    NodeRefused,
    Observed,
    PaceJudged,
    PeerUnreached,
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
from ft.job.messages.values import ASIDE, ELSEWHERE, Beat, GroupReport, Holdings, Neighbours, Seat, Source, StepTimes
from ft.net.codec import BadMessage, from_json, to_json

__all__ = [
    "ASIDE",
    "ELSEWHERE",
    "ORDERS",
    "REPORTS",
    "AgentBeat",
    "AgentJoined",
    "AgentLeaving",
    "BadMessage",
    "Beat",
    "Close",
    "ControlBack",
    "DeviceReleased",
    "EndWanted",
    "Finish",
    "GivenUp",
    "GroupReport",
    "HangCause",
    "HangJudged",
    "Holdings",
    "Kill",
    "Look",
    "LookTaken",
    "LookWanted",
    "Looked",
    "Master",
    "MasterChosen",
    "Neighbours",
    "NodeRefused",
    "Notice",
    "Observed",
    "Open",
    "PaceJudged",
    "PeerUnreached",
    "Reach",
    "Repair",
    "Restart",
    "Resume",
    "Seat",
    "Source",
    "Spawn",
    "StepTimes",
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
    "from_values",
    "to_values",
]


REPORTS = (
    *(AgentJoined, AgentBeat, AgentLeaving, WorkerStarted, WorkerReady, WorkerExited, WorkerSilent, WorkerFailed),
    *(WorkerSuspects, WorkerReleased, WorkerArrived, WorkerRepaired, WorkerResumed, WorkerDone, Observed, Beat),
    *(DeviceReleased, MasterChosen, ControlBack, Looked, LookTaken, LookWanted, HangJudged, StepTimes, PaceJudged),
    *(PeerUnreached, NodeRefused, EndWanted),
)
ORDERS = (Close, Open, Repair, Resume, Look, Kill, Spawn, Restart, GivenUp, Master, Reach, Notice, Finish, Stop)
_KINDS = {kind.__name__: kind for kind in (*REPORTS, *ORDERS)}


def encode(message: Any) -> str:
    """Return the message as one line of JSON, without a newline."""
    return json.dumps(to_values(message), separators=(",", ":"))


def to_values(message: Any) -> dict[str, Any]:
    """Return the message as a JSON object."""
    return {"kind": type(message).__name__, **to_json(message)}


def decode(text: str | bytes) -> Any:
    """Return the message that ``encode`` wrote as ``text``.

    Raises:
        BadMessage: ``text`` is not a valid message.
    """
    try:
        values = bounded_json.loads(text, non_finite=True)
    except (ValueError, TypeError, AttributeError) as error:  # what a message contains may be anything
        raise BadMessage(f"not a message ({type(error).__name__}: {error}): {str(text)[:200]!r}") from error
    return from_values(values)


def from_values(values: Any) -> Any:
    """Return the message of which ``to_values`` has made ``values``.

    Raises:
        BadMessage: ``values`` are not those of a valid message.
    """
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadMessage(f"not a message: {str(values)[:200]!r}")
    return from_json(_KINDS[kind], {name: value for name, value in values.items() if name != "kind"})
