"""Reads the fields of megatron-core's configuration dataclasses from the sources of the installed release.

Importing megatron-core imports torch, which takes seconds, and a command line is also read by commands that do not
train (``ft run``, ``ft check``). So only the fields of the classes are executed, with a stand-in for all that core's
modules import.
"""

import ast
import builtins
import dataclasses
import importlib.util
import itertools
import types
import typing
from collections.abc import Iterator
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


class _Foreign:
    """Stands for a name that core's modules import, such as ``torch``, and for all that is made of it."""

    def __getattr__(self, name: str) -> "_Foreign":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def _itself(self, *args: Any, **options: Any) -> "_Foreign":
        return self

    def __iter__(self) -> Iterator:
        return iter(())

    __call__ = __getitem__ = __or__ = __ror__ = _itself


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
def config_class(core: Path, name: str) -> type:
    """Return a dataclass with the fields of a configuration (a key of ``CONFIGS``) of the release in ``core``.

    Its attribute ``HELP`` has the text below each field, as one line.
    """
    body = next(n for n in _parsed(core / CONFIGS[name]).body if isinstance(n, ast.ClassDef) and n.name == name)
    bases = [config_class(core, b.id) for b in body.bases if isinstance(b, ast.Name) and b.id in CONFIGS]
    own = [line for line in body.body if isinstance(line, ast.AnnAssign)]
    plain = ast.Module([ast.ClassDef(name, [ast.Name(b.__name__, ast.Load()) for b in bases], [], own, [])], [])
    known = {**vars(typing), **vars(dataclasses), **{b.__name__: b for b in bases}, "__name__": __name__}
    names = {n.id for n in ast.walk(plain) if isinstance(n, ast.Name)} - set(vars(builtins))
    scope = {each: known.get(each, _Foreign()) for each in names} | known
    exec(compile(ast.fix_missing_locations(plain), str(CONFIGS[name]), "exec"), scope)
    made = dataclasses.dataclass(scope[name], kw_only=True)
    made.HELP = {key: text for base in bases for key, text in base.HELP.items()} | {
        line.target.id: " ".join(after.value.value.split())
        for line, after in itertools.pairwise(body.body)
        if isinstance(line, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    return made


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def default_of(field: dataclasses.Field) -> Any:
    """Return the default of a field; None if only core knows it, such as ``torch.float32``."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return None if isinstance(value, _Foreign) or value is dataclasses.MISSING else value


def kind_of(annotation: Any) -> Any:
    """Return the annotation of an option with the values of a field: bool, int, float, str, a Literal of the allowed
    values, or a list of one of these. None: no word can be converted to the field's type.
    """
    if isinstance(annotation, str):
        annotation = eval(annotation, {**vars(typing), "torch": _Foreign()})
    origin, inner = typing.get_origin(annotation), [a for a in typing.get_args(annotation) if a is not type(None)]
    if origin in (typing.Union, types.UnionType):
        return kind_of(inner[0]) if len(inner) == 1 else None
    if origin is list:
        of_one = kind_of(inner[0])
        return None if of_one is None else list[of_one]
    return annotation if origin is Literal or annotation in (bool, int, float, str) else None
