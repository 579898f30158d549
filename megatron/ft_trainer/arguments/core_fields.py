"""Reads the fields of megatron-core's configuration dataclasses from the sources of the installed release.

The sources are parsed and not imported: importing megatron-core imports torch, which takes seconds, and a command line
is also read by commands that do not train (``ft run``, ``ft check``).
"""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ft.base.errors import UserError

CONFIGS = {
    "ModelParallelConfig": "model_parallel_config.py",
    "TransformerConfig": "transformer/transformer_config.py",
    "MLATransformerConfig": "transformer/transformer_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
}
"""Configuration dataclasses of megatron-core, and the source file of each."""

_PLAIN = {"bool": bool, "int": int, "float": float, "str": str}


@dataclass(frozen=True)
class CoreField:
    """One field of a configuration dataclass.

    Attributes:
        name: the field's name.
        type: the annotation of an option with the field's values: bool, int, float, str, a Literal of the allowed
            values, or a list of one of these; None: no word can be converted to the field's type.
        default: its default; None if this is no literal, such as ``torch.float32``.
        help: the text below the field, as one line.
        spelling: the entries of the field's metadata about its command-line flag: ``arg_names``, ``default``,
            ``choices``.
    """

    name: str
    type: Any
    default: Any
    help: str = ""
    spelling: dict[str, Any] = field(default_factory=dict, compare=False)


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
    """Return name -> field of a configuration dataclass (a key of ``CONFIGS``) and its bases, of the release in
    ``core``.
    """
    tree = _parsed(core / CONFIGS[config])
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == config)
    found: dict[str, CoreField] = {}
    for base in body.bases:
        if isinstance(base, ast.Name) and base.id in CONFIGS:
            found |= fields_of(core, base.id)
    for each in _own_fields(body):
        found[each.name] = each
    return found


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _own_fields(body: ast.ClassDef) -> Iterator[CoreField]:
    for line, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            text = " ".join(after.value.value.split())
        default, spelling, is_given = _default(line.value)
        if is_given:
            yield CoreField(line.target.id, _type(line.annotation), default, text, spelling)


def _default(value: ast.expr | None) -> tuple[Any, dict[str, Any], bool]:
    """Return (the default, the metadata about the flag, whether the constructor has an argument for the field)."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field"):
        return _literal(value), {}, True
    words = {word.arg: word.value for word in value.keywords if word.arg}
    default = _literal(words.get("default"))
    if "default_factory" in words:
        default = {"list": [], "dict": {}, "tuple": ()}.get(ast.unparse(words["default_factory"]))
    spelling = _spelling(words["metadata"]) if "metadata" in words else {}
    return default, spelling, _literal(words.get("init")) is not False


def _spelling(metadata: ast.expr) -> dict[str, Any]:
    """Return the literals in the metadata of a field about its flag."""
    found = dict(_entries(dict(_entries(metadata)).get("argparse_meta")))
    literals = {name: _literal(value) for name, value in found.items()}
    return {name: value for name, value in literals.items() if value is not None or ast.unparse(found[name]) == "None"}


def _entries(node: ast.expr | None) -> Iterator[tuple[Any, ast.expr]]:
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                yield _literal(key), value


def _literal(node: ast.expr | None) -> Any:
    """Return the value of a literal; None: it is none."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _type(node: ast.expr) -> Any:
    """Return the annotation of the option for an annotation of a field. ``Optional`` and ``| None`` are ignored."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _type(ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.Name):
        return _PLAIN.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        sides = [each for each in (node.left, node.right) if ast.unparse(each) != "None"]
        return _type(sides[0]) if len(sides) == 1 else None
    if not isinstance(node, ast.Subscript):
        return None
    outer = ast.unparse(node.value).rpartition(".")[2]
    if outer == "Optional":
        return _type(node.slice)
    if outer in ("List", "list"):
        inner = _type(node.slice)
        return None if inner is None else list[inner]
    return Literal[_literal(node.slice)] if outer == "Literal" else None
