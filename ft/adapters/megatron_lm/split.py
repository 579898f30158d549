"""Splits a function of a checkout in memory: its last statements become a function that can be called again."""

import ast
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from ft.adapters.megatron_lm.seams import function_of, split_index

_REST, _RUN, _BEGIN = "_ft_rest", "_ft_run_rest", "_ft_begin"


def split(
    function: FunctionType,
    marker: str,
    begin: Callable[[dict[str, Any]], None],
    run: Callable[[Callable[[], None]], None],
) -> None:
    """Change ``function`` in place: pass its body, from the statement that calls ``marker`` to the end, to ``run``.

    The code keeps its file name and line numbers, so tracebacks refer to the checkout's file.

    Args:
        function: a function without closure, whose return value is not used.
        marker: name of a function that exactly one statement of the body calls.
        begin: called first, with the arguments by name.
        run: called with a function that executes the rest of the body, any number of times.
    """
    file = function.__code__.co_filename
    node = function_of(Path(file), function.__name__)
    index = split_index(node, marker)
    head, tail = node.body[:index], node.body[index:]
    names = _assigned(head) | {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    declared = {name for each in ast.walk(node) if isinstance(each, ast.Global) for name in each.names}
    tail = [each for each in tail if not isinstance(each, ast.Global)]
    nonlocals, global_names = sorted(_assigned(tail) & names - declared), sorted(_assigned(tail) & declared)
    rest = ast.parse(f"def {_REST}(): pass").body[0]
    # The rest becomes an inner function, so names that it assigns need a declaration to stay names of the whole.
    scope = [ast.Nonlocal(names=nonlocals)] if nonlocals else []
    scope += [ast.Global(names=global_names)] if global_names else []
    rest.body = [*scope, *tail]
    first, call = ast.parse(f"{_BEGIN}(dict(locals()))\n{_RUN}({_REST})").body
    for new in (rest, call, *scope):
        ast.copy_location(new, tail[0])
    ast.copy_location(first, head[0])
    node.body, node.decorator_list, node.returns = [first, *head, rest, call], [], None
    module = ast.fix_missing_locations(ast.Module(body=[node], type_ignores=[]))
    made: dict = {}
    exec(compile(module, file, "exec"), function.__globals__, made)
    function.__globals__[_BEGIN], function.__globals__[_RUN] = begin, run
    function.__code__ = made[function.__name__].__code__


def _assigned(statements: list[ast.stmt]) -> set[str]:
    """Return the names that statements bind, except those of inner functions and comprehensions."""
    found: set[str] = set()

    class Visitor(ast.NodeVisitor):
        def visit_Name(self, node):
            if isinstance(node.ctx, ast.Store | ast.Del):
                found.add(node.id)

        def visit_FunctionDef(self, node):
            found.add(node.name)

        def visit_Import(self, node):
            found.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)

        visit_ImportFrom = visit_Import

        def skip(self, node):
            pass

        visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = skip

    for statement in statements:
        Visitor().visit(statement)
    return found
