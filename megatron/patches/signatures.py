"""Compares the arguments of a call with the signature of the called function or class, both read from source code."""

import ast
from dataclasses import dataclass, replace

from megatron.patches.names import CLASS, FUNCTION, Definition, Names, decorators


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable.

    Attributes:
        module: name of the module that defines the callable.
        positional: names of positional parameters, in order.
        only_positional: how many of them are positional-only.
        only_keyword: names of keyword-only parameters.
        required: names of parameters without a default.
        more_positional: the callable accepts ``*`` arguments.
        more_keywords: the callable accepts ``**`` arguments.
    """

    module: str
    positional: tuple[str, ...] = ()
    only_positional: int = 0
    only_keyword: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    more_positional: bool = False
    more_keywords: bool = False

    def misfit(self, call: ast.Call, is_partial: bool = False) -> str | None:
        """Return a description of the first argument that does not fit the signature, None if all fit.

        A call that contains ``*`` or ``**``, or is partial, is never reported for missing arguments.

        Args:
            call: the call.
            is_partial: the call is one of `functools.partial`, whose first argument is the callable.
        """
        given = call.args[1:] if is_partial else call.args
        plain = [argument for argument in given if not isinstance(argument, ast.Starred)]
        keywords = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
        takes_by_name = {*self.positional[self.only_positional :], *self.only_keyword}
        if len(plain) > len(self.positional) and not self.more_positional:
            return f"takes {len(self.positional)} positional arguments, but gets {len(plain)}"
        if not self.more_keywords and (unknown := [name for name in keywords if name not in takes_by_name]):
            return f"takes no {_listed(unknown)}"
        placed = self.positional[: len(plain)]
        if twice := [name for name in keywords if name in placed and name in takes_by_name]:
            return f"is given {_listed(twice)} twice"
        if is_partial or len(plain) < len(given) or len(keywords) < len(call.keywords):
            return None
        order = (*self.positional, *self.only_keyword)
        missing = [name for name in order if name in self.required and name not in placed and name not in keywords]
        return f"lacks {_listed(missing)}" if missing else None


def signature(names: Names, thing: Definition, is_bound: bool = False) -> Signature | None:
    """Return the signature of a function or of a class's constructor, None if the sources do not show it.

    Args:
        names: the names of all modules.
        thing: the function or class.
        is_bound: the function is called as a method of an object, or of its class if it is a class method.
    """
    if thing.kind == FUNCTION:
        return _of_function(thing, is_bound)
    if thing.kind == CLASS:
        return _of_constructor(names, thing)
    return None


def _of_function(thing: Definition, is_bound: bool) -> Signature:
    taken = thing.node.args
    positional = [*taken.posonlyargs, *taken.args]
    required = positional[: len(positional) - len(taken.defaults)]
    alone = [argument for argument, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default is None]
    found = Signature(
        thing.module,
        tuple(argument.arg for argument in positional),
        len(taken.posonlyargs),
        tuple(argument.arg for argument in taken.kwonlyargs),
        frozenset(argument.arg for argument in (*required, *alone)),
        taken.vararg is not None,
        taken.kwarg is not None,
    )
    return _without_first(found) if is_bound and positional else found


def _without_first(found: Signature) -> Signature:
    first, *rest = found.positional
    return replace(
        found,
        positional=tuple(rest),
        only_positional=max(0, found.only_positional - 1),
        required=found.required - {first},
    )


def _of_constructor(names: Names, thing: Definition) -> Signature | None:
    classes, complete = names.ancestry(thing)
    if any("metaclass" in {keyword.arg for keyword in each.node.keywords} for each in classes):
        return None
    for each in classes:
        for name in ("__init__", "__new__"):
            if definitions := _methods(each.node, name):
                return _of_function(Definition(FUNCTION, each.module, definitions[-1]), is_bound=True)
        if "dataclass" in decorators(each.node):
            return _of_dataclass(names, each)
        bases = {ast.unparse(base).rpartition(".")[2] for base in each.node.bases}
        if bases & {"NamedTuple", "TypedDict", "Enum", "IntEnum", "Flag", "IntFlag", "str", "int", "Protocol"}:
            return None
    return Signature(thing.module) if complete else None


def _methods(node: ast.ClassDef, name: str) -> list[ast.FunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name]


def _of_dataclass(names: Names, thing: Definition) -> Signature | None:
    """Return the constructor that ``dataclass`` generates: the fields of all dataclass bases, then its own."""
    classes, complete = names.ancestry(thing)
    if not complete:
        return None
    fields: dict[str, tuple[bool, bool]] = {}  # (it is required, it is keyword-only)
    for each in reversed(classes):
        if "dataclass" in decorators(each.node):
            fields |= _fields(each.node)
    return Signature(
        thing.module,
        tuple(name for name, (_, by_name) in fields.items() if not by_name),
        0,
        tuple(name for name, (_, by_name) in fields.items() if by_name),
        frozenset(name for name, (required, _) in fields.items() if required),
    )


def _fields(node: ast.ClassDef) -> dict[str, tuple[bool, bool]]:
    found = {}
    by_name = any(_says(each, "kw_only", True) for each in node.decorator_list)
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        kind = ast.unparse(item.annotation)
        if kind.rpartition(".")[2] == "KW_ONLY":
            by_name = True
        elif "ClassVar" in kind:
            continue
        elif not (made := _field_call(item.value)):
            found[item.target.id] = (item.value is None, by_name)
        elif not _says(made, "init", False):
            has_default = any(keyword.arg in ("default", "default_factory") for keyword in made.keywords)
            found[item.target.id] = (not has_default, by_name or _says(made, "kw_only", True))
    return found


def _field_call(value: ast.expr | None) -> ast.Call | None:
    is_field = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field"
    return value if is_field else None


def _says(call: ast.expr, name: str, value: bool) -> bool:
    return isinstance(call, ast.Call) and any(
        keyword.arg == name and isinstance(keyword.value, ast.Constant) and keyword.value.value is value
        for keyword in call.keywords
    )


def _listed(names: list[str | None]) -> str:
    return ", ".join(f"'{name}'" for name in names)
