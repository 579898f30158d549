"""Read the traceback, or the stack of a fatal signal, with which a worker's log ends.

The formats are those of Python, of ``faulthandler``, of C++'s terminate, of torch (every line begins with "[rank3]: ")
and of this project's own "error: ... fix: ...".
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ft.faults.first_cause import Frame, Raised

_RANK = re.compile(r"^\[rank\d+\]: ?")
_HEAD = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+),? in (?P<name>.+)$')
_EXCEPTION = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: ?(?P<message>.*))?$")
_FATAL = "Fatal Python error: "
_STACK = re.compile(r"^(Current thread|Thread) 0x.*\(most recent call first\):$")
_THROWN = re.compile(r"^terminate called after throwing an instance of '(?P<kind>.+)'$")
_WHAT = re.compile(r"^\s*what\(\):\s+(?P<message>.*)$")
_REFUSED = re.compile(r"^(?:\S+: )?error: (?P<message>.*)$")
_WARNING = re.compile(r"\S.*:\d+: \w*Warning: |\[?W\d{4} ")
_MOST_LINES = 80


@dataclass(frozen=True)
class Crash:
    """What the end of a log says.

    Attributes:
        chain: the exceptions, the original one first; empty for a stack without exception.
        text: the lines, without the prefix that names the rank.
        is_last: whether nothing but warnings follows in the log.
    """

    chain: tuple[Raised, ...]
    text: str
    is_last: bool


def parse(text: str) -> Crash | None:
    """Return the last traceback, stack or refusal in a text; None if there is none."""
    raw = text.splitlines()
    lines = [_RANK.sub("", line) for line in raw]
    begins = [at for at, line in enumerate(lines) if line == _HEAD]
    others = [at for at, line in enumerate(lines) if line.startswith(_FATAL) or _THROWN.match(line)]
    if begins and (not others or begins[-1] > others[-1]):
        return _of_exception(lines, _start_of_chain(lines, begins))
    if others:
        # Python's fault handler writes a stack after C++ has named the exception, so both belong together.
        start = others[-2] if len(others) > 1 and _THROWN.match(lines[others[-2]]) else others[-1]
        before = _of_exception(lines[:start], _start_of_chain(lines, begins)) if begins else None
        return _of_abort(lines, start) if before is None or not before.is_last else before
    refused = [at for at, line in enumerate(lines) if _REFUSED.match(line)]
    return _of_refusal(lines, refused[-1]) if refused else None


def parse_trace(trace: str) -> tuple[Raised, ...]:
    """Return the exceptions of one traceback, the original one first; empty if the text is none."""
    found = parse(trace)
    return found.chain if found is not None else ()


def _start_of_chain(lines: Sequence[str], begins: Sequence[int]) -> int:
    """Return the line at which the last traceback begins, with those that it is chained to."""
    place = len(begins) - 1
    while place > 0:
        between = [line for line in lines[begins[place - 1] : begins[place]] if line.strip()]
        if not between or between[-1] not in _CHAINED:
            break
        place -= 1
    return begins[place]


def _of_exception(lines: Sequence[str], start: int) -> Crash:
    chain: list[Raised] = []
    at = start
    while True:
        raised, at = _one_exception(lines, at)
        chain.append(raised)
        following = next((i for i in range(at, len(lines)) if lines[i].strip()), len(lines))
        if following >= len(lines) or lines[following] not in _CHAINED:
            break
        at = next((i for i in range(following, len(lines)) if lines[i] == _HEAD), len(lines))
        if at >= len(lines):
            break
    return Crash(tuple(chain), _shortened(lines[start:at]), _is_last(lines, at))


def _one_exception(lines: Sequence[str], start: int) -> tuple[Raised, int]:
    """Return the exception whose traceback begins at line ``start``, and the line after it."""
    at, frames = start + 1, []
    while at < len(lines) and lines[at].startswith("  "):
        if match := _FRAME.match(lines[at]):
            frames.append(Frame(match["file"], int(match["line"]), match["name"]))
        at += 1
    match = _EXCEPTION.match(lines[at]) if at < len(lines) else None
    if match is None:
        return Raised(("an exception",), "", tuple(frames)), at
    message = [match["message"] or ""]
    at += 1
    while at < len(lines) and lines[at].startswith("  "):
        message.append(lines[at])
        at += 1
    kind = match["kind"].rpartition(".")[2]
    return Raised((kind,), "\n".join(message).strip(), tuple(frames)), at


def _of_abort(lines: Sequence[str], start: int) -> Crash:
    """Return the stack that Python's fault handler wrote, with the C++ exception before it if there is one."""
    thrown, message = _THROWN.match(lines[start]), ""
    at = start + 1
    if thrown is not None and at < len(lines) and (what := _WHAT.match(lines[at])):
        message, at = what["message"], at + 1
    frames, end, in_first = [], at, True
    for place in range(at, len(lines)):
        line = lines[place]
        if match := _FRAME.match(line):
            if in_first:
                frames.append(Frame(match["file"], int(match["line"]), match["name"]))
        elif _STACK.match(line):
            in_first = not frames
        elif line.strip() and not line.startswith((_FATAL, "Extension modules:", "  ")):
            break
        end = place + 1
    chain = (Raised((thrown["kind"],), message, tuple(reversed(frames))),) if thrown is not None else ()
    return Crash(chain, _shortened(_first_stack(lines[start:end])), _is_last(lines, end))


def _first_stack(lines: Sequence[str]) -> list[str]:
    """Return the lines up to the end of the first thread's stack, which is that of the thread that failed."""
    stacks = [at for at, line in enumerate(lines) if _STACK.match(line)]
    current = next((at for at in stacks if lines[at].startswith("Current")), stacks[0] if stacks else None)
    if current is None:
        return list(lines)
    end = next((at for at in range(current + 1, len(lines)) if not lines[at].startswith("  ")), len(lines))
    return [*lines[: stacks[0]], *lines[current:end]]


def _of_refusal(lines: Sequence[str], start: int) -> Crash:
    end = start + 1
    while end < len(lines) and lines[end].startswith("  "):
        end += 1
    message = _REFUSED.match(lines[start])["message"]
    said = "\n".join([message, *lines[start + 1 : end]])
    return Crash((Raised(("UserError",), said),), "", _is_last(lines, end))


def _is_last(lines: Sequence[str], end: int) -> bool:
    return not any(line.strip() and not line.startswith("  ") and not _WARNING.match(line) for line in lines[end:])


def _shortened(lines: Sequence[str]) -> str:
    """Return the lines as one text; of a very long stack, its beginning and its end."""
    kept = list(lines)
    while kept and not kept[-1].strip():
        kept.pop()
    if len(kept) > _MOST_LINES:
        half = _MOST_LINES // 2
        kept = [*kept[:half], f"  ... {len(kept) - 2 * half} lines left out ...", *kept[-half:]]
    return "\n".join(kept)
