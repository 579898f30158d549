"""Static check that this project's imports and calls of megatron-core ("core") fit a given release of it.

The check reads the sources of both sides and imports neither. It reports names that core lacks, and calls whose
arguments do not match the signature of the called function. Two kinds of code are exempt. Code for certain releases
stands in a conditional branch on ``megatron.patches.releases.CORE`` (the release as a pair of numbers), such as ``if
CORE >= (0, 18): return ...``; only the branch that the given release would execute is checked. Code that accepts a
missing name imports it inside ``try`` with ``except ImportError``.
"""

import ast
from dataclasses import dataclass, field

from megatron.patches.branches import taken
from megatron.patches.names import (
    CLASS,
    FUNCTION,
    MODULE,
    VALUE,
    Binding,
    Definition,
    Names,
    absolute,
    decorators,
    is_constant,
    is_of_core,
    names_bound,
)
from megatron.patches.signatures import Signature, signature
from megatron.patches.sources import CoreSources, OwnSources

_CAUGHT = {
    "ImportError": ImportError,
    "ModuleNotFoundError": ImportError,
    "AttributeError": AttributeError,
    "TypeError": TypeError,
}


@dataclass(frozen=True)
class Misfit:
    """A place in this project's sources that does not fit a release of core.

    Attributes:
        file: path of the file, relative to the repository's root.
        line: line number in the file.
        callee: the name in core that the line imports, reads or calls, with its module.
        problem: why it does not fit, for example "no such name" or "lacks 'group'".
    """

    file: str
    line: int
    callee: str
    problem: str


@dataclass
class CallCheck:
    """The result of the check.

    Attributes:
        misfits: the places that do not fit, in the order of the sources.
        calls: number of calls of core's functions and classes that were checked.
    """

    misfits: list[Misfit]
    calls: int = 0


def check_calls(own: OwnSources, core: CoreSources) -> CallCheck:
    """Check the modules of this project, ``own``, against the release ``core``.

    Raises:
        UserError: ``core`` does not say which release it is.
    """
    release = core.release
    trees = {module: taken(own.tree(module), module, release) for module in own.files}

    def tree(module: str) -> ast.Module | None:
        return core.tree(module) if is_of_core(module) else trees.get(module)

    def is_package(module: str) -> bool:
        return core.is_package(module) if is_of_core(module) else own.is_package(module)

    names, found = Names(tree, is_package), CallCheck([])
    for module, path in own.files.items():
        _File(names, module, is_package(module), own.shown(path), found).visit(trees[module])
    return found


@dataclass
class _Scope:
    """The names that are defined in one module, class or function.

    Attributes:
        bound: name -> the definitions, assignments and imports that give the name its value.
        is_class: the scope is a class body, whose names are not visible in nested functions.
        kinds: name of a variable -> the expression that names its class.
    """

    bound: dict[str, list[Binding]]
    is_class: bool = False
    kinds: dict[str, ast.expr] = field(default_factory=dict)


