"""Failure policy: classification of an observed failure, and the action to take.

It implements DEADPOOL, table II, with the treatment of NCCL errors of FT-HSDP, section 4.2.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ft.base.step_clock import COMPUTE

RETRY, REPLACE, RESTART, STOP = "in place", "replace", "restart", "stop"
SEVERITY = (RETRY, REPLACE, RESTART, STOP)
"""Actions, from the mildest to the most severe; of several simultaneous failures, the most severe action is taken."""

TRANSIENT = "transient communication fault"
DEVICE = "GPU memory fault"
HOST = "PCIe / host / kernel fault"
NETWORK = "network or storage fault"
SOFTWARE = "software bug or unknown failure"
STRAGGLER = "straggler"
USER = "user error"
STORAGE = "checkpoint storage fault"

CONNECTION, NODE_LOST = "connection", "node lost"
_NOBODY_DIED = (CONNECTION, "standstill", "slow", "deadline", "stall", "hang")
"""What can be observed of a worker that is alive, the least severe first. A lost connection is often the consequence of
another fault.
"""
_ENDED = re.compile(r"SIG[A-Z]|signal \d|exit \d")

USER_CODE = 2
"""Exit code of a process that ended with ``UserError``."""


@dataclass(frozen=True)
class Verdict:
    """The classification of a failure, with the action to take.

    Attributes:
        category: a row of DEADPOOL, table II, STRAGGLER or USER.
        signal: a word or two for the observation that revealed the failure.
        node_suspect: whether the node is at fault, not only the process; then no further worker is started there.
        key: text that is equal for equal errors.
        device_unusable: whether the worker's device is at fault; then no further worker gets that device.
        in_vain: whether the failure is a wait that was not answered, although no process died, no error was raised, and
            no external cause of a delay was seen.
    """

    category: str
    action: str
    reason: str
    signal: str
    node_suspect: bool = False
    key: str = ""
    in_vain: bool = False
    device_unusable: bool = False


@dataclass(frozen=True)
class ErrorRule:
    """A rule for exceptions, which applies if the class and the text of the exception match.

    Attributes:
        kinds: class names, one of which the exception or a base class must have; empty: any class.
        words: words, one of which the lower-case text must contain; empty: any text.
        also: further words, one of which the text must contain as well; empty: any text.
    """

    kinds: tuple[str, ...]
    words: tuple[str, ...]
    category: str
    action: str
    node_suspect: bool = False
    also: tuple[str, ...] = ()
    device_unusable: bool = False


# In NCCL's own words (socket.cc, net_ib): the other end of a connection is gone or does not answer.
_OF_PEER = (
    *("remote peer", "remote process", "connection closed by", "connection reset", "connection refused", "timed out"),
    *("broken pipe", "no route to host", "status=12", "status=13", "retry exceeded"),
)
_STORAGE_WORDS = ("no space left", "input/output error", "read-only file system", "stale file handle")

RULES = (
    # Exceptions of this project are explicit, so they are matched before any word of the message.
    ErrorRule(("UserError",), (), USER, STOP),
    ErrorRule(("LastSaveFailed",), (), STORAGE, STOP),
    ErrorRule(("ReplaceNodeError",), (), HOST, REPLACE, True),
    ErrorRule(("DeviceUnusable",), (), DEVICE, REPLACE, device_unusable=True),
    ErrorRule(("EpochClosed",), (), TRANSIENT, RETRY),
    ErrorRule(("AbortError",), (), DEVICE, REPLACE),
    # Devices: the text distinguishes a broken device from a program that misuses it.
    ErrorRule((), ("uncorrectable", "ecc error", "xid", "double bit", "row remap"), DEVICE, REPLACE, True),
    ErrorRule((), ("device-side assert", "out of memory. tried", "cuda out of memory"), SOFTWARE, RESTART),
    ErrorRule(("OutOfMemoryError",), (), SOFTWARE, RESTART),
    # NCCL allocates beside torch: the memory that an interrupted step holds is free at the next try.
    ErrorRule((), ("cuda failure 2 ", "failure 'out of memory'"), TRANSIENT, RETRY),
    ErrorRule((), ("illegal memory access", "unspecified launch failure", "misaligned address"), DEVICE, REPLACE),
    ErrorRule((), ("fallen off the bus", "pcie", "device unavailable", "no cuda-capable device"), HOST, REPLACE, True),
    # NCCL: FT-HSDP retries errors that a dead peer causes, but no error of this side.
    ErrorRule((), ("ncclinvalid", "invalid usage", "invalid argument"), SOFTWARE, RESTART),
    ErrorRule((), ("ncclsystemerror", "ncclinternalerror", "ibv_"), TRANSIENT, RETRY, also=_OF_PEER),
    ErrorRule((), ("ncclsystemerror", "ncclinternalerror", "ibv_"), NETWORK, REPLACE, True),
    ErrorRule((), ("ncclremoteerror", "nccl communicator was aborted"), TRANSIENT, RETRY),
    ErrorRule((), ("ncclunhandledcudaerror", "cuda error"), DEVICE, REPLACE),
    ErrorRule(("AcceleratorError",), (), DEVICE, REPLACE),
    # Storage: another node may be able to use its storage.
    ErrorRule((), _STORAGE_WORDS, NETWORK, REPLACE, True),
    ErrorRule((), ("remote i/o error", "endpoint is not connected", "network is unreachable"), NETWORK, REPLACE, True),
    ErrorRule(("MemoryError",), (), HOST, REPLACE),
    ErrorRule((), ("cannot allocate memory", "too many open files", "start new thread"), HOST, REPLACE),
    # A damaged copy: use the next source of the same state, which is the checkpoint once all peers were tried.
    ErrorRule(("FallbackError",), (), NETWORK, RESTART),
    ErrorRule(("RecoverableError",), (), TRANSIENT, RETRY),
    ErrorRule(("DistNetworkError", "DistBackendError", "DistStoreError", "DistError"), (), TRANSIENT, RETRY),
    ErrorRule(("ConnectionError", "TimeoutError", "BrokenPipeError"), (), TRANSIENT, RETRY),
    ErrorRule((), ("connection closed", "connection reset", "gloo/transport", "broken pipe"), TRANSIENT, RETRY),
    ErrorRule((), (), SOFTWARE, RESTART),
)
"""The rules for exceptions; the first rule that matches applies."""


_NUMBER = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def of_error(kinds: Sequence[str], message: str) -> Verdict:
    """Classify an exception that a worker has caught. ``kinds``: names of its class and base classes, most
    specific first.
    """
    first = message.strip().splitlines()[0][:300] if message.strip() else ""
    head = f"{kinds[0] if kinds else 'an exception'}: {first}".rstrip(": ")
    said = message.lower()
    rule = next(rule for rule in RULES if _fits(rule, kinds, said))
    reason = message if rule.action == STOP else head
    # the same error names other ranks, addresses and sizes on each rank and at each attempt
    key = f"{kinds[:1]} {re.sub(_NUMBER, '#', first)}"
    return Verdict(
        rule.category, rule.action, reason, "exception", rule.node_suspect, key, device_unusable=rule.device_unusable
    )


def _fits(rule: ErrorRule, kinds: Sequence[str], said: str) -> bool:
    of_kind = not rule.kinds or any(kind in kinds for kind in rule.kinds)
    return of_kind and all(not words or any(word in said for word in words) for words in (rule.words, rule.also))


def of_exit(code: int) -> Verdict:
    """Classify a process that ended before its work was done. ``code``: its exit code, or -N if signal N killed it."""
    if code == USER_CODE:
        return Verdict(USER, STOP, "exited with code 2: its input cannot work", "exit 2", key="exit 2")
    if code < 0:
        name = signal_name(-code)
        return Verdict(HOST, REPLACE, f"killed by {name}", name, key=name)
    if code == 0:
        return Verdict(SOFTWARE, REPLACE, "ended with code 0 although the others go on", "exit 0", key="exit 0")
    return Verdict(SOFTWARE, RESTART, f"exited with code {code}", f"exit {code}", key=f"exit {code}")


def of_silence(silent_s: float, state: str) -> Verdict:
    """Classify a worker that sends no heartbeats.

    Args:
        silent_s: seconds since its last heartbeat.
        state: state letter of its process in /proc.
    """
    what = {"T": "stopped", "t": "traced", "D": "blocked in the kernel", "Z": "ended"}.get(state, "alive but silent")
    return Verdict(
        HOST,
        REPLACE,
        f"no heartbeat for {silent_s:.1f} s, its process is {what}",
        "hang",
        key="hang",
        in_vain=state in "RS",
    )


def of_stall(where: str, seconds: float, limit_s: float) -> Verdict:
    """Classify a worker that sends heartbeats and computes while the others wait for it.

    Args:
        where: the communication operation that the worker is in; "": none.
        seconds: time for which it has been there.
    """
    reason = f"in {where or 'no group operation'} for {seconds:.1f} s while others wait for it (limit {limit_s:.1f} s)"
    return Verdict(HOST, REPLACE, reason, "stall", key="stall", in_vain=True)


def of_standstill(group: str, seconds: float, limit_s: float, cause: str = "") -> Verdict:
    """Classify a standstill in which every worker waits in a communication operation.

    Args:
        group: name of the process group in which this worker waits.
        seconds: time for which it has waited.
    """
    reason = f"all workers wait, this one in {group} for {seconds:.1f} s (limit {limit_s:.1f} s)"
    reason += f"; {cause}" if cause else ""
    return Verdict(TRANSIENT, RETRY, reason, "standstill", key="connection", in_vain=True)


def of_suspicion(group: str, message: str) -> Verdict:
    """Classify a lost connection when no process has died."""
    first = message.strip().splitlines()[0][:200] if message.strip() else "connection lost"
    return Verdict(
        TRANSIENT, RETRY, f"group {group}: {first}; nobody has died", CONNECTION, key="connection", in_vain=True
    )


def of_lost_agent(node: str, why: str) -> Verdict:
    """Classify the loss of an agent and of all workers of its node: nothing else could kill or watch them."""
    return Verdict(HOST, REPLACE, f"node {node} is lost: {why}", NODE_LOST, True, key="node lost")


def of_lateness(what: str, limit_s: float, action: str = REPLACE) -> Verdict:
    """Classify a worker that lives but does not do its part of a recovery in time.

    Args:
        what: what the worker has not done, as the beginning of a sentence that goes on with "within 10 s".
    """
    category = HOST if action == REPLACE else TRANSIENT
    return Verdict(category, action, f"{what} within {limit_s:g} s", "deadline", key="deadline", in_vain=True)


def of_straggler(ratio: float, factor: float, cause: str, has_device: bool = False) -> Verdict:
    """Return the verdict on a straggler: a worker that is slower, step after step, than others with the same work.

    Its device gets no further worker if it computes slowly: another worker would be slow there as well.

    Args:
        ratio: time of its own work in a step divided by that of the others.
        factor: the ratio from which on a straggler is replaced.
        has_device: whether the worker computes on a device of its node.
    """
    reason = f"its own work takes {ratio:.2f} times as long as that of the others (limit {factor:g}), mostly {cause}"
    return Verdict(STRAGGLER, REPLACE, reason, "slow", key="straggler", device_unusable=has_device and cause == COMPUTE)


def of_drift(differences: Sequence[str]) -> Verdict:
    """Classify a worker whose settings differ from the others'. ``differences``: one sentence for each setting."""
    reason = "it is not set up as the other workers are:\n  " + "\n  ".join(differences)
    return Verdict(USER, STOP, reason, "drift", key="drift")


def gravity(action: str, observed: str) -> tuple[int, int]:
    """Return how grave a fault is among those of one recovery: the greatest is the one to name first.

    What ends the run is the gravest. Then come a lost node, the end of a process, an error, and what was observed of
    workers that live.

    Args:
        observed: the observation that revealed the fault (``Verdict.signal``).
    """
    least = len(_NOBODY_DIED)
    if observed in _NOBODY_DIED:
        grade = _NOBODY_DIED.index(observed)
    else:
        grade = least + (2 if observed == NODE_LOST else 1 if _ENDED.match(observed) else 0)
    return int(action == STOP), grade


def raised(verdict: Verdict, action: str, why: str) -> Verdict:
    """Return the verdict with a more severe action, because of earlier failures."""
    category = SOFTWARE if action in (RESTART, STOP) and verdict.action != action else verdict.category
    return replace(verdict, category=category, action=action, reason=f"{verdict.reason}; {why}")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
