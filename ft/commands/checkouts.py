"""Read the command line of ``ft run`` for a script in a checkout of NVIDIA's Megatron-LM, not for this project's
trainer.

Flags that begin with ``--ft-`` are this project's and are taken out; all others go to the checkout's own parser.
Without any such flag the script runs as with torchrun, and this module has no effect. The script that trains with the
trainer in the installed megatron-core (:data:`ft.adapters.megatron_lm.tree.SCRIPT`) has one more flag of this project,
``--metrics-file``, and under ``ft run`` its steps are logged without any flag.
"""

import argparse
import ast
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ft.adapters.megatron_lm import hooks, refusals, tree
from ft.adapters.megatron_lm.hooks import own_flags
from ft.base import files
from ft.base.errors import Problem, UserError
from ft.base.options import add_flags, all_spellings, build
from ft.commands.arguments import launchers_flags, misplaced
from ft.protection import table
from ft.protection.flags import FaultToleranceOptions

if TYPE_CHECKING:
    from ft.job.agent.options import Script
    from megatron.ft_trainer.arguments.needs import Need

MODULE, PRELOAD = "ft.adapters.megatron_lm", "ft.adapters.megatron_lm.preload"


def is_checkout(script: "Script") -> bool:
    """Return whether ``script`` belongs to a checkout of Megatron-LM."""
    return not script.is_module and tree.root_of(script.target) is not None


def is_protected_checkout(script: "Script") -> bool:
    """Return whether the adapter runs ``script``: it belongs to a checkout of Megatron-LM and has a flag of this
    project, or it is that of the installed megatron-core, and its trainer is in no mode that the adapter refuses.
    """
    if not is_checkout(script):
        return False
    return has_own_flags(script) or (_is_installed(script) and not list(refusals.of_flags(script.args)))


def has_own_flags(script: "Script") -> bool:
    """Return whether a checkout's ``script`` has a flag that is this project's."""
    return bool(_split(script)[0])


def flags_of_trainer(script: "Script") -> list[str]:
    """Return the arguments of ``script`` without the flags that are this project's."""
    return _split(script)[1]


def outside_checkout(script: "Script") -> list[Problem]:
    """Return the problem of a script that imports Megatron-LM's trainer and has protection flags, but lies outside a
    checkout of Megatron-LM.
    """
    file = Path(script.target)
    if script.is_module or is_checkout(script) or not has_own_flags(script):
        return []
    try:
        body = ast.walk(ast.parse(files.read_text(file)))
    except (OSError, SyntaxError, ValueError):
        return []
    names = {
        alias.name
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module == "megatron.training"
        for alias in node.names
    }
    if "pretrain" not in names:
        return []
    if (below := below_a_checkout(file)) is not None:
        return [below]
    problem = f"{file} is a script of Megatron-LM, but there is no megatron/training/training.py beside it"
    return [(problem, "give the script in its checkout: Megatron-LM/pretrain_gpt.py")]


def below_a_checkout(file: Path) -> Problem | None:
    """Return the problem of a script that lies in a subfolder of a checkout of Megatron-LM; None for other scripts."""
    root = next((root for folder in file.absolute().parents if (root := tree.root_of(str(folder)))), None)
    if root is None:
        return None
    problem = (
        f"{file} lies in a subfolder of the Megatron-LM checkout {root}; only scripts in its own folder, which train "
        "by megatron/training/training.py beside them, are protected"
    )
    return problem, f"give a script of that folder, such as {root / 'pretrain_gpt.py'}, or drop the --ft flags"


def adapted(script: "Script", replicas: int = 0) -> "Script":
    """Return the script that the workers run instead of ``script``: the adapter, which runs ``script``.

    Args:
        replicas: number of FT-HSDP replicas; 0: none.

    Raises:
        UserError: the flags that begin with ``--ft-`` cannot be parsed.
    """
    own, theirs = _split(script)
    metrics, own = _metrics_file(own)
    options = read_flags(own)
    theirs = _without_reruns(script, theirs, options, replicas)
    values = json.dumps({**_values(options), "metrics_file": metrics})
    preload = script.preload if script.preload == ["none"] else [PRELOAD, *script.preload]
    return replace(script, target=MODULE, is_module=True, args=[values, script.target, *theirs], preload=preload)


