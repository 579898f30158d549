"""Scenarios of planners: the keys of a file, flags of the same names that override it, and where each value is from."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ft.base import files, quantities
from ft.base.errors import Problems, UserError
from ft.base.flags import nearest

GIVEN, ASSUMED = "given", "assumed"
YEAR = 365.25 * 86400.0


@dataclass(frozen=True)
class Key:
    """One key of a scenario file, and the flag of the same name, in which a "_" is a "-".

    Attributes:
        read: converts text, or a value of the file, to the value; raises ValueError.
        metavar: placeholder in help.
        help: what it is.
        default: value if it is not given; None: there is none.
        origin: where the default is from.
        group: title of the group of flags; files may have the keys of a group in a section.
        repeats: whether the flag may be given several times; ``read`` then takes a list of texts.
    """

    read: Callable[[Any], Any]
    metavar: str
    help: str
    default: Any = None
    origin: str = ASSUMED
    group: str = "scenario"
    repeats: bool = False

    @property
    def said(self) -> str:
        """Return the text of ``--help`` for this key: what it is, its default, and where the default is from."""
        if self.default in (None, ()):
            return self.help
        return f"{self.help} (default: {shown(self.default, self)}, {self.origin})"


def time(least: float = 0.0, most: float = 1000 * YEAR) -> Callable[[Any], float]:
    """Return a reader of times with a unit; a plain number in a file is in seconds."""

    def read(value: Any) -> float:
        found = quantities.seconds(value, least, bare=None if isinstance(value, str) else 1.0)
        if found > most:
            raise ValueError(f"more than {most / YEAR:,.0f} years")
        return found

    return read


def one_of(names: Sequence[str]) -> Callable[[Any], str]:
    """Return a reader that accepts only the given names."""

    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"none of {', '.join(names)}")
        return value

    return read


def yes_or_no(value: Any) -> bool:
    """Read "true" or "false"."""
    return one_of(("true", "false"))(str(value).lower()) == "true"


def shown(value: Any, key: Key) -> str:
    """Return a value as text that its key reads."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if key.metavar == "TIME":
        unit, size = ("h", 3600.0) if value >= 3600 else ("s", 1.0)
        return f"{value / size:.10g}{unit}"
    return f"{value / 1e9:g}B" if key.read is quantities.amount else str(value)


def flag(name: str) -> str:
    """Return the flag of a key."""
    return f"--{name.replace('_', '-')}"


class Answers(NamedTuple):
    """What a command line and its file say.

    Attributes:
        values: key -> value.
        origin: key -> where its value is from: ``GIVEN``, ``ASSUMED``, or a sentence.
        bad: keys with a wrong value, or given by a former name; they have no value, and are not missing either.
        problems: everything that is wrong.
    """

    values: dict[str, Any]
    origin: dict[str, str]
    bad: set[str]
    problems: Problems


