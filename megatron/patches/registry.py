"""Selects the patches that this process needs, checks that all of them fit megatron-core and torch, and applies them.

The check compares the symbols of the imported modules, and the signatures of the functions among them, with the
manifest. Megatron-core is called "core" here.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ft.base.errors import UserError
from megatron.patches import platform, replace
from megatron.patches.manifest import ALWAYS, EVERY_FUNCTION, MANIFEST, ON_CPU, SUPPORTED_CORE, Patch

FITS, MISSING, CHANGED, NOT_CHECKED = "fits", "missing", "changed", "not checked"

_in_force: list[Patch] = []
_ABSENT = object()


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


def due(platform_name: str, features: frozenset[str] = frozenset()) -> list[Patch]:
    """Return the manifest's entries for a platform ("cuda" or "cpu") and the given features."""
    wanted = {ALWAYS, *features} | ({ON_CPU} if platform_name == "cpu" else set())
    return [patch for patch in MANIFEST if patch.when in wanted]


def apply(patches: list[Patch]) -> list[Patch]:
    """Apply those of ``patches``, entries of the manifest, that this process has not applied yet; return ``patches``.

    Raises:
        UserError: a patch does not fit (see :func:`refusal`), or core is not installed; none has been applied.
    """
    new = [patch for patch in patches if patch not in _in_force]
    for finding in check(new):
        if not finding.fits:
            raise refusal(finding)
    for file in dict.fromkeys(patch.file for patch in new):
        import_module(f"megatron.patches.{file}").apply()
    _in_force.extend(new)
    return patches


def check(patches: Sequence[Patch]) -> list[Finding]:
    """Return one finding per patch, in order. Imports the modules of the patches; nothing is replaced.

    Raises:
        UserError: a patch is one of core, and core is not installed.
    """
    if any(patch.kind == "core" for patch in patches):
        if find_spec("megatron.core") is None:
            fix = "pip install megatron-core==0.19.2 (0.16.1 for Python 3.11)"
            raise UserError("megatron-core is not installed", fix)
        if platform().name == "cpu":
            import_module("megatron.patches.cpu").import_core()
    return [_check(patch) for patch in patches]


def refusal(finding: Finding) -> UserError:
    """Return the error for a patch that does not fit, with the symbol, both signatures and the versions."""
    patch = finding.patch
    expected = " or ".join(patch.signatures) or "a name of that module"
    found = finding.found or ("no such symbol" if finding.status == MISSING else "a name, not a function")
    installed = f"megatron-core {core_version()}" if patch.kind == "core" else "the installed torch"
    return UserError(
        f"{patch.module}: {patch.symbol} is not what megatron/patches/{patch.file}.py replaces: expected {expected}, "
        f"found {found} in {installed}",
        f"install a supported version ({SUPPORTED_CORE}; this patch was checked on {', '.join(patch.checked_on)})",
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


def _check(patch: Patch) -> Finding:
    if patch.kind == "te":
        return Finding(patch, NOT_CHECKED)
    found = _find(patch)
    if found is _ABSENT:
        return Finding(patch, FITS if patch.added else MISSING)
    signature = signature_of(found)
    if patch.signatures and signature not in patch.signatures:
        return Finding(patch, CHANGED, signature)
    return Finding(patch, FITS, signature)


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