def examine(script: "Script", world_size: int | None, replicas: int) -> tuple[Any, list[Problem]]:
    """Examine a protected run of a checkout's script before anything starts: the checkout's files and the flags.

    Args:
        world_size: number of ranks; None if it is unknown.
        replicas: number of FT-HSDP replicas; 0: none.

    Returns:
        (the options, or None; all problems, each with its fix). The options are those of :func:`examine_flags`. They
        are None, too, if the files have a problem.
    """
    _, of_files = examine_files(script.target)
    options, of_flags = examine_flags(script, world_size, replicas)
    return None if of_files else options, [*of_files, *of_flags]


def examine_files(script: str) -> tuple[list[hooks.HookFinding], list[Problem]]:
    """Return whether the files of the checkout of ``script`` can be protected.

    This parses the trainer's modules, which takes a few tenths of a second.

    Returns:
        (one finding for each function of the trainer that protections depend on; the problems, each with its fix).
    """
    root = tree.root_of(script)
    findings = hooks.check_tree(root)
    try:
        return findings, [*hooks.problems(tree.read(root), findings), *_second_packages(root)]
    except UserError as error:
        return findings, error.problems


def notices(script: str) -> list[str]:
    """Return sentences about the checkout of ``script`` that refuse nothing.

    Raises:
        UserError: the checkout has no megatron-core.
    """
    found = hooks.notice(tree.read(tree.root_of(script)))
    return [] if found is None else [found]


def examine_flags(script: "Script", world_size: int | None, replicas: int) -> tuple[Any, list[Problem]]:
    """Return what is known of the options of a checkout's trainer, and the problems of the script's flags.

    Args:
        world_size: number of ranks; None if it is unknown.
        replicas: number of FT-HSDP replicas; 0: none.

    Returns:
        (the options; the problems, each with its fix). The options have the fields ``fault_tolerance`` (the values of
        the ``--ft`` flags), ``training``, ``core`` and ``checkpoint`` (the checkout's own flags that protections
        check). They are None if ``world_size`` is unknown or if a mode of the trainer or a protection is refused.
    """
    own, theirs = _split(script)
    metrics, own = _metrics_file(own)
    try:
        options = read_flags(own)
    except UserError as error:
        return None, error.problems
    theirs = _without_reruns(script, theirs, options, replicas)
    found = [*_misplaced(script, theirs), *refusals.of_flags(theirs)]
    if own and not replicas and not any(entry.flags for entry in table.asked_for(options, {})):
        found.append(("these --ft flags ask for no protection", "add --ft-hot-swap"))
    if metrics is not None and replicas:
        found.append(LOSES_LINES)
    if found or world_size is None:
        return None, found
    view, grid = _view(theirs, options, world_size)
    found += refusals.of_rerun_mode(view.training.rerun_mode, options.intercepts_operators, replicas > 0)
    return view, [*found, *table.problems(view, grid, replicas, os.environ)]


def read_flags(flags: Sequence[str]) -> FaultToleranceOptions:
    """Parse flags that begin with ``--ft-``.

    Raises:
        UserError: a flag is unknown or has a wrong value.
    """
    from megatron.ft_trainer.arguments import explain

    known = all_spellings(FaultToleranceOptions)
    for text in flags:
        name = text.partition("=")[0]
        if name.startswith("--ft-") and name not in known:
            (problem, fix), _ = explain(name, known)
            raise UserError(problem, fix)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_flags(parser, FaultToleranceOptions)
    try:
        return build(FaultToleranceOptions, vars(parser.parse_args(list(flags))))
    except argparse.ArgumentError as error:
        raise UserError(str(error), "give the flag a value that it takes") from error


def needs_of_model(script: "Script", layer_pattern: str | None) -> "list[Need]":
    """Return what the model of a checkout's script requires beyond what its flags require.

    Core's stack of Mamba, attention and MLP layers, which ``pretrain_mamba.py`` and ``pretrain_hybrid.py`` train, makes
    its last norm with Transformer Engine.

    Args:
        layer_pattern: kinds of the layers, such as "M*M-", where M is a Mamba layer; None if the flags give none.
    """
    from megatron.ft_trainer.arguments.needs import TE, Need

    text = files.read(script.target).decode(errors="replace")
    if not re.search(r"\b(mamba_builder|hybrid_builder|pretrain_hybrid)\b", text):
        return []
    packages = [TE, "mamba-ssm"] if layer_pattern is None or "M" in layer_pattern else [TE]
    return [Need(script.target, package) for package in packages]


def parsers_flags(script: "Script") -> frozenset[str]:
    """Return the flags that the own parser of a checkout's script knows."""
    return own_flags(tree.root_of(script.target), Path(script.target))


def _values(options: FaultToleranceOptions) -> dict[str, Any]:
    derived = {"intercepts_operators": options.intercepts_operators, "rebuilds_stages": options.rebuilds_stages}
    return {**vars(options), **derived}