@dataclass(frozen=True)
class Keys:
    """The keys of a planner.

    Attributes:
        known: name -> key.
        required: names of the keys that must have a value.
        renamed: name that a key once had -> name of the key.
    """

    known: Mapping[str, Key]
    required: Sequence[str] = ()
    renamed: Mapping[str, str] | None = None

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add the scenario file and every key as a flag; values stay text, so that all problems are told at once."""
        parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="file of the keys; flags override it")
        titles: dict[str, Any] = {}
        for name, key in self.known.items():
            if key.group not in titles:
                titles[key.group] = parser.add_argument_group(key.group)
            action, about = "append" if key.repeats else "store", key.said.replace("%", "%%")
            about += "; required" if name in self.required else "; may be repeated" if key.repeats else ""
            titles[key.group].add_argument(flag(name), metavar=key.metavar, action=action, help=about)
        parser.parse_known_args = lambda words=None, space=None: self._parse(parser, words or (), space)  # type: ignore

    def read(self, given: argparse.Namespace) -> Answers:
        """Return the values of a parsed command line and of its file."""
        problems, values = Problems(), {name: key.default for name, key in self.known.items()}
        problems.add(given.problems)
        texts: dict[str, Any] = {}
        with problems:
            texts |= self._file(given.scenario)
        texts |= {name: text for name in self.known if (text := getattr(given, name)) is not None}
        origin, bad = {name: key.origin for name, key in self.known.items()}, set(given.renamed)
        for name, text in texts.items():
            try:
                values[name], origin[name] = self.known[name].read(text), GIVEN
            except ValueError as error:
                bad.add(name)
                problems.add([(f"{flag(name)} {text}: {error}", f"{name}: {self.known[name].help}")])
        missing = [name for name in self.required if values[name] is None and name not in bad]
        about = {name: self.known[name].help for name in missing}
        problems.add([(f"{flag(name)} is missing: {about[name]}", f"give {flag(name)}") for name in missing])
        return Answers(values, origin, bad, problems)

    def _parse(self, parser: argparse.ArgumentParser, words: Sequence[str], space: argparse.Namespace | None) -> tuple:
        """Parse the words of the command into strings, and note unknown flags as ``problems`` of the namespace, and the
        keys that were given by another name as ``renamed``.
        """
        space = space or argparse.Namespace()
        actions = parser._option_string_actions
        for action in parser._actions:
            if action.dest != "help":
                setattr(space, action.dest, action.default)
        for name, value in parser._defaults.items():
            setattr(space, name, value)
        space.problems, space.renamed, rest = [], set(), list(words)
        while rest:
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            if not word.startswith("--") and word != "-h":
                if space.scenario is not None:
                    space.problems.append((f"unexpected word {word!r}", "quote values that contain spaces"))
                space.scenario = word
            elif name in ("-h", "--help"):
                parser.print_help()
                parser.exit()
            elif name not in actions:
                space.problems.append(self._unknown(name, actions))
                space.renamed |= {(self.renamed or {}).get(name.removeprefix("--").replace("-", "_"), "")}
                if rest and not rest[0].startswith("--"):
                    rest.pop(0)
            elif actions[name].nargs == 0:
                setattr(space, actions[name].dest, True)
            elif not equals and (not rest or rest[0].startswith("--")):
                space.problems.append((f"{name} has no value", actions[name].help))
            else:
                _note(space, actions[name], value if equals else rest.pop(0))
        return space, []

    def _unknown(self, word: str, known: Mapping[str, Any]) -> tuple[str, str]:
        """Return the problem of an unknown flag, with the name that replaces it, or the nearest one."""
        now = (self.renamed or {}).get(word.removeprefix("--").replace("-", "_"))
        if now:
            return f"{word} has another name", f"give {flag(now)}: {self.known[now].help}"
        meant = nearest(word, [each for each in known if each.startswith("--")])
        return f"unknown flag {word}", f"did you mean {meant}?" if meant else "see --help"

    def _file(self, path: str | None) -> dict[str, Any]:
        """Return the values of a file by the names of the keys, from all sections.

        Raises:
            UserError: the file cannot be read, or has unknown keys.
        """
        content = {} if path is None else files.read_structured(path, "the scenario")
        if not isinstance(content, dict):
            raise UserError(f"{path} holds no keys", "give the keys of a scenario")
        flat: dict[str, Any] = {}
        for name, value in content.items():
            flat |= value if isinstance(value, dict) else {name: value}
        flat = {str(name).replace("-", "_"): value for name, value in flat.items()}
        problems = []
        for name in flat.keys() - set(self.known):
            near = (self.renamed or {}).get(name) or nearest(name, self.known)
            problems.append((f"{path} has the unknown key {name!r}", f"use {near}" if near else "see the list of keys"))
        if problems:
            raise UserError.of(problems)
        return flat


def _note(space: argparse.Namespace, action: argparse.Action, text: str) -> None:
    repeats = isinstance(action, argparse._AppendAction)
    setattr(space, action.dest, [*(getattr(space, action.dest) or ()), text] if repeats else text)
