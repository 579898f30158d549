"""Selects the patches that this process needs, checks that all of them fit megatron-core and torch, and applies them.

The check compares the symbols of the imported modules, and the signatures of the functions among them, with the
records of the patches. Megatron-core is called "core" here.
"""

import inspect
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ft.base.errors import UserError
from megatron.patches import platform, replace
from megatron.patches.manifest import (
    ALWAYS,
    EVERY_FUNCTION,
    MODULES,
    ON_CPU,
    STAYS,
    SUPPORTED_CORE,
    SUPPORTED_TORCH,
    Patch,
)

FITS, MISSING, CHANGED, NOT_CHECKED = "fits", "missing", "changed", "not checked"

_in_force: list[Patch] = []
_ABSENT = object()


@dataclass(frozen=True)
class PatchFinding:
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


def due(platform_name: str, features: Collection[str] = ()) -> list[Patch]:
    """Return the patches for a platform ("cuda" or "cpu") and the given features.

    Raises:
        UserError: core is not installed, or lacks what the modules of the patches import.
    """
    if find_spec("megatron.core") is None:
        fix = "pip install megatron-core==0.19.2 (0.16.1 for Python 3.11)"
        raise UserError("megatron-core is not installed", fix)
    if platform().name == "cpu":  # before any module that imports core
        import_core()
    wanted = {ALWAYS, *features} | ({ON_CPU} if platform_name == "cpu" else set())
    files = [(when, file) for when, files in MODULES.items() if when in wanted for file in files]
    try:
        modules = {file: import_module(f"megatron.patches.{file}") for _, file in files}
    except (ImportError, AttributeError) as error:
        problem = f"megatron-core {core_version()} lacks what megatron/patches imports: {error}"
        raise UserError(problem, f"install a supported version ({SUPPORTED_CORE})") from error
    return [with_fields(patch, file=file, when=when) for when, file in files for patch in modules[file].PATCHES]


def everything() -> list[Patch]:
    """Return the patches for all platforms and features."""
    return due("cpu", MODULES)


@cache
def import_core() -> None:
    """Import `megatron.core` with its `torch.compile` decorators off: compiling takes minutes and gains nothing."""
    if "megatron.core" in sys.modules:
        from megatron.core import jit

        if jit.jit_fuser is not jit.noop_decorator:
            torch.compiler.set_stance("force_eager")
    else:
        compile_ = torch.compile
        torch.compile = lambda model=None, **kwargs: model if model is not None else (lambda f: f)
        try:
            from megatron.core import jit
        finally:
            torch.compile = compile_


def apply(patches: list[Patch]) -> list[Patch]:
    """Apply the patches (see :func:`due`) that this process has not applied yet, and return all that were given.

    Raises:
        UserError: a patch does not fit (see :func:`refusal`); none has been applied.
    """
    new = [patch for patch in patches if patch not in _in_force]
    for finding in check(new):
        if not finding.fits:
            raise refusal(finding)
    put(new)
    for file in dict.fromkeys(patch.file for patch in new):
        getattr(import_module(f"megatron.patches.{file}"), "apply", lambda: None)()
    _in_force.extend(new)
    return patches


def put(patches: Iterable[Patch]) -> None:
    """Replace the symbols of ``patches``, unless they were replaced before, without a check."""
    for patch in patches:
        if patch.wrapper is not None:
            replace.wrap(patch.module, patch.symbol, patch.wrapper)
        elif patch.new is not STAYS:
            replace.replace(patch.module, patch.symbol, patch.new)


def check(patches: Sequence[Patch]) -> list[PatchFinding]:
    """Return one finding per patch, in order. Imports the modules of the patches; nothing is replaced."""
    return [_check(patch) for patch in patches]


def refusal(finding: PatchFinding) -> UserError:
    """Return the error for a patch that does not fit, with the symbol, both signatures and the versions."""
    patch = finding.patch
    expected = " or ".join(patch.signatures) or "a name of that module"
    found = finding.found or ("no such symbol" if finding.status == MISSING else "a name, not a function")
    is_of_core = patch.package == "megatron"
    installed = f"megatron-core {core_version()}" if is_of_core else "the installed torch"
    return UserError(
        f"{patch.module}: {patch.symbol} is not what megatron/patches/{patch.file}.py replaces: expected {expected}, "
        f"found {found} in {installed}",
        f"install a supported version ({SUPPORTED_CORE if is_of_core else SUPPORTED_TORCH})",
    )


def core_version() -> str:
    """Return the version of the core that this process imports, for example "0.16.1"."""
    return import_module("megatron.core").__version__


def signature_of(function: Any) -> str | None:
    """Return the parameters with defaults and without annotations, for example "(tensor, as_numpy=False)".

    Returns:
        None for classes, for what cannot be called, and for functions that have no signature.
    """
    if isinstance(function, type) or not callable(function):
        return None
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    plain = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=found.empty))


def _check(patch: Patch) -> PatchFinding:
    if patch.package == "transformer_engine":
        return PatchFinding(patch, NOT_CHECKED)
    found = _find(patch)
    if found is _ABSENT:
        return PatchFinding(patch, FITS if patch.added else MISSING)
    signature = signature_of(found)
    if patch.signatures and signature not in patch.signatures:
        return PatchFinding(patch, CHANGED, signature)
    return PatchFinding(patch, FITS, signature)


def _find(patch: Patch) -> Any:
    """Return the symbol of a patch, as it was before it was replaced; ``_ABSENT`` if there is none."""
    if patch.name in replace.replaced():
        return replace.original(patch.name)
    try:
        found: Any = import_module(patch.module)
        for part in () if patch.symbol == EVERY_FUNCTION else patch.symbol.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return _ABSENT
    return found