def _is_installed(script: "Script") -> bool:
    """Return whether ``script`` is the one that runs the trainer in the installed megatron-core."""
    return not script.is_module and Path(script.target) == tree.SCRIPT


def _split(script: "Script") -> tuple[list[str], list[str]]:
    """Return (the script's flags that are this project's, with their values; all others)."""
    own: list[str] = []
    theirs: list[str] = []
    target = theirs
    more = (tree.METRICS,) if _is_installed(script) else ()
    for text in script.args:
        if text.startswith("--"):
            target = own if text.startswith("--ft-") or text.partition("=")[0] in more else theirs
        target.append(text)
    return own, theirs


def _metrics_file(own: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return (the value of --metrics-file, None if it is not given; the other flags)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(tree.METRICS)
    found, others = parser.parse_known_args(list(own))
    return found.metrics_file, others


def _without_reruns(script: "Script", theirs: list[str], options: FaultToleranceOptions, replicas: int) -> list[str]:
    """Return the trainer's flags, with ``--rerun-mode disabled`` where a protection needs it.

    Only the script of the installed megatron-core, which is this project's, has this default; in a checkout the rerun
    state machine is on unless the user switches it off.
    """
    is_given = any(text.partition("=")[0] == "--rerun-mode" for text in theirs)
    needs = options.intercepts_operators or replicas > 0
    return [*theirs, "--rerun-mode", "disabled"] if needs and _is_installed(script) and not is_given else theirs


def _misplaced(script: "Script", flags: Sequence[str]) -> list[Problem]:
    """Return an error for each flag of ``ft run`` that the checkout's parser does not have under the same name."""
    names = dict.fromkeys(name for text in flags if (name := text.partition("=")[0]) in launchers_flags())
    own = parsers_flags(script) if names else frozenset()
    return [found for name in names if name not in own and (found := misplaced(f"unknown flag {name}"))]


def _second_packages(root: Path) -> list[Problem]:
    others = tree.others_on_path(root, [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path])
    return [
        (
            f"Python finds a second package megatron in {other}, besides that of {root}",
            f"remove {other} from PYTHONPATH",
        )
        for other in others
    ]


LOSES_LINES: Problem = (
    "--metrics-file is one file, and each replica would write it",
    "drop it: each replica writes metrics.jsonl in its own folder",
)


_SIZES = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
_NUMBERS = (
    *("global_batch_size", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "expert_tensor_parallel_size"),
    *("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
)


class _Given(SimpleNamespace):
    """The flags of a launch line. A flag that was not given is False."""

    def __getattr__(self, name: str) -> bool:
        return False


def _others(flags: Sequence[str]) -> dict[str, str | bool]:
    """Return the values of flags of which nothing is known: the word after them, or True if there is none."""
    found: dict[str, str | bool] = {}
    for flag, after in itertools.pairwise((*flags, "--")):
        if flag.startswith("--"):
            name, _, value = flag.removeprefix("--").partition("=")
            found[name.replace("-", "_")] = value or (True if after.startswith("--") else after)
    return found


def _view(flags: Sequence[str], options: FaultToleranceOptions, world_size: int) -> tuple[Any, Any]:
    """Return (the trainer's options, the sizes of its parallel groups), from which the systems check their flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in {**_SIZES, "micro_batch_size": 1, **dict.fromkeys(_NUMBERS)}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--rampup-batch-size", nargs="*", type=int)
    parser.add_argument("--moe-router-load-balancing-type", nargs="+", default=["aux_loss"])
    patterns = "param-name-patterns-for-fp32-local-accumulation"
    parser.add_argument(f"--ddp-{patterns}", nargs="+", dest=patterns.replace("-", "_"), default=[])
    parser.add_argument("--train-iters", type=int)
    parser.add_argument("--save")
    parser.add_argument("--rerun-mode", default="validate_results")
    known, rest = parser.parse_known_args(list(flags))
    given = _Given(**_others(rest), **vars(known))
    dp = max(1, world_size // math.prod(getattr(given, name) for name in _SIZES))
    given.global_batch_size = given.global_batch_size or given.micro_batch_size * dp
    vpp = given.num_layers_per_virtual_pipeline_stage or given.num_virtual_stages_per_pipeline_rank
    grid = SimpleNamespace(world_size=world_size, pp=given.pipeline_model_parallel_size, vpp=vpp, dp=dp)
    concerns = dict.fromkeys(("training", "core", "checkpoint"), given)
    return SimpleNamespace(fault_tolerance=options, **concerns), grid
