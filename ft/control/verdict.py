"""From what was seen of a failure to what is done about it (paper, table II; FT-HSDP, section 4.2)."""

from dataclasses import dataclass

RETRY, REPLACE, RESTART, STOP = "in place", "replace", "restart", "stop"

TRANSIENT = "transient communication fault"
DEVICE = "device memory fault"
HOST = "host fault"
NETWORK = "network or storage fault"
SOFTWARE = "software bug or unknown"
USER = "user error"

_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    15: "SIGTERM",
}


@dataclass(frozen=True)
class Verdict:
    """``category``: of table II. ``action``: RETRY, REPLACE, RESTART or STOP. ``node_suspect``: start no more there."""

    category: str
    action: str
    reason: str
    signal: str
    node_suspect: bool = False


_BY_TEXT = (
    (("uncorrectable ecc", "xid", "double bit"), DEVICE, True),
    (("out of memory",), DEVICE, False),
    (("cuda error", "device-side assert", "illegal memory access"), DEVICE, True),
    (("no space left", "input/output error", "read-only file system", "stale file handle"), NETWORK, True),
)
"""What is in the message of an exception -> category, node suspect."""

_BY_KIND = (
    ("UserError", USER, STOP),
    ("FallbackError", SOFTWARE, RESTART),
    ("ReplaceNodeError", HOST, REPLACE),
    ("RecoverableError", TRANSIENT, RETRY),
    ("AcceleratorError", DEVICE, REPLACE),
    ("OutOfMemoryError", DEVICE, REPLACE),
    ("MemoryError", HOST, REPLACE),
    ("DistBackendError", TRANSIENT, RETRY),
    ("DistNetworkError", TRANSIENT, RETRY),
    ("ConnectionError", TRANSIENT, RETRY),
    ("TimeoutError", TRANSIENT, RETRY),
)
"""Class name of an exception or of a base of it -> category, action; the first that matches counts."""


def of_exit(code: int, attached: bool) -> Verdict:
    """A worker's process has ended before its work was done."""
    if code == 2:
        return Verdict(USER, STOP, "exited with code 2: its input cannot work", "exit 2")
    if code < 0:
        name = _SIGNALS.get(-code, f"signal {-code}")
        return Verdict(HOST, REPLACE, f"killed by {name}", name)
    if code == 0 and attached:
        return Verdict(SOFTWARE, REPLACE, "exited although its work is not done", "exit 0")
    return Verdict(SOFTWARE, RESTART, f"exited with code {code}", f"exit {code}")


def of_silence(silent_s: float, state: str) -> Verdict:
    """A worker sends no heartbeats."""
    what = {"T": "stopped", "D": "blocked in the kernel", "Z": "ended"}.get(state, "alive but silent")
    return Verdict(HOST, REPLACE, f"no heartbeat for {silent_s:.1f} s, the process is {what}", "hang")


def of_stall(where: str, seconds: float, limit_s: float) -> Verdict:
    """A worker computes while the others wait for it."""
    return Verdict(
        HOST, REPLACE, f"in {where} for {seconds:.1f} s while the others wait for it (limit {limit_s:.1f} s)", "stall"
    )


def of_error(kinds: list[str], message: str) -> Verdict:
    """A worker has caught an exception of its own. ``kinds``: its class and bases, most special first."""
    head = f"{kinds[0] if kinds else 'an exception'}: {message.splitlines()[0] if message else ''}".rstrip(": ")
    said = message.lower()
    for name, category, action in _BY_KIND[:4]:
        if name in kinds:
            return Verdict(category, action, head, "exception", node_suspect=name == "ReplaceNodeError")
    for words, category, suspect in _BY_TEXT:
        if any(word in said for word in words):
            return Verdict(category, REPLACE, head, "exception", suspect)
    for name, category, action in _BY_KIND[4:]:
        if name in kinds:
            return Verdict(category, action, head, "exception")
    return Verdict(SOFTWARE, RESTART, head, "exception")


def of_suspicion(group: str, message: str) -> Verdict:
    """A connection was lost and nobody has died."""
    first = message.strip().splitlines()[0][:200] if message.strip() else "connection lost"
    return Verdict(TRANSIENT, RETRY, f"group {group}: {first}", "connection")


def of_lost_agent(node: str, seconds: float) -> Verdict:
    return Verdict(HOST, REPLACE, f"node {node}: nothing heard of its agent for {seconds:.1f} s", "node lost", True)


def elevated(verdict: Verdict, times: int) -> Verdict:
    """A transient failure that keeps coming back is not transient (paper, section VI-B)."""
    return Verdict(
        verdict.category,
        REPLACE,
        f"{verdict.reason}; the {times}th time, so no longer taken for transient",
        verdict.signal,
    )
