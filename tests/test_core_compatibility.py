"""What we take from megatron-core exists in every supported release, with the keyword arguments that we pass."""

import ast
import dataclasses
from pathlib import Path

import pytest
from test_patches import newest_wheel

from megatron.patches.sources import CoreSources, archived_core, installed_core

ROOT = Path(__file__).parent.parent
OUR_MODULES = sorted([*(ROOT / "megatron").rglob("*.py"), *(ROOT / "ft").rglob("*.py"), *(ROOT / "tools").glob("*.py")])


@pytest.fixture(params=["installed", "newest"])
def core(request, tmp_path) -> CoreSources:
    return installed_core() if request.param == "installed" else archived_core(newest_wheel(request, tmp_path))


def test_every_imported_name_is_there(core):
    missing = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path in OUR_MODULES
        for module, name, _ in core_imports(path)
        if find(core, module, name) is None
    ]
    assert missing == []


def test_every_keyword_argument_is_taken(core):
    refused = []
    for path in OUR_MODULES:
        imported = {alias: find(core, module, name) for module, name, alias in core_imports(path)}
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            target = called(core, call.func, imported)
            known = keywords(core, target) if target else None
            if known is None:
                continue
            refused += [
                f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call.func)}({keyword.arg}=)"
                for keyword in call.keywords
                if keyword.arg and keyword.arg not in known
            ]
    assert refused == []


def test_every_field_of_the_configuration_is_there(core):
    from megatron.training.arguments.moe import MoeOptions

    tree = ast.parse((ROOT / "megatron/training/config.py").read_text())
    keys = [key.value for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys if key]
    keys += [field.name for field in dataclasses.fields(MoeOptions) if field.name.startswith("moe_")]
    assert "hidden_size" in keys and "moe_router_topk" in keys
    known = keywords(core, find(core, "megatron.core.transformer", "TransformerConfig"))
    assert [key for key in keys if key not in known] == []


def core_imports(path: Path):
    """(module, name, name here) of everything imported from megatron.core."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core"):
            yield from ((node.module, alias.name, alias.asname or alias.name) for alias in node.names)


def find(core: CoreSources, module: str, name: str, depth: int = 0):
    """(module, node) that defines ``name``, through re-exports; a bare module is (module, its tree)."""
    tree = core.tree(f"{module}.{name}")
    if tree is not None:
        return f"{module}.{name}", tree
    tree = core.tree(module)
    is_package = core.tree(f"{module}.__init__") is not None
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return module, node
        if isinstance(node, ast.ImportFrom) and depth < 5:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    source = absolute(module, node, is_package)
                    if source.startswith("megatron.core") and (found := find(core, source, alias.name, depth + 1)):
                        return found
                    return module, node
    return None


def absolute(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    if not node.level:
        return node.module
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def called(core: CoreSources, function: ast.expr, imported: dict):
    """What ``name(...)`` or ``module.name(...)`` calls, if that comes from megatron.core."""
    if isinstance(function, ast.Name):
        return imported.get(function.id)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        place = imported.get(function.value.id)
        if place and isinstance(place[1], ast.Module):
            return find(core, place[0], function.attr)
    return None


def keywords(core: CoreSources, target) -> set[str] | None:
    """The keyword arguments a function or class takes; None if it takes any, or cannot be told."""
    module, node = target
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        if arguments.kwarg:
            return None
        return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    if not isinstance(node, ast.ClassDef):
        return None
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return keywords(core, (module, item))
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return None
    names = {i.target.id for i in node.body if isinstance(i, ast.AnnAssign) and isinstance(i.target, ast.Name)}
    for base in node.bases:
        parent = find(core, module, ast.unparse(base))
        inherited = keywords(core, parent) if parent else None
        if inherited is None:
            return None
        names |= inherited
    return names
