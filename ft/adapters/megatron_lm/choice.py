"""Decides which of its two trainers ``pretrain_gpt.py`` runs: NVIDIA's, or the reference trainer of this project.

NVIDIA's trainer is :mod:`megatron.training`, which the installed megatron-core carries. The reference trainer is
:mod:`megatron.ft_trainer`.
"""

from collections.abc import Sequence

from ft.adapters.megatron_lm import tree
from ft.base.errors import UserError

NVIDIA, REFERENCE = "--nvidia-trainer", "--reference-trainer"
HELP = f"""
which trainer:
  {REFERENCE}   this project's own trainer, whose flags are listed here (default)
  {NVIDIA}      NVIDIA's trainer in the installed megatron-core; it takes all flags of Megatron-LM
"""
SINCE = (0, 19)
"""(major, minor) of the oldest megatron-core whose trainer :mod:`ft.adapters.megatron_lm.gpt` was run with."""


def choose(flags: Sequence[str], release: tuple[int, ...] | None) -> tuple[bool, list[str]]:
    """Return (whether NVIDIA's trainer runs; the flags without those that choose the trainer).

    Args:
        release: (major, minor, patch) of the installed megatron-core, if it carries the trainer; None: it does not.

    Raises:
        UserError: both trainers are asked for, or NVIDIA's, and it is not there.
    """
    asked = [flag for flag in (NVIDIA, REFERENCE) if flag in flags]
    others = [flag for flag in flags if flag not in asked]
    if len(asked) == 2:
        raise UserError(f"{NVIDIA} and {REFERENCE} contradict each other", "give one of them")
    if asked != [NVIDIA]:
        return False, others
    since = ".".join(map(str, SINCE))
    if release is None or release[:2] < SINCE:
        found = "the installed megatron-core carries no trainer"
        if release is not None:
            found = f"the trainer in megatron-core {'.'.join(map(str, release))} takes its model in another way"
        fix = f"install megatron-core {since} or newer (Python 3.12), give the script of a checkout, or drop the flag"
        raise UserError(f"{NVIDIA} cannot be used: {found}", fix)
    return True, others


def installed_release() -> tuple[int, ...] | None:
    """Return (major, minor, patch) of the installed megatron-core, if it carries the trainer; None: it does not.

    Raises:
        UserError: there is a trainer, and no megatron-core beside it.
    """
    root = tree.installed()
    return None if root is None else tree.read(root).release


def announcement(release: tuple[int, ...] | None) -> str:
    """Return the first line of a run: NVIDIA's trainer in megatron-core ``release``; None: the reference trainer."""
    if release is None:
        return "trainer: the reference trainer, megatron.ft_trainer"
    return f"trainer: NVIDIA's, megatron.training in megatron-core {'.'.join(map(str, release))}"
