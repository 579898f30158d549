"""Flags of the ``ft`` commands, parsed singly, so that one bad flag hides no other error; groups of subcommands."""

import argparse
import difflib
import importlib
import importlib.util
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from ft.base.errors import Problem, UserError

Explain = Callable[[str], tuple[Problem, str | None]]
"""Function from an unknown flag to (problem to report, flag that was probably meant or None)."""


def read_flags(
    parser: argparse.ArgumentParser, words: Sequence[str], known: Collection[str], explain: Explain
) -> tuple[argparse.Namespace, list[Problem], list[str]]:
    """Parse a command line that consists of flags only.

    A misspelt flag is reported and then parsed as the flag that was probably meant, so that errors in its value are
    reported too.

    Args:
        parser: a parser whose ``error`` raises :class:`UserError`.
        explain: what to say of a flag that is not among them.

    Returns:
        (the parsed values, the problems, flags whose values could not be parsed).
    """
    namespace, problems, doubtful = argparse.Namespace(), [], []
    for group in groups(words):
        flag, equals, value = group[0].partition("=")
        if not flag.startswith("-"):
            problems.append(_unexpected(group[0]))
            continue
        if flag not in known:
            problem, meant = explain(flag)
            problems.append(problem)
            if meant is None:
                continue
            group = [meant + equals + value, *group[1:]]
        try:
            _, rest = parser.parse_known_args(group, namespace)
            problems += [_unexpected(word) for word in rest[:1] if flag in known]
        except UserError as error:
            problems += error.problems if flag in known else []
            doubtful.append(group[0].partition("=")[0])
    return namespace, problems, doubtful


def _unexpected(word: str) -> Problem:
    return f"unexpected word {word!r} on the command line", "quote values that contain spaces"


def groups(words: Sequence[str]) -> list[list[str]]:
    """Group the words of a command line: each flag with the words that follow it.

    A word before the first flag is a group of its own.
    """
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found or not found[-1][0].startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return found


class Parser(argparse.ArgumentParser):
    """The argparse parser of an ``ft`` subcommand. Bad input raises :class:`UserError` instead of exiting.

    Args:
        is_launcher: the command line consists of flags, a script and the script's own arguments, as with torchrun.
            Problems are stored in ``problems`` of the namespace, so that the command can report them together with
            others; ``script`` is None if none is given. The parser must define the arguments ``script`` and
            ``script_args``.
        scripts_flags: returns the flags of the script itself; if one is given before the script, the error message
            says where it belongs.
    """

    def __init__(
        self, *args, is_launcher: bool = False, scripts_flags: Callable[[], Collection[str]] = tuple, **settings
    ):
        super().__init__(*args, **{"allow_abbrev": False, **settings})
        self._is_launcher, self._scripts_flags = is_launcher, scripts_flags

    def error(self, message: str):
        raise UserError(message.removeprefix("argument "), f"see {self.prog} --help")

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        """Parse as the base class does. For a launcher, all words are consumed and unknown flags become problems."""
        if not self._is_launcher:
            return super().parse_known_args(args, namespace)
        namespace, problems = namespace or argparse.Namespace(), []
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            words, problem = self._next_flag(args[at:])
            at += len(words)
            if problem is not None:
                problems.append(problem)
                continue
            try:
                super().parse_known_args([*words, "script"], namespace)
            except UserError as error:
                problems += error.problems
        rest = list(args[at + (at < len(args) and args[at] == "--") :])
        if not rest:
            problems.append(
                ("the command line names no training script", f"{self.prog} [FLAGS] SCRIPT [ITS ARGUMENTS]")
            )
        super().parse_known_args([*rest[:1]] or ["script"], namespace)
        namespace.script, namespace.script_args = (rest[0] if rest else None), rest[1:]
        namespace.problems = problems
        return namespace, []

    def _next_flag(self, words: Sequence[str]) -> tuple[list[str], Problem | None]:
        """Return (the words of the first flag with its value, the problem with that flag or None)."""
        flag, equals, _ = words[0].partition("=")
        action, problem = self._option_string_actions.get(flag), None
        if action is None:
            shown = [name for name in self._option_string_actions if name.startswith("--")]
            meant = nearest(flag.replace("_", "-"), shown)
            action = self._option_string_actions.get(meant)
            fix = f"did you mean {meant}?" if meant else f"see {self.prog} --help"
            if flag in self._scripts_flags():
                action, fix = None, f"{flag} is a flag of the script: give it after the script's name"
            problem = f"unknown flag {flag}", fix
        takes_value = not equals and (action.nargs != 0 if action is not None else _is_value(words[1:2]))
        if not takes_value:
            return list(words[:1]), problem
        is_number = action is not None and action.type is not None  # a time and a size are numbers, too
        if not words[1:] or words[1].startswith("--") or (is_number and _is_script(words[1])):
            return list(words[:1]), problem or (f"{flag} has no value", f"see {self.prog} --help")
        return list(words[:2]), problem


def nearest(unknown: str, known: Collection[str]) -> str | None:
    """Return the known flag that was probably meant: one that begins like ``unknown``, else the most similar one."""
    longer = sorted((flag for flag in known if flag.startswith(unknown)), key=len)
    near = longer[:1] if len(unknown) > len("--x") else []
    near = near or difflib.get_close_matches(unknown, known, n=1, cutoff=0.6)
    return near[0] if near else None


def _is_script(word: str) -> bool:
    return word.endswith(".py")


def _is_value(words: Sequence[str]) -> bool:
    """Return whether the word after an unknown flag is the flag's value, rather than the next flag or the script."""
    return bool(words) and not words[0].startswith("-") and not _is_script(words[0]) and not Path(words[0]).is_file()


def add_group(subparsers, name: str, modules: Sequence[str], command: str = "ft", **options: str) -> Any:
    """Add the command ``name`` with the subcommands that ``modules`` define.

    Each subcommand sets the parser default ``main``, a function that runs it with the parsed arguments. The command
    alone raises :class:`UserError`.

    Args:
        modules: modules with a function ``add_parser(subparsers)``, in the order in which the help lists them. Modules
            whose package is not installed are skipped.
        command: the command to which the new one belongs.
        options: keyword arguments of the new argparse parser, such as ``help`` and ``description``.

    Returns:
        The argparse subparsers of the new command, for further subcommands.
    """
    parser = subparsers.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def refuse(_arguments: argparse.Namespace) -> int:
        raise UserError(f"{command} {name} needs a subcommand", f"see {command} {name} --help")

    parser.set_defaults(main=refuse)
    nested = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    for module in modules:
        if importlib.util.find_spec(module.rpartition(".")[0]) is not None:
            importlib.import_module(module).add_parser(nested)
    return nested
