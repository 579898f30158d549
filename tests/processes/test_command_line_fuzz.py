"""Bad values and bad files on the command lines of ``ft``: each ends soon, with a message and without a traceback."""

import argparse
import importlib
import itertools
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft import cli
from ft.base.flags import Parser

CPU_S, DEADLINE_S = 10, 60
VALUES = (
    *(
        "",
        "x",
        "-1",
        "0",
        "nan",
        "inf",
        "1e400",
        "999999999999",
        "9**9**9",
        "h[0-99999999999]",
        "\x1b[31mred",
        "\u00b2",
    ),
    *("1" * 5000, "[" * 5000, "../" * 2000),
)
VALID = {
    "run": "nowhere.py",
    "check": "nowhere.py",
    "selftest": "--nodes 2",
    "plan snapshot": "--nodes 2",
    "plan schedule": "--pp 2 --microbatches 4",
    "plan spare place": "--groups 4 --redundancy 2",
    "plan spare reorder": "--groups 4 --redundancy 2 --failed 1",
    "dmr profile": "--out profile.json",
    "dmr selftest": "--runs 0",
}
"""Words without which a command refuses every line; those of commands that would start a run make them refuse it."""
TEXTS = {
    "deep.json": "[" * 200_000,
    "deep-objects.json": '{"a":' * 100_000,
    "large-number.json": '{"a": 1e400}',
    "digits.json": "1" * 10_000,
    "empty.json": "",
    "list.json": "[]",
    "number.json": "5",
    "nulls.json": "\0" * 1000,
    "escapes.json": '{"\\u001b[31m": {"x": null}, "steps": [null], "world": "\\u001b[2J"}',
    "deep.yaml": "[" * 20_000,
    "aliases.yaml": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)),
    "itself.yaml": "a: &a [*a]\n",
    "date.yaml": "2001-99-99",
    "deep.toml": "a = " + "[" * 20_000,
    "binary.json": "\ufffd\udcff",
}
RECORDS = ("events.jsonl", "journal.jsonl", "status.json", "control.json", "commits.jsonl", "replicas.json")
LINES = "[" * 200_000 + '\n{"kind": 5}\n[]\n5\n{"wall": 1e400, "event": {}}\n{"event": "\\u001b[2J", "wall": 1}\n'


def _leaves(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield path.strip(), parser
    for name, one in (below[0].choices if below else {}).items():
        yield from _leaves(one, f"{path} {name}")


def _commands() -> dict[str, argparse.ArgumentParser]:
    subparsers = Parser(prog="ft").add_subparsers()
    for _, module, function in cli._SUBCOMMANDS:
        getattr(importlib.import_module(module), function)(subparsers)
    return {path: each for name, one in subparsers.choices.items() for path, each in _leaves(one, name)}


COMMANDS = _commands()
SAME = {"plan spares", "plan interval", "plan dmr"}
"""Commands whose input is read as that of others is: plan buy and dmr estimate."""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    for name, text in TEXTS.items():
        (folder / name).write_text(text, errors="surrogateescape")
    os.mkfifo(folder / "pipe")
    (folder / "run").mkdir()
    for name in RECORDS:
        (folder / "run" / name).write_text(LINES)
    made = [str(folder / name) for name in (*TEXTS, "pipe", "run")]
    return [*made, "/dev/zero", "/nowhere/x", "/proc/self/mem", str(folder)]


def _lines(command: str, files: list[str]) -> Iterator[list[str]]:
    """Return command lines with one bad value or file each."""
    base = VALID.get(command, "").split()
    actions = [action for action in COMMANDS[command]._actions if action.nargs != 0]
    positional = [action for action in actions if not action.option_strings and action.nargs != "..."]
    filled = ["nowhere" for action in positional if action.nargs != "?" and not base]
    for action in positional if command != "run" else ():  # ft run would start the script, whatever is in it
        for file in files:
            yield [
                *command.split(),
                *(base if command != "check" else ()),
                file,
                *([file] if action.nargs == "+" else []),
            ]
    for action in actions:
        if action.option_strings and "_" not in action.option_strings[0]:  # --run_dir is another spelling of --run-dir
            names = f"{action.metavar} {action.dest}".lower()
            takes_file = any(word in names for word in ("file", "dir", "path", "folder", "trace", "topology", "plan"))
            values = [*VALUES]
            written = action.dest in ("out", "plot", "picture")  # to write to a pipe waits for its reader
            values += [file for file in files if takes_file and not (written and file.endswith("pipe"))]
            for value in values:
                yield [*command.split(), f"{action.option_strings[0]}={value}", *base, *filled]


def _execute(words: list[str], out: Path, folder: Path) -> None:
    os.setsid()
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    sys.setrecursionlimit(1000)
    target, null = os.open(out, os.O_RDWR | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
    for number, source in enumerate((null, target, target)):
        os.dup2(source, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    code = 70
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _problem(words: list[str], out: Path, folder: Path) -> str | None:
    """Execute a command line in a child; return what is wrong with how it ended."""
    if not (child := os.fork()):
        _execute(words, out, folder)
    late = threading.Timer(DEADLINE_S, os.killpg, (child, signal.SIGKILL))
    late.start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    late.cancel()
    said = out.read_text(errors="replace")
    if "Traceback" in said or code < 0:
        return f"exit code {code}: {said[-500:]}"
    return f"control characters: {said[:200]!r}" if "\x1b" in said else None


@pytest.mark.parametrize("one_in", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - SAME))
def test_bad_input_ends_soon_with_a_message(command, one_in, files, tmp_path):
    """``one_in``: 7 for every seventh line: as 15 values are no multiple of it, each option meets other ones."""
    import matplotlib
    import scipy.optimize
    import torch  # noqa: F401 (children need not import them)

    matplotlib.use("agg")
    assert scipy.optimize
    (tmp_path / "here").mkdir()
    bad = {}
    for words in itertools.islice(_lines(command, files), 0, None, one_in):
        if (problem := _problem(words, tmp_path / "said", tmp_path / "here")) is not None:
            bad[" ".join(word[:60] for word in words)] = problem
    assert bad == {}
