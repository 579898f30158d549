"""Checks that megatron-core (core) has the symbols of the manifest of patches, with the signatures that it lists.

Reads core's source code, without importing core. Patches of torch are looked up in the imported torch, those of
Transformer Engine are not checked.
"""

import ast
import importlib
from dataclasses import dataclass

from ft.base.errors import UserError
from megatron.patches.manifest import EVERY_FUNCTION, SUPPORTED_CORE, Patch
from megatron.patches.sources import CoreSources

FITS, MISSING, CHANGED, NOT_CHECKED = "fits", "missing", "changed", "not checked"


@dataclass(frozen=True)
class Finding:
    """The result for one patch.

    Attributes:
        patch: the patch.
        status: FITS, MISSING, CHANGED or NOT_CHECKED.
        found: the signature that was found; None if the symbol is missing or is not a function.
    """

    patch: Patch
    status: str
    found: str | None = None

    @property
    def fits(self) -> bool:
        return self.status in (FITS, NOT_CHECKED)


def check(patches: list[Patch], core: CoreSources, with_torch: bool) -> list[Finding]:
    """Return one finding per patch, in order. Patches of torch are only checked if `with_torch`."""
    return [_check_core(patch, core) if patch.kind == "core" else _check_torch(patch, with_torch) for patch in patches]


def refusal(finding: Finding, core: CoreSources) -> UserError:
    """Return the error for a patch that does not fit, with the symbol, both signatures and both versions."""
    patch = finding.patch
    expected = " or ".join(patch.signatures) or "a name of that module"
    found = finding.found or ("no such symbol" if finding.status == MISSING else "a name, not a function")
    installed = f"megatron-core {core.version}" if patch.kind == "core" else "the installed torch"
    return UserError(
        f"{patch.module}: {patch.symbol} is not what megatron/patches/{patch.file}.py replaces: expected {expected}, "
        f"found {found} in {installed}",
        f"install a supported version ({SUPPORTED_CORE}; this patch was checked on {', '.join(patch.checked_on)})",
    )


def _check_core(patch: Patch, core: CoreSources) -> Finding:
    tree = core.tree(patch.module)
    if tree is None or patch.symbol == EVERY_FUNCTION:
        return Finding(patch, FITS if tree is not None or patch.added else MISSING)
    is_there, signature = _look_up(tree.body, patch.symbol.split("."))
    if not is_there:
        return Finding(patch, FITS if patch.added else MISSING)
    if patch.signatures and signature not in patch.signatures:
        return Finding(patch, CHANGED, signature)
    return Finding(patch, FITS, signature)


def _check_torch(patch: Patch, with_torch: bool) -> Finding:
    if not with_torch or patch.kind != "torch":
        return Finding(patch, NOT_CHECKED)
    try:
        owner = importlib.import_module(patch.module)
        for part in patch.symbol.split("."):
            owner = getattr(owner, part)
    except (ImportError, AttributeError):
        return Finding(patch, MISSING)
    return Finding(patch, FITS)


def _look_up(body: list[ast.stmt], path: list[str]) -> tuple[bool, str | None]:
    """Return (whether these statements bind the name, its signature if a function binds it last)."""
    name, *inner = path
    is_there, signature = False, None
    for node in _statements(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            if inner:
                return _look_up(node.body, inner) if isinstance(node, ast.ClassDef) else (False, None)
            is_there, signature = True, None if isinstance(node, ast.ClassDef) else signature_of(node)
        elif name in _bound(node):
            is_there, signature = True, None
    return (False, None) if inner else (is_there, signature)


def _statements(body: list[ast.stmt]):
    """Yield the statements of a module or class, also those under `if`, `try` and `with`."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that an import or an assignment binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {leaf.id for target in targets if target for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the parameters with defaults and without annotations, for example "(tensor, as_numpy=False)"."""
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    return f"({ast.unparse(arguments)})"
