"""Finds the flags that a checkout's own parser accepts. The checkout's source is read, but not imported.

A flag is a literal in a call of argparse, or the field of a dataclass from which ``ArgumentGroupFactory`` (of
Megatron-LM's ``argument_utils.py``) makes a flag.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

_FLAG = re.compile(r"""['"](--[a-zA-Z][\w-]*)['"]""")
_PAIR = re.compile(r"""add_argument\(\s*['"]--([a-zA-Z][\w-]*)['"][^()]*BooleanOptionalAction""")
_FACTORY = "ArgumentGroupFactory"


def own_flags(root: Path, script: Path) -> set[str]:
    """Return the flags of a script of the checkout in the folder ``root``."""
    trainer = {file: _text(file) for file in sorted((root / "megatron" / "training").rglob("*.py"))}
    texts = (_text(script), *trainer.values())
    found = {"--help", *(flag for text in texts for flag in _FLAG.findall(text))}
    found |= {f"--no-{name}" for text in texts for name in _PAIR.findall(text)}
    made = [use for text in trainer.values() if f"{_FACTORY}(" in text for use in _uses(ast.parse(text))]
    if made:
        classes = _classes((*trainer.values(), *map(_text, sorted((root / "megatron" / "core").rglob("*.py")))))
        for name, excluded in made:
            found |= {flag for field, own in _fields(name, classes).items() if field not in excluded for flag in own}
    return found


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _uses(module: ast.Module) -> Iterable[tuple[str, set[str]]]:
    """Yield (name of the dataclass, names of the fields left out) for each call of the factory in a module."""
    lists = {
        target.id: node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _FACTORY and node.args:
            given = next((word.value for word in node.keywords if word.arg == "exclude"), None)
            excluded = lists.get(given.id, given) if isinstance(given, ast.Name) else given
            yield ast.unparse(node.args[0]), _strings(excluded)


def _classes(texts: Iterable[str]) -> dict[str, ast.ClassDef]:
    """Return the dataclasses of some modules, by name."""
    modules = (ast.parse(text) for text in texts if "@dataclass" in text)
    return {
        node.name: node for module in modules for node in module.body if isinstance(node, ast.ClassDef) and node.body
    }


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, set[str]]:
    """Return the flags of each field of a dataclass and of the dataclasses from which it inherits."""
    if name not in classes:
        return {}
    found = {field: own for base in classes[name].bases for field, own in _fields(ast.unparse(base), classes).items()}
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = _flags_of(node.target.id, node)
    return found


def _flags_of(field: str, node: ast.AnnAssign) -> set[str]:
    """Return the flags that the factory makes from a field."""
    given = {text for text in _strings(node.value) if text.startswith("--")}
    if given:  # metadata={"argparse_meta": {"arg_names": [...]}}
        return given
    default, name = node.value, field.replace("_", "-")
    if isinstance(default, ast.Call):
        words = {word.arg: word.value for word in default.keywords}
        if "init" in words and ast.unparse(words["init"]) == "False":
            return set()
        default = words.get("default")
    is_on = ast.unparse(node.annotation) == "bool" and default is not None and ast.unparse(default) != "False"
    return {f"--no-{name}", f"--disable-{name}"} if is_on else {f"--{name}"}


def _strings(node: ast.AST | None) -> set[str]:
    """Return all string literals below a node."""
    below = ast.walk(node) if node is not None else ()
    return {each.value for each in below if isinstance(each, ast.Constant) and isinstance(each.value, str)}
