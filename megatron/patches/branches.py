"""Removes code for other releases of megatron-core from a syntax tree, before this project's calls are checked.

``megatron.patches.releases.CORE`` is the (major, minor) release of the installed megatron-core. Where releases differ,
this project's code compares ``CORE`` with constants, as in ``if CORE >= (0, 18):``. This module evaluates these
comparisons for a given release, which need not be installed, and keeps only the branches that it would execute.
"""

import ast
import operator
from itertools import pairwise

RELEASES = "megatron.patches.releases"

_COMPARE = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def taken(tree: ast.Module, module: str, release: tuple[int, int]) -> ast.Module:
    """Remove from ``tree``, in place, the statements and expressions that ``release`` (major, minor) never reaches."""
    names = {"CORE"} if module == RELEASES else _imported(tree, RELEASES, "CORE")
    rooms = _imported(tree, *RELEASES.rsplit(".", 1))
    return _Taken(names, rooms, release).visit(tree) if names or rooms else tree


def _imported(tree: ast.Module, module: str, name: str) -> set[str]:
    """Return the names under which the top level of ``tree`` imports ``name`` of ``module``."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == module]
    return {alias.asname or alias.name for node in imports for alias in node.names if alias.name == name}


class _Taken(ast.NodeTransformer):
    """Keeps the executed branches of a tree.

    Args:
        names: names that stand for ``CORE`` in the module.
        rooms: names that stand for the module ``releases``, as in ``releases.CORE``.
        release: (major, minor).
    """

    def __init__(self, names: set[str], rooms: set[str], release: tuple[int, int]):
        self._names, self._rooms, self._release = names, rooms, release

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, field, None), list):
                setattr(node, field, self._reached(statements))
        return super().generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        holds = self._holds(node.test)
        if holds is None:
            return self.generic_visit(node)
        return self.visit(node.body if holds else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        ends = isinstance(node.op, ast.Or)
        for number, value in enumerate(node.values):
            if self._holds(value) is ends:
                node.values = node.values[: number + 1]
                break
        return self.generic_visit(node)

    def _reached(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Return the statements up to the first return, raise, continue or break that is always executed."""
        reached: list[ast.stmt] = []
        for node in statements:
            holds = self._holds(node.test) if isinstance(node, ast.If) else None
            reached += [node] if holds is None else self._reached(node.body if holds else node.orelse)
            if reached and isinstance(reached[-1], _LEAVES):
                break
        return reached

    def _holds(self, test: ast.expr) -> bool | None:
        """Return the result of a condition on the release, None for any other condition."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                holds = self._holds(operand)
                return None if holds is None else not holds
            case ast.BoolOp(op=op, values=values):
                each = [self._holds(value) for value in values]
                ends = isinstance(op, ast.Or)
                return ends if ends in each else None if None in each else not ends
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self._compare([left, *comparators], ops)
        return None

    def _compare(self, sides: list[ast.expr], ops: list[ast.cmpop]) -> bool | None:
        values = [self._release if self._is_core(side) else _constant(side) for side in sides]
        if None in values or not any(map(self._is_core, sides)) or any(type(op) not in _COMPARE for op in ops):
            return None
        return all(_COMPARE[type(op)](*pair) for op, pair in zip(ops, pairwise(values), strict=True))

    def _is_core(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self._names
            case ast.Attribute(value=ast.Name(id=room), attr="CORE"):
                return room in self._rooms
        return False


def _constant(node: ast.expr) -> tuple[int, ...] | None:
    if isinstance(node, ast.Tuple) and all(
        isinstance(each, ast.Constant) and isinstance(each.value, int) for each in node.elts
    ):
        return tuple(each.value for each in node.elts)
    return None
