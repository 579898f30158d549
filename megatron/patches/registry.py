"""Selects the patches that this process needs, checks that all of them fit megatron-core, and applies them."""

from importlib import import_module

from megatron.patches.check import check, refusal
from megatron.patches.manifest import ALWAYS, MANIFEST, ON_CPU, Patch
from megatron.patches.sources import CoreSources, installed_core

_in_force: list[Patch] = []


def due(platform_name: str, features: frozenset[str] = frozenset()) -> list[Patch]:
    """Return the manifest's entries for a platform ("cuda" or "cpu") and the given features."""
    wanted = {ALWAYS, *features} | ({ON_CPU} if platform_name == "cpu" else set())
    return [patch for patch in MANIFEST if patch.when in wanted]


def apply(patches: list[Patch], core: CoreSources | None = None) -> list[Patch]:
    """Apply those of `patches` that this process has not applied yet.

    Args:
        patches: entries of the manifest.
        core: the sources to check against; default: those of the installed megatron-core.

    Returns:
        `patches`.

    Raises:
        UserError: a patch does not fit (see :func:`megatron.patches.check.refusal`); none has been applied.
    """
    new = [patch for patch in patches if patch not in _in_force]
    if new:
        core = core or installed_core()
        for finding in check(new, core, with_torch=True):
            if not finding.fits:
                raise refusal(finding, core)
        for file in dict.fromkeys(patch.file for patch in new):
            import_module(f"megatron.patches.{file}").apply()
        _in_force.extend(new)
    return patches
