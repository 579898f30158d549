"""Static name resolution: finds the definition that a name in a module refers to, by reading source code only.

Follows re-exports, aliases and base classes. The checks of this project's calls of megatron-core (``calls.py``) use it.
A *binding* of a name is the syntax node (definition, assignment, ...) or the import that gives the name its value; a
name can have several bindings, for example one in each branch of an ``if``.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MODULE, FUNCTION, CLASS, VALUE = "module", "function", "class", "value"

# Base classes that add neither a constructor nor names that a caller could use.
_BARE = {"object", "ABC", "Protocol", "Generic", "Enum", "IntEnum", "Flag", "IntFlag", "str", "int"}

# The fields of a statement that hold further statements, or that bind a name.
_BLOCKS = ("finalbody", "orelse", "handlers", "cases", "body", "items")


@dataclass(frozen=True)
class Definition:
    """A module or definition that a name refers to.

    Attributes:
        kind: MODULE, FUNCTION, CLASS, or VALUE for everything that is not analysed.
        module: for a MODULE its own name, otherwise the name of the module that contains the definition.
        node: the syntax node of the definition; None if it is not available.
    """

    kind: str
    module: str
    node: ast.AST | None = None


@dataclass(frozen=True)
class Imported:
    """A name that an import binds: `name` of `module`, or `module` itself if `name` is None."""

    module: str
    name: str | None


Binding = ast.AST | Imported


def is_of_core(module: str) -> bool:
    """Return whether a module is part of megatron-core."""
    return module == "megatron.core" or module.startswith("megatron.core.")


class Names:
    """Resolves the names of a set of modules.

    Args:
        tree: returns the syntax tree of a module, None for a module outside the set.
        is_package: returns whether a module of the set is a package.
    """

    def __init__(self, tree: Callable[[str], ast.Module | None], is_package: Callable[[str], bool]):
        self._tree, self._is_package = tree, is_package
        self._bound: dict[ast.AST, tuple[dict[str, list[Binding]], list[str]]] = {}

    def of(self, module: str, name: str, path: tuple[tuple[str, str], ...] = ()) -> list[Definition]:
        """Return what ``module.name`` may refer to: several things if branches differ, none if the name is missing.

        ``path`` holds the (module, name) pairs that are being resolved, so that circular imports end.
        """
        if (module, name) in path:
            return []
        path = (*path, (module, name))
        tree = self._tree(module)
        if tree is None:
            may_have_submodule = module == "megatron" or is_of_core(module)
            return self._submodule(module, name) if may_have_submodule else [Definition(VALUE, module)]
        bound, stars = self._names_in(tree, module, self._is_package(module))
        found = [thing for each in bound.get(name, ()) for thing in self.meant(module, each, path)]
        found = found or [thing for star in stars for thing in self.of(star, name, path)]
        found = found or self._submodule(module, name)
        is_set_at_run_time = name in bound or "__getattr__" in bound or name.startswith("__")
        if not found and (is_set_at_run_time or _is_global(tree, name)):
            return [Definition(VALUE, module)]
        return found

    def meant(self, module: str, binding: Binding, path: tuple[tuple[str, str], ...] = ()) -> list[Definition]:
        """Return what a binding in ``module`` may refer to; an empty list if it imports a missing name."""
        match binding:
            case Imported(source, None):
                return [Definition(MODULE, source)]
            case Imported(source, name):
                return self.of(source, name, path)
            case ast.ClassDef():
                return [Definition(CLASS, module, binding)]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return [] if "overload" in decorators(binding) else [Definition(FUNCTION, module, binding)]
            case ast.Assign(value=ast.Name(id=name)) if self._tree(module) and name != _target(binding):
                return self.of(module, name, path) or [Definition(VALUE, module)]
        return [Definition(VALUE, module, binding)]

    def inside(self, thing: Definition, name: str) -> list[Definition] | None:
        """Return what the attribute ``thing.name`` may refer to.

        Returns:
            an empty list if ``thing`` has no such attribute; None if the sources do not show whether it has one.
        """
        if thing.kind == MODULE:
            return self.of(thing.module, name)
        if thing.kind == CLASS:
            classes, complete = self.ancestry(thing)
            for each in classes:
                if bindings := self._names_in(each.node, each.module)[0].get(name):
                    return [found for binding in bindings for found in self.meant(each.module, binding)]
            # classes inherit private names and mro from object and type, and enum members have a name and a value
            return None if not complete or name.startswith("_") or name in ("name", "value", "mro") else []
        return None

    def ancestry(self, thing: Definition) -> tuple[list[Definition], bool]:
        """Return (the class and its known base classes in the order of lookup, whether all bases are known)."""
        classes = [thing]
        for base in thing.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if ast.unparse(base).rpartition(".")[2] in _BARE:
                continue
            meant = self.expression(thing.module, base)
            if len(meant) != 1 or meant[0].kind != CLASS or meant[0].node is thing.node:
                return classes, False
            inherited, complete = self.ancestry(meant[0])
            classes += [each for each in inherited if each not in classes]
            if not complete:
                return classes, False
        return classes, not thing.node.keywords

    def expression(self, module: str, node: ast.expr) -> list[Definition]:
        """Return what a dotted name may refer to at the top level of ``module``."""
        if isinstance(node, ast.Name):
            return self.of(module, node.id)
        if isinstance(node, ast.Attribute):
            owners = self.expression(module, node.value)
            return [thing for owner in owners for thing in self.inside(owner, node.attr) or ()]
        return []

    def _submodule(self, module: str, name: str) -> list[Definition]:
        return [Definition(MODULE, f"{module}.{name}")] if self._tree(f"{module}.{name}") is not None else []

    def _names_in(
        self, node: ast.Module | ast.ClassDef, module: str, is_package: bool = False
    ) -> tuple[dict[str, list[Binding]], list[str]]:
        if node not in self._bound:
            self._bound[node] = names_bound(node.body, module, is_package)
        return self._bound[node]


def names_bound(body: list[ast.stmt], module: str, is_package: bool) -> tuple[dict[str, list[Binding]], list[str]]:
    """Return ({name: its bindings}, modules of star imports) for the statements of a module, class or function.

    Names inside nested functions and classes are not included.
    """
    bound: dict[str, list[Binding]] = {}
    stars: list[str] = []
    for node in _own_nodes(body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                target = alias.name if alias.asname else alias.name.partition(".")[0]
                bound.setdefault(alias.asname or target, []).append(Imported(target, None))
        elif isinstance(node, ast.ImportFrom):
            source = absolute(node, module, is_package)
            for alias in node.names:
                if alias.name == "*":
                    stars.append(source)
                else:
                    bound.setdefault(alias.asname or alias.name, []).append(Imported(source, alias.name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.setdefault(node.name, []).append(node)
        else:
            for name in _assigned(node):
                bound.setdefault(name, []).append(node)
    return bound, stars


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Return the absolute name of the module that a ``from ... import`` takes names from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    return ".".join([*parts[: len(parts) - node.level + is_package], *([node.module] if node.module else [])])


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    """Return the names of a definition's decorators, without the modules before them."""
    called = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
    return {ast.unparse(each).rpartition(".")[2] for each in called}


