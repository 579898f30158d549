"""Compares the size of each room of the repository with the budget in ``tools/size_budget.toml``.

    python tools/size_budget.py            # a table of all rooms; exit code 1 if one is above its budget
    python tools/size_budget.py --write    # make the present sizes the budget

A room is a folder of the table. Its size is the number of lines, files and dataclasses of the Python files in it that
git lists, without those of the rooms inside it. A record of msgspec (``Struct``) counts as a dataclass.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = Path(__file__).with_suffix(".toml")
HEAD = """\
# Most lines, files and dataclasses (or msgspec records) of Python in each room. A test holds each room to it.
# A change that needs more raises the figure here, and says in its commit message why the room has to grow.
# After a room has shrunk, `python tools/size_budget.py --write` makes its present size the budget.

"""
Sizes = dict[str, tuple[int, int, int]]
_RECORD = re.compile(r"^\s*@(?:dataclasses\.)?dataclass\b|^\s*class \w+\(.*\bStruct\b", re.MULTILINE)


def measured(files: Iterable[Path], rooms: Iterable[str]) -> Sizes:
    """Return (lines, files, dataclasses) of each room.

    Args:
        files: the Python files of the repository, relative to its root.
        rooms: names of folders, relative to the root. A file belongs to the longest that holds it.
    """
    by_length = sorted(rooms, key=len, reverse=True)
    sizes = dict.fromkeys(by_length, (0, 0, 0))
    for file in files:
        room = next((room for room in by_length if file.is_relative_to(room)), None)
        if room is not None:
            text = (ROOT / file).read_text()
            lines, count, records = sizes[room]
            sizes[room] = (lines + text.count("\n"), count + 1, records + len(_RECORD.findall(text)))
    return sizes


def excess(sizes: Sizes, budget: Mapping[str, tuple[int, int, int]]) -> list[str]:
    """Return a sentence for each figure of a room that is above the room's budget."""
    return [
        f"{room} has {has} {what}, and its budget is {most}: take something away, or raise the figure in"
        f" tools/{BUDGET.name} and say in the commit message why the room has to grow"
        for room, limits in budget.items()
        for what, has, most in zip(("lines", "files", "dataclasses"), sizes[room], limits, strict=True)
        if has > most
    ]


def python_files() -> list[Path]:
    """Return the Python files that git lists and that are there, relative to the repository's root."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def read_budget() -> dict[str, tuple[int, int, int]]:
    """Return the budget: room -> (lines, files, dataclasses)."""
    return {room: tuple(limits) for room, limits in tomllib.loads(BUDGET.read_text()).items()}


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="make the present sizes the budget")
    options = parser.parse_args()
    budget = read_budget()
    sizes = measured(python_files(), budget)
    if options.write:
        BUDGET.write_text(HEAD + "".join(f'"{room}" = {list(sizes[room])}\n' for room in sorted(sizes)))
        return 0
    print(f"{'room':28}{'lines':>8}{'of':>8}{'files':>7}{'of':>5}{'dataclasses':>13}{'of':>5}")
    for room, (lines, files, records) in sorted(sizes.items()):
        most = budget[room]
        print(f"{room:28}{lines:8}{most[0]:8}{files:7}{most[1]:5}{records:13}{most[2]:5}")
    problems = excess(sizes, budget)
    print("\n".join(problems), file=sys.stderr, end="\n" * bool(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
