"""What a command line requires of the machine that runs it: a GPU, Transformer Engine, Python packages."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base.errors import Problem
from megatron.ft_trainer.arguments.layout import Layout
from megatron.ft_trainer.arguments.topics import OF_CORE

GPU, TE = "GPU", "transformer-engine"

_OF_TOKENIZERS = {**OF_CORE, **dict.fromkeys(("GPT2BPETokenizer", "HuggingFaceTokenizer"), "transformers")}
"""Value of --tokenizer-type -> the package that it needs."""

_OF_SWITCHES = {
    TE: (
        *("fp8", "fp4", "layernorm_zero_centered_gamma", "multi_latent_attention", "tp_comm_overlap"),
        *("delay_wgrad_compute", "fine_grained_activation_offloading", "external_cuda_graph"),
    ),
    GPU: (
        *("enable_cuda_graph", "cpu_offloading_num_layers"),
        "overlap_moe_expert_parallel_comm",
    ),
}
"""Requirement -> options of megatron-core that have it, if they are on."""

_OF_EXPERTS = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
_SPELT = {"fp8": "--fp8-format", "fp4": "--fp4-format", "layernorm_zero_centered_gamma": "--apply-layernorm-1p"}
_RECOMPUTED_BY_TE = ("layernorm", "moe_act", "mla_up_proj")


@dataclass(frozen=True)
class Need:
    """A flag or a script, and what it requires: GPU, TE, or the name of a package."""

    flag: str
    requirement: str


def needs(options: Any, grid: Layout | None) -> list[Need]:
    """Return what ``options`` (``megatron.ft_trainer.arguments.Options``) require; ``grid``: None if it is unknown."""
    c = options.core
    switches = {**_OF_SWITCHES, TE: (*_OF_SWITCHES[TE], *(_OF_EXPERTS if c.num_experts else ()))}
    found = [
        Need(_SPELT.get(name, f"--{name.replace('_', '-')}"), requirement)
        for requirement, names in switches.items()
        for name in names
        if getattr(c, name, None)
    ]
    graphs = getattr(c, "cuda_graph_impl", None)
    package = _OF_TOKENIZERS.get(options.tokenizer.tokenizer_type or "")
    others = (
        ("--context-parallel-size", TE, grid is not None and grid.cp > 1),
        (f"--transformer-impl {c.transformer_impl}", TE, c.transformer_impl not in (None, "local")),
        *((f"--recompute-modules {n}", TE, n in (c.recompute_modules or [])) for n in _RECOMPUTED_BY_TE),
        ("--cross-entropy-fusion-impl te", TE, c.cross_entropy_fusion_impl == "te" and c.cross_entropy_loss_fusion),
        (f"--cuda-graph-impl {graphs}", TE if graphs == "transformer_engine" else GPU, graphs not in (None, "none")),
        ("--use-precision-aware-optimizer", TE, c.use_precision_aware_optimizer and not c.optimizer_cpu_offload),
        ("--distributed-backend nccl", GPU, c.distributed_backend == "nccl"),
        ("--moe-token-dispatcher-type flex", GPU, bool(c.num_experts) and c.moe_token_dispatcher_type == "flex"),
        (f"--tokenizer-type {options.tokenizer.tokenizer_type}", package, package is not None),
    )
    return found + [Need(flag, requirement) for flag, requirement, is_given in others if is_given]


def in_words(found: list[Need]) -> list[str]:
    """Return each requirement once, in words. Transformer Engine and packages with GPU kernels imply the GPU."""
    names = dict.fromkeys(need.requirement for need in found)
    if {TE, "mamba-ssm"} & set(names):
        return list(dict.fromkeys([GPU, *names]))
    return list(names)


def unmet(found: list[Need], has: Callable[[str], bool]) -> list[Problem]:
    """Return (problem, fix) for each requirement in ``found`` that this machine does not meet: ``has`` says what it
    has.
    """
    fixes = {GPU: "run it where there is one, or drop the flag"}
    fixes[TE] = "pip install 'megatron-ft[te]' on a CUDA machine, or drop the flag"
    named = {GPU: "a GPU, and there is none here", TE: "Transformer Engine, which is not installed"}
    problems: list[Problem] = []
    for need in found:
        name = need.requirement
        if not has(name):
            what = named.get(name, f"the package {name}, which is not installed here")
            problems.append((f"{need.flag} needs {what}", fixes.get(name, f"pip install {name}, or drop the flag")))
    return problems


def is_here(requirement: str) -> bool:
    """Return whether this machine seems to have a required package or GPU, without importing torch."""
    if requirement == GPU:
        return may_have_gpu()
    found = importlib.util.find_spec(requirement.replace("-", "_")) is not None
    return found and (requirement != TE or may_have_gpu())


def may_have_gpu() -> bool:
    """Return whether this machine may have a GPU. The check does not import torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
