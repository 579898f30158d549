"""Reads the fields of megatron-core's configuration dataclasses from the sources of the installed release.

The sources are parsed and not imported: importing megatron-core imports torch, which takes seconds, and a command line
is also read by commands that do not train (``ft run``, ``ft check``).
"""

import ast
import importlib.util
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ft.base.errors import UserError

CONFIGS = {
    "ModelParallelConfig": "model_parallel_config.py",
    "TransformerConfig": "transformer/transformer_config.py",
    "MLATransformerConfig": "transformer/transformer_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
}
"""Configuration dataclasses of megatron-core, and the source file of each."""

_ENUMS = "transformer/enums.py"
_PLAIN = {"bool": bool, "int": int, "float": float, "str": str}


class _Unknown:
    """A default value that is not a literal, such as ``torch.float32``."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class Kind:
    """The type of a field, if a command-line word can be converted to it.

    Attributes:
        type: bool, int, float or str; None: no word can be converted to the field's type.
        many: whether the field is a list of values of this type.
        choices: the allowed values; empty: all.
        enum: name of the enumeration whose members' names are the choices; "": none.
    """

    type: type | None
    many: bool = False
    choices: tuple[Any, ...] = ()
    enum: str = ""


@dataclass(frozen=True)
class CoreField:
    """One field of a configuration dataclass.

    Attributes:
        name: the field's name.
        kind: its type.
        default: its default; UNKNOWN if this is no literal.
        help: the text below the field, as one line.
        spelling: the entries of the field's metadata about its command-line flag: ``arg_names``, ``default``,
            ``choices``.
        config: name of the dataclass.
    """

    name: str
    kind: Kind
    default: Any
    help: str = ""
    spelling: dict[str, Any] = field(default_factory=dict, compare=False)
    config: str = ""


def installed_core() -> Path:
    """Return the folder of the installed megatron-core.

    Raises:
        UserError: megatron-core is not installed.
    """
    found = importlib.util.find_spec("megatron.core")
    if found is None or not found.submodule_search_locations:
        raise UserError("megatron-core is not installed", "pip install megatron-core")
    return Path(next(iter(found.submodule_search_locations)))


@cache
def fields_of(core: Path, config: str) -> dict[str, CoreField]:
    """Return name -> field of a configuration dataclass and its bases.

    Args:
        core: folder of a megatron-core.
        config: name of the dataclass, a key of ``CONFIGS``.
    """
    tree = _parsed(core / CONFIGS[config])
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == config)
    found: dict[str, CoreField] = {}
    for base in body.bases:
        if isinstance(base, ast.Name) and base.id in CONFIGS:
            found |= fields_of(core, base.id)
    for each in _own_fields(core, body, config):
        found[each.name] = each
    return found


@cache
def enum_names(core: Path, enum: str) -> tuple[str, ...]:
    """Return the names of the members of one of megatron-core's enumerations; empty if it has no such enumeration."""
    for node in _parsed(core / _ENUMS).body:
        if isinstance(node, ast.ClassDef) and node.name == enum:
            assigned = [line for line in node.body if isinstance(line, ast.Assign)]
            return tuple(target.id for line in assigned for target in line.targets if isinstance(target, ast.Name))
    return ()


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _own_fields(core: Path, body: ast.ClassDef, config: str) -> Iterator[CoreField]:
    for line, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            text = " ".join(after.value.value.split())
        default, spelling, is_given = _default(line.value)
        if is_given:
            yield CoreField(line.target.id, _kind(core, line.annotation), default, text, spelling, config)


def _default(value: ast.expr | None) -> tuple[Any, dict[str, Any], bool]:
    """Return (the default, the metadata about the flag, whether the constructor has an argument for the field)."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field"):
        return (None if value is None else _literal(value)), {}, True
    default: Any = None
    spelling: dict[str, Any] = {}
    for word in value.keywords:
        if word.arg == "default":
            default = _literal(word.value)
        elif word.arg == "default_factory":
            made = {"list": [], "dict": {}, "tuple": ()}.get(ast.unparse(word.value), UNKNOWN)
            default = made if made is UNKNOWN else type(made)(made)
        elif word.arg == "metadata":
            spelling = _spelling(word.value)
        elif word.arg == "init" and _literal(word.value) is False:
            return default, {}, False
    return default, spelling, True


def _spelling(metadata: ast.expr) -> dict[str, Any]:
    for key, value in _entries(metadata):
        if key == "argparse_meta":
            return {name: read for name, entry in _entries(value) if (read := _literal(entry)) is not UNKNOWN}
    return {}


def _entries(node: ast.expr) -> Iterator[tuple[Any, ast.expr]]:
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                yield _literal(key), value


_ARITHMETIC = {ast.Mult: operator.mul, ast.Pow: operator.pow}


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or of a product or power of literals such as ``2**32``; UNKNOWN: it is neither."""
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        sides = [_literal(side) for side in (node.left, node.right)]
        numbers = all(isinstance(side, int | float) for side in sides)
        return _ARITHMETIC[type(node.op)](*sides) if numbers else UNKNOWN
    try:
        return ast.literal_eval(node)
    except ValueError:
        return UNKNOWN


def _kind(core: Path, node: ast.expr) -> Kind:
    """Return the kind of an annotation. ``Optional`` and ``| None`` are ignored."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _kind(core, ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.Name):
        names = enum_names(core, node.id)
        return Kind(str, choices=names, enum=node.id) if names else Kind(_PLAIN.get(node.id))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        sides = [each for each in (node.left, node.right) if ast.unparse(each) != "None"]
        return _kind(core, sides[0]) if len(sides) == 1 else Kind(None)
    if not isinstance(node, ast.Subscript):
        return Kind(None)
    outer = ast.unparse(node.value).rpartition(".")[2]
    if outer == "Optional":
        return _kind(core, node.slice)
    if outer in ("List", "list"):
        inner = _kind(core, node.slice)
        return Kind(inner.type, many=True, choices=inner.choices, enum=inner.enum)
    if outer == "Literal":
        values = _literal(node.slice)
        values = values if isinstance(values, tuple) else (values,)
        return Kind(type(values[0]), choices=values)
    return Kind(None)
