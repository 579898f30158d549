"""Format numbers and tables as plain text for a terminal."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from ft.base.errors import plain


class Plain:
    """A stream on which control characters become visible; all else is that of the stream ``below`` it."""

    def __init__(self, below: TextIO):
        self.below = below

    def write(self, text: str) -> int:
        return self.below.write(plain(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


def steer(stream: TextIO, codes: str) -> None:
    """Write codes that steer the terminal; other control characters of a :class:`Plain` stream become visible."""
    below = getattr(stream, "below", stream)
    below.write(codes)
    below.flush()


def seconds(value: float | None) -> str:
    """Return a duration with about three significant digits: "65 ms", "1.24 s", "2 min 05 s", "60.0 days"."""
    if value is None or not math.isfinite(value):
        return "-"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms" if value >= 0.01 or value == 0 else f"{value * 1000:.1f} ms"
    if value < 99.95:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{value / 86400:,.1f} days"
    return f"{hours} h {minutes:02d} min"


def percent(value: float | None) -> str:
    """Return a share as a percentage with one decimal, "-" for None."""
    return "-" if value is None else f"{100 * value:.1f} %"


def count(number: int, word: str) -> str:
    """Return a number with its noun, such as "1 step", "2 steps" or "2 switches"."""
    return f"{number} {word}" if number == 1 else f"{number} {word}{'es' if word.endswith('ch') else 's'}"


def spans(numbers: Iterable[int]) -> str:
    """Return whole numbers as text, with neighbours joined: "0-3, 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return an aligned text table with columns as wide as their longest cell; those in ``right`` are right-aligned."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(_cell(line, widths, i, right) for i in range(len(head))).rstrip() for line in lines)


def _cell(line: Sequence[str], widths: Sequence[int], i: int, right: Sequence[int]) -> str:
    return line[i].rjust(widths[i]) if i in right else line[i].ljust(widths[i])


def left_out(*parts: str) -> str:
    """Return the first line of a planner's or simulation's output: what its model leaves out, before any figure."""
    return f"Left out: {'; '.join(parts)}."


def capitalised(text: str) -> str:
    """Return a text with a capital letter at its beginning; unlike ``str.capitalize``, the rest stays as it is."""
    return text[:1].upper() + text[1:]


def shortened(text: str, width: int) -> str:
    """Return ``text`` as one line of at most ``width`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3].rstrip() + "..."
