"""From what was seen of a failure to what is done about it (paper, table II; FT-HSDP, section 4.2)."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

RETRY, REPLACE, RESTART, STOP = "in place", "replace", "restart", "stop"
SEVERITY = (RETRY, REPLACE, RESTART, STOP)
"""Actions; of several, the last one here is what is done."""

TRANSIENT = "transient communication fault"
DEVICE = "GPU memory fault"
HOST = "PCIe / host / kernel fault"
NETWORK = "network or storage fault"
SOFTWARE = "software bug or unknown failure"
USER = "user error"

USER_CODE = 2
"""What ``UserError`` exits with."""


@dataclass(frozen=True)
class Verdict:
    """What a failure is taken for, and what is done.

    Attributes:
        category: a row of the paper's table II, or USER. action: RETRY, REPLACE, RESTART or STOP.
        reason: in words. signal: what gave it away, in a word or two.
        node_suspect: the node is at fault, not only the process: no further worker is started there.
        key: the same for the same error. in_vain: nothing has died or raised an error, and nothing from outside was
            seen to hold a process: somebody was waited for in vain.
    """

    category: str
    action: str
    reason: str
    signal: str
    node_suspect: bool = False
    key: str = ""
    in_vain: bool = False


@dataclass(frozen=True)
class Rule:
    """If an exception is of one of ``kinds`` (empty: any) and its text has one of ``words`` (empty: any)."""

    kinds: tuple[str, ...]
    words: tuple[str, ...]
    category: str
    action: str
    node_suspect: bool = False


_STORAGE_WORDS = ("no space left", "input/output error", "read-only file system", "stale file handle")

RULES = (
    # What our own code says is meant, and comes before any word of the message.
    Rule(("UserError",), (), USER, STOP),
    Rule(("ReplaceNodeError",), (), HOST, REPLACE, True),
    Rule(("EpochClosed",), (), TRANSIENT, RETRY),
    # Devices: the text tells a broken device from a program that misuses it.
    Rule((), ("uncorrectable", "ecc error", "xid", "double bit", "row remap"), DEVICE, REPLACE, True),
    Rule((), ("device-side assert", "out of memory. tried", "cuda out of memory"), SOFTWARE, RESTART),
    Rule(("OutOfMemoryError",), (), SOFTWARE, RESTART),
    Rule((), ("illegal memory access", "unspecified launch failure", "misaligned address"), DEVICE, REPLACE),
    Rule((), ("fallen off the bus", "pcie", "device unavailable", "no cuda-capable device"), HOST, REPLACE, True),
    # NCCL: FT-HSDP retries what a dead peer causes, and nothing that points at this side.
    Rule((), ("ncclinvalid", "invalid usage", "invalid argument"), SOFTWARE, RESTART),
    Rule((), ("ncclsystemerror", "ncclinternalerror", "ibv_"), NETWORK, REPLACE, True),
    Rule((), ("ncclremoteerror", "nccl communicator was aborted"), TRANSIENT, RETRY),
    Rule((), ("ncclunhandledcudaerror", "cuda error"), DEVICE, REPLACE),
    Rule(("AcceleratorError",), (), DEVICE, REPLACE),
    # Storage: a remote or full disk may serve another node.
    Rule((), _STORAGE_WORDS, NETWORK, REPLACE, True),
    Rule((), ("remote i/o error", "endpoint is not connected", "network is unreachable"), NETWORK, REPLACE, True),
    Rule(("MemoryError",), (), HOST, REPLACE),
    Rule((), ("cannot allocate memory", "too many open files"), HOST, REPLACE),
    # A copy that turned out damaged: the next source of the same state, which is the checkpoint once peers are through.
    Rule(("FallbackError",), (), NETWORK, RESTART),
    Rule(("RecoverableError",), (), TRANSIENT, RETRY),
    Rule(("DistNetworkError", "DistBackendError", "DistStoreError", "DistError"), (), TRANSIENT, RETRY),
    Rule(("ConnectionError", "TimeoutError", "BrokenPipeError"), (), TRANSIENT, RETRY),
    Rule((), ("connection closed", "connection reset", "gloo/transport", "broken pipe"), TRANSIENT, RETRY),
    Rule((), (), SOFTWARE, RESTART),
)
"""The table for exceptions; the first rule that fits counts."""


def of_error(kinds: Sequence[str], message: str) -> Verdict:
    """A worker has caught an exception of its own. ``kinds``: its class and bases, most special first."""
    first = message.strip().splitlines()[0][:300] if message.strip() else ""
    head = f"{kinds[0] if kinds else 'an exception'}: {first}".rstrip(": ")
    said = message.lower()
    rule = next(rule for rule in RULES if _fits(rule, kinds, said))
    reason = message if rule.action == STOP else head
    return Verdict(rule.category, rule.action, reason, "exception", rule.node_suspect, f"{kinds[:1]} {first}")


def _fits(rule: Rule, kinds: Sequence[str], said: str) -> bool:
    of_kind = not rule.kinds or any(kind in kinds for kind in rule.kinds)
    return of_kind and (not rule.words or any(word in said for word in rule.words))


def of_exit(code: int) -> Verdict:
    """A process has ended before its work was done. ``code``: as it exited, or -N: killed by signal N."""
    if code == USER_CODE:
        return Verdict(USER, STOP, "exited with code 2: its input cannot work", "exit 2", key="exit 2")
    if code < 0:
        name = signal_name(-code)
        return Verdict(HOST, REPLACE, f"killed by {name}", name, key=name)
    if code == 0:
        return Verdict(SOFTWARE, REPLACE, "ended with code 0 although the others go on", "exit 0", key="exit 0")
    return Verdict(SOFTWARE, RESTART, f"exited with code {code}", f"exit {code}", key=f"exit {code}")


def of_silence(silent_s: float, state: str) -> Verdict:
    """A worker sends no heartbeats. ``state``: its letter in /proc."""
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
    """A worker beats and computes while the others wait for it."""
    reason = f"in {where or 'no group operation'} for {seconds:.1f} s while others wait for it (limit {limit_s:.1f} s)"
    return Verdict(HOST, REPLACE, reason, "stall", key="stall", in_vain=True)


def of_standstill(group: str, seconds: float, limit_s: float) -> Verdict:
    """Everybody waits for somebody."""
    reason = f"all workers wait, this one in {group} for {seconds:.1f} s (limit {limit_s:.1f} s)"
    return Verdict(TRANSIENT, RETRY, reason, "standstill", key="connection", in_vain=True)


def of_suspicion(group: str, message: str) -> Verdict:
    """A connection was lost and nobody has died."""
    first = message.strip().splitlines()[0][:200] if message.strip() else "connection lost"
    return Verdict(
        TRANSIENT, RETRY, f"group {group}: {first}; nobody has died", "connection", key="connection", in_vain=True
    )


def of_lost_agent(node: str, why: str) -> Verdict:
    """With its agent, all workers of a node are lost together: nobody could kill or watch them."""
    return Verdict(HOST, REPLACE, f"node {node} is lost: {why}", "node lost", True, key="node lost")


def of_lateness(what: str, limit_s: float, action: str = REPLACE) -> Verdict:
    """A worker lives and does not do its part of a recovery."""
    category = HOST if action == REPLACE else TRANSIENT
    return Verdict(category, action, f"{what} within {limit_s:g} s", "deadline", key="deadline", in_vain=True)


def of_drift(differences: Sequence[str]) -> Verdict:
    """A worker is set up in another way than those before it. ``differences``: sentences, one for each setting."""
    reason = "it is not set up as the other workers are:\n  " + "\n  ".join(differences)
    return Verdict(USER, STOP, reason, "drift", key="drift")


def raised(verdict: Verdict, action: str, why: str) -> Verdict:
    """The same with a stronger action, because of what happened before."""
    category = SOFTWARE if action in (RESTART, STOP) and verdict.action != action else verdict.category
    return replace(verdict, category=category, action=action, reason=f"{verdict.reason}; {why}")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
