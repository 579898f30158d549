"""Starts a checkout's script in a worker: ``python -m ft.adapters.megatron_lm OPTIONS SCRIPT FLAG ...``.

OPTIONS is a JSON object with the values of all ``--ft`` flags, which ``ft run`` has read from the command line, and
``metrics_file``: the file that gets a line for each step, null for ``metrics.jsonl`` in the folder of the run.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

from ft.base import bounded_json
from ft.base.errors import UserError

WRITING = "--save", "--tensorboard-dir", "--wandb-project"
"""Flags of the trainer with which it writes into folders and services that a run with the same flags uses."""


def main(argv: list[str]) -> int:
    """Run the script with the protections that the options request; return its exit code."""
    options, script, *flags = argv
    if os.environ.get("FT_STANDBY"):
        # A standby is no rank yet, and must not do what the first or the last rank does before groups exist.
        os.environ["RANK"] = os.environ["WORLD_SIZE"]
    try:
        load(script)
    except UserError as error:
        if is_first():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    from ft.adapters.megatron_lm import hooks, tree
    from ft.adapters.megatron_lm.install import install
    from ft.adapters.megatron_lm.state import CheckoutRun
    from ft.adapters.megatron_lm.trainer import newest
    from ft.job.agent.warm import run_script
    from ft.protection.stack import Protections
    from megatron import patches

    if is_first() and (notice := hooks.notice(tree.read(tree.root_of(script)))):
        print(f"ft: {notice}", flush=True)
    asked = SimpleNamespace(**bounded_json.loads(options, non_finite=True))
    protections = Protections.of(asked, os.environ)
    for feature in sorted(protections.features):
        patches.apply(feature)
    metrics = None if asked.metrics_file is None else Path(asked.metrics_file)
    if metrics is None and "FT_RUN_DIR" in os.environ:
        metrics = Path(os.environ["FT_RUN_DIR"]) / "metrics.jsonl"
    if asked.ft_dmr_profile is not None:  # the steps that are measured are not those of the run that is planned
        flags, metrics = _without(flags, WRITING), None
    install(CheckoutRun(protections, " ".join(flags)), metrics)
    if int(os.environ.get("FT_RESTART", "0")) > 0:
        flags = resuming(flags, lambda folder: newest(folder) is not None)
    return run_script(script, False, flags)


def is_first() -> bool:
    """Return whether this process speaks for all ranks before process groups exist."""
    return os.environ.get("RANK", "0") == "0"


def load(script: str) -> None:
    """Import the checkout that ``script`` is part of. On a machine without a GPU, adapt the checkout to the CPU first.

    Raises:
        UserError: a package that the checkout imports is not installed.
    """
    from ft.adapters.megatron_lm import tree

    tree.enter(tree.root_of(script) or Path(script).absolute().parent)
    if "megatron.training.training" in sys.modules:
        return
    from ft.adapters.megatron_lm import cpu
    from megatron import patches

    without_gpu = patches.platform().name == "cpu"
    if without_gpu:
        cpu.before_import()
    patches.apply()
    try:
        tree.module("training")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "megatron":
            raise
        problem = f"the trainer of {tree.root_of(script)} imports the package {error.name}, which is not installed"
        fix = f"pip install {error.name} (most of them: pip install 'megatron-ft[megatron-lm]')"
        raise UserError(problem, fix) from error
    if without_gpu:
        cpu.after_import()


def resuming(flags: list[str], has_checkpoint: Callable[[str], bool]) -> list[str]:
    """Return the flags of a warm restart, which load the newest checkpoint of the run itself, not that of the first
    start.

    Args:
        has_checkpoint: function that returns whether a folder has a complete checkpoint.
    """
    folder = None
    for index, text in enumerate(flags):
        name, equals, value = text.partition("=")
        if name == "--save":
            folder = value if equals else flags[index + 1]
    if folder is None or not has_checkpoint(folder):
        return flags
    switches = "--finetune", "--no-load-optim", "--no-load-rng"
    kept = _without(flags, ("--ckpt-step", "--load", "--pretrained-checkpoint"))
    return [*(text for text in kept if text not in switches), "--load", folder]


def _without(flags: list[str], names: Sequence[str]) -> list[str]:
    """Return the flags without those in ``names``, each of which takes one value."""
    kept, skipped = [], False
    for text in flags:
        name, equals, _ = text.partition("=")
        if skipped:
            skipped = False
        elif name in names:
            skipped = not equals
        else:
            kept.append(text)
    return kept