def is_constant(binding: Binding) -> bool:
    """Return whether a binding assigns a constant, as ``except ImportError: name = None`` does."""
    value = getattr(binding, "value", None)
    return isinstance(binding, ast.Assign | ast.AnnAssign) and (value is None or isinstance(value, ast.Constant))


def _own_nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the statements of a scope and the nodes in them that bind names; functions and classes are not entered."""
    rest: list[ast.AST] = list(reversed(body))
    while rest:
        node = rest.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = [each for field in _BLOCKS for each in reversed(getattr(node, field, ()))]
            rest += [each for each in inner if isinstance(each, ast.AST)]
            if isinstance(node, ast.match_case):
                rest += ast.walk(node.pattern)


def _is_global(tree: ast.Module, name: str) -> bool:
    """Return whether a function of the module declares the name as global."""
    return any(isinstance(node, ast.Global) and name in node.names for node in ast.walk(tree))


def _assigned(node: ast.AST) -> list[str]:
    match node:
        case ast.Assign(targets=targets):
            return [leaf.id for target in targets for leaf in ast.walk(target) if _is_stored(leaf)]
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return [target.id] if isinstance(target, ast.Name) else []
        case ast.For(target=target) | ast.AsyncFor(target=target):
            return [leaf.id for leaf in ast.walk(target) if _is_stored(leaf)]
        case ast.withitem(optional_vars=target) if target is not None:
            return [leaf.id for leaf in ast.walk(target) if _is_stored(leaf)]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return [name]
    return []


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _target(node: ast.Assign) -> str | None:
    return node.targets[0].id if isinstance(node.targets[0], ast.Name) else None
