"""Adds the fields of option dataclasses as flags to an ``argparse`` parser, and builds the dataclasses from its result.

Every field of an option dataclass is one command-line flag. Its name is the flag's (``_`` becomes ``-``), its
annotation the type, its default the default, and the string literal below it the help text.

* ``bool`` with default False: ``--name`` switches it on.
* ``bool`` with default True: ``--no-name`` switches it off.
* ``list[T]``: one or more values. ``Literal[...]``: choices.
* ``flag(default, ...)`` overrides a flag's spelling where Megatron-LM's differs from the field's name.
"""

import argparse
import ast
import inspect
import itertools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, Literal

from ft.base.errors import Problem, UserError


def flag(
    default: Any = None,
    *,
    on: str | list[str] | None = None,
    off: str | list[str] | None = None,
    parse=None,
    choices: tuple | None = None,
    repeats: bool = False,
    least: int | None = None,
):
    """Return a dataclass field whose flag is spelt differently from its name, or parsed specially.

    Args:
        default: the field's default; a list is copied for each instance.
        on: spelling(s) that set the field (for a bool: to True).
        off: spelling(s) that set a bool field to False.
        parse: callable that converts one command-line word into the value.
        repeats: (lists) the flag may be given several times, and all its values count.
    """
    meta = {"on": _as_list(on), "off": _as_list(off), "parse": parse, "choices": choices, "repeats": repeats}
    meta["least"] = least
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=meta)
    return field(default=default, metadata=meta)


class Topic:
    """Base of the option dataclasses.

    Raises:
        UserError: a value is impossible, or two values contradict each other.
    """

    def __post_init__(self):
        problems = [*_too_small(self), *self.contradictions()]
        if problems:
            raise UserError.of(problems)

    def contradictions(self) -> Iterable[Problem]:
        """Fill in what follows from other flags; return (problem, fix) of values that do not go together."""
        return ()


def _too_small(options: Topic) -> Iterator[Problem]:
    for f in fields(options):
        value, least = getattr(options, f.name), f.metadata.get("least")
        if least is not None and isinstance(value, int | float) and value < least:
            yield f"--{f.name.replace('_', '-')} is {value}", f"give at least {least}"


def add_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add an argument group with all fields of ``cls``. The parser sets no attribute for flags that are not given."""
    docs = field_docs(cls)
    group = parser.add_argument_group(inspect.cleandoc(cls.__doc__).splitlines()[0])
    for f in fields(cls):
        if not f.init:
            continue
        on, off = spellings(f)
        kind = _value_kind(f.type)
        common = {"dest": f.name, "default": argparse.SUPPRESS, "help": _help(docs.get(f.name, ""), f)}
        if kind["type"] is bool:
            if on:
                group.add_argument(*on, action="store_true", **common)
            if off:
                help_off = "Turns off: " + common["help"]
                group.add_argument(*off, action="store_false", **{**common, "help": help_off})
        else:
            if f.metadata.get("parse"):
                kind["type"] = f.metadata["parse"]
            if f.metadata.get("choices"):
                kind["choices"] = list(f.metadata["choices"])
            if f.metadata.get("repeats"):
                kind["action"] = "extend"
            group.add_argument(*on, **kind, **common)


def spellings(f: Field) -> tuple[list[str], list[str]]:
    """Return the flags that set field ``f``, and for a bool those that clear it."""
    dashed = f.name.replace("_", "-")
    on, off = f.metadata.get("on") or [], f.metadata.get("off") or []
    if on or off:
        return on, off
    if _value_kind(f.type)["type"] is bool and f.default is True:
        return [], [f"--no-{dashed}"]
    return [f"--{dashed}"], []


def all_spellings(cls: type) -> list[str]:
    """Return every flag of an option dataclass."""
    return [s for f in fields(cls) if f.init for group in spellings(f) for s in group]


def build(cls: type, given: Mapping[str, Any]):
    """Return an instance of ``cls`` with the values of its fields in ``given``. ``__post_init__`` validates it."""
    return cls(**{f.name: given[f.name] for f in fields(cls) if f.init and f.name in given})


def field_docs(cls: type) -> dict[str, str]:
    """Return the string literal below each field of a dataclass, as one line, or its ``HELP`` if it is generated."""
    if hasattr(cls, "HELP"):
        return cls.HELP
    body = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0].body
    return {
        a.target.id: " ".join(b.value.value.split())
        for a, b in itertools.pairwise(body)
        if isinstance(a, ast.AnnAssign)
        and isinstance(b, ast.Expr)
        and isinstance(b.value, ast.Constant)
        and isinstance(b.value.value, str)
    }


def _value_kind(annotation) -> dict[str, Any]:
    """Return ``add_argument`` keywords (type, nargs, choices) for a field's annotation."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        inner = next(a for a in args if a is not type(None))
        return _value_kind(inner)
    if origin is list:
        return {**_value_kind(args[0]), "nargs": "+"}
    if origin is Literal:
        return {"type": type(args[0]), "choices": list(args)}
    return {"type": annotation}


def default_of(f: Field) -> Any:
    """Return the default of field ``f``."""
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _help(doc: str, f: Field) -> str:
    default = default_of(f)
    shown = "" if default in (None, False, True, "", []) else f" [default: {default}]"
    return (doc + shown).replace("%", "%%")


def _as_list(x: str | list[str] | None) -> list[str]:
    return [] if x is None else [x] if isinstance(x, str) else x