class _File(ast.NodeVisitor):
    """Checks one file of this project, and adds the results to ``found``."""

    def __init__(self, names: Names, module: str, is_package: bool, file: str, found: CallCheck):
        self._names, self._module, self._is_package, self._file, self._found = names, module, is_package, file, found
        self._scopes: list[_Scope] = []
        self._classes: list[ast.ClassDef] = []
        self._caught: list[set[type[Exception]]] = []

    # ------------------------------------------------------------------------------------------------ scopes

    def visit_Module(self, node: ast.Module) -> None:
        self._within(_Scope(self._bound(node.body)), node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        self._classes.append(node)
        self._within(_Scope(self._bound(node.body), is_class=True), node.body)
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        given = node.args
        parameters = _parameters(given)
        annotations = [node.returns, *(each.annotation for each in parameters)]
        outside = [*node.decorator_list, *given.defaults, *given.kw_defaults, *annotations]
        self._visit_all([each for each in outside if each is not None])
        bound = {**self._bound(node.body), **{each.arg: [each] for each in parameters}}
        self._within(_Scope(bound, kinds=_kinds(parameters, bound, given)), node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        given = node.args
        self._visit_all([each for each in (*given.defaults, *given.kw_defaults) if each is not None])
        self._within(_Scope({each.arg: [each] for each in _parameters(given)}), [node.body])

    def _visit_comprehension(self, node: ast.AST) -> None:
        stored = [leaf for each in node.generators for leaf in ast.walk(each.target) if isinstance(leaf, ast.Name)]
        self._within(_Scope({leaf.id: [leaf] for leaf in stored}), list(ast.iter_child_nodes(node)))

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._scopes[-1].bound[node.target.id] = [node]
        self.visit(node.value)

    def _within(self, scope: _Scope, nodes: list[ast.AST]) -> None:
        self._scopes.append(scope)
        self._visit_all(nodes)
        self._scopes.pop()

    def _visit_all(self, nodes: list[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _bound(self, body: list[ast.stmt]) -> dict[str, list[Binding]]:
        return names_bound(body, self._module, self._is_package)[0]

    # ------------------------------------------------------------------------------ the checked kinds of nodes

    def visit_Try(self, node: ast.Try) -> None:
        types = [leaf for handler in node.handlers if handler.type for leaf in ast.walk(handler.type)]
        self._caught.append({_CAUGHT[leaf.id] for leaf in types if isinstance(leaf, ast.Name) and leaf.id in _CAUGHT})
        self._visit_all(node.body)
        self._caught.pop()
        self._visit_all([*node.handlers, *node.orelse, *node.finalbody])

    def visit_If(self, node: ast.If) -> None:
        is_for_types = ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"
        if not is_for_types:
            self._visit_all([node.test, *node.body])
        self._visit_all(node.orelse)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            owner, _, last = alias.name.rpartition(".")
            if is_of_core(alias.name) and not self._names.of(owner, last):
                self._report(node, alias.name, "no such module", ImportError)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = absolute(node, self._module, self._is_package)
        for alias in node.names if is_of_core(source) or source == "megatron" else ():
            name = f"{source}.{alias.name}"
            is_core = is_of_core(name) and alias.name != "*"
            if is_core and not self._names.of(source, alias.name):
                self._report(node, name, "no such name", ImportError)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        for owner in self._meant(node.value) if isinstance(node.ctx, ast.Load) else ():
            if is_of_core(owner.module) and self._names.inside(owner, node.attr) == []:
                named = owner.module if owner.kind == MODULE else f"{owner.module}.{owner.node.name}"
                self._report(node, f"{named}.{node.attr}", "no such name", AttributeError)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        is_partial = ast.unparse(node.func) in ("partial", "functools.partial") and bool(node.args)
        called = node.args[0] if is_partial else node.func
        signatures = self._signatures(called)
        if not signatures or None in signatures or not any(is_of_core(each.module) for each in signatures):
            return
        self._found.calls += 1
        problems = [each.misfit(node, is_partial) for each in signatures]
        if None not in problems:
            self._report(node, f"{signatures[0].module}: {ast.unparse(called)}", problems[0], TypeError)

    def _signatures(self, called: ast.expr) -> list[Signature | None]:
        """Return the signatures of all definitions that ``called`` may refer to; None for an unknown signature."""
        if isinstance(called, ast.Attribute):
            methods = self._methods(called)
            if methods is not None:
                return [signature(self._names, each, is_bound=True) for each in methods]
        found = []
        for thing in self._meant(called):
            of_class = isinstance(called, ast.Attribute) and thing.kind == FUNCTION
            is_bound = of_class and "classmethod" in decorators(thing.node)
            found.append(signature(self._names, thing, is_bound))
        return found

    def _methods(self, called: ast.Attribute) -> list[Definition] | None:
        """Return what ``called`` (``object.method``) may refer to; None if the object's class is unknown."""
        owner = called.value
        match owner:
            case ast.Call(func=ast.Name(id="super"), args=[]) if self._classes:
                classes = self._line()[1:]
            case ast.Name(id=name) if kind := self._kind(name):
                classes = [each for each in self._meant(kind) if each.kind == CLASS]
            case _:
                return None
        for each in classes:
            if found := self._names.inside(each, called.attr):
                return [
                    thing if "staticmethod" not in decorators(thing.node) else Definition(VALUE, thing.module)
                    for thing in found
                    if thing.kind == FUNCTION
                ]
        return []

    def _line(self) -> list[Definition]:
        """Return the innermost enclosing class and its known base classes, in the order of lookup."""
        return self._names.ancestry(Definition(CLASS, self._module, self._classes[-1]))[0]

    def _kind(self, name: str) -> ast.expr | None:
        """Return the expression that names the class of the variable ``name``, None if it is unknown."""
        for scope in reversed(self._scopes):
            if name in scope.bound:
                return scope.kinds.get(name)
        return None

    def _meant(self, node: ast.expr) -> list[Definition]:
        """Return the definitions that a dotted name may refer to at this place; an empty list if they are unknown."""
        if isinstance(node, ast.Attribute):
            inside = [self._names.inside(owner, node.attr) for owner in self._meant(node.value)]
            return [thing for things in inside for thing in things or ()]
        if not isinstance(node, ast.Name):
            return []
        for number, scope in enumerate(reversed(self._scopes)):
            if node.id in scope.bound and (number == 0 or not scope.is_class):
                bindings = [each for each in scope.bound[node.id] if not is_constant(each)]
                return [thing for each in bindings for thing in self._names.meant(self._module, each)]
        return []

    def _report(self, node: ast.AST, callee: str, problem: str, raised: type[Exception]) -> None:
        if not any(raised in caught for caught in self._caught):
            self._found.misfits.append(Misfit(self._file, node.lineno, callee, problem))


def _parameters(given: ast.arguments) -> list[ast.arg]:
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [each for each in every if each is not None]


def _kinds(parameters: list[ast.arg], bound: dict[str, list[Binding]], given: ast.arguments) -> dict[str, ast.expr]:
    """Return {variable: its class} for annotated parameters, and for names that are assigned once, by a call."""
    kinds = {}
    for each in parameters:
        kind = each.annotation
        if isinstance(kind, ast.BinOp) and isinstance(kind.right, ast.Constant):  # X | None
            kind = kind.left
        if isinstance(kind, ast.Name | ast.Attribute) and each not in (given.vararg, given.kwarg):
            kinds[each.arg] = kind
    for name, bindings in bound.items():
        match bindings:
            case [ast.Assign(targets=[ast.Name()], value=ast.Call(func=ast.Name() | ast.Attribute() as kind))]:
                kinds[name] = kind
    return kinds
