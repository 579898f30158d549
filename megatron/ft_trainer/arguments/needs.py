"""What a command line requires of the machine that runs it: a GPU, Transformer Engine, Python packages."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base.errors import Problem
from megatron.ft_trainer.arguments.layout import Layout

GPU, TE = "GPU", "transformer-engine"

_PACKAGES = {
    "mamba-ssm": "mamba_ssm",
    "emerging-optimizers": "emerging_optimizers",
    "flash-linear-attention": "fla",
    "deep-ep": "deep_ep",
    "wandb": "wandb",
    "transformers": "transformers",
    "sentencepiece": "sentencepiece",
    "tiktoken": "tiktoken",
}
"""Packages that a flag can require -> the name that Python imports them by."""

_ON_GPU = ("mamba-ssm", "flash-linear-attention", "deep-ep")
"""Packages whose kernels run on GPUs only."""

_OF_TOKENIZERS = {
    "GPT2BPETokenizer": "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}


@dataclass(frozen=True)
class Need:
    """A flag or a script, and what it requires: GPU, TE, or the name of a package."""

    flag: str
    requirement: str


def needs(options: Any, grid: Layout | None) -> list[Need]:
    """Return what the options require.

    Args:
        options: ``megatron.ft_trainer.arguments.Options``.
        grid: sizes of the parallel groups, or None if they are not known.
    """
    found = [Need(flag, TE) for flag, on in _of_te(options, grid).items() if on]
    found += [Need(flag, GPU) for flag, on in _of_gpus(options).items() if on]
    return found + list(_of_packages(options))


def _of_te(options: Any, grid: Layout | None) -> dict[str, bool]:
    c = options.core
    has_experts = bool(c.num_experts)
    of_te = ("layernorm", "moe_act", "mla_up_proj")  # megatron-core recomputes these with Transformer Engine only
    return {
        "--context-parallel-size": grid is not None and grid.cp > 1,
        f"--transformer-impl {c.transformer_impl}": c.transformer_impl not in (None, "local"),
        "--fp8-format": bool(c.fp8),
        "--fp4-format": bool(getattr(c, "fp4", None)),
        "--moe-grouped-gemm": has_experts and c.moe_grouped_gemm,
        "--moe-permute-fusion": has_experts and c.moe_permute_fusion,
        "--moe-router-fusion": has_experts and bool(getattr(c, "moe_router_fusion", False)),
        "--apply-layernorm-1p": c.layernorm_zero_centered_gamma,
        **{f"--recompute-modules {name}": name in (c.recompute_modules or []) for name in of_te},
        "--cross-entropy-fusion-impl te": c.cross_entropy_fusion_impl == "te" and c.cross_entropy_loss_fusion,
        "--multi-latent-attention": c.multi_latent_attention,  # core's own attention has one width for keys and values
        "--tp-comm-overlap": c.tp_comm_overlap,
        "--te-rng-tracker": c.use_te_rng_tracker,
        "--delay-wgrad-compute": c.delay_wgrad_compute,
        "--fine-grained-activation-offloading": bool(getattr(c, "fine_grained_activation_offloading", False)),
        "--cuda-graph-impl transformer_engine": getattr(c, "cuda_graph_impl", None) == "transformer_engine",
        "--external-cuda-graph": bool(getattr(c, "external_cuda_graph", False)),
        "--window-size": c.window_size is not None,
    }


def _of_gpus(options: Any) -> dict[str, bool]:
    c = options.core
    return {
        "--distributed-backend nccl": c.distributed_backend == "nccl",
        "--nccl-communicator-config-path": c.nccl_communicator_config_path is not None,
        "--high-priority-stream-groups": bool(c.high_priority_stream_groups),
        "--cuda-graph-impl local": getattr(c, "cuda_graph_impl", None) == "local",
        "--enable-cuda-graph": bool(getattr(c, "enable_cuda_graph", False)),
        "--use-nccl-ub": bool(getattr(c, "nccl_ub", False)),
        "--cpu-offloading-num-layers": bool(c.cpu_offloading_num_layers),
        "--optimizer-cpu-offload": c.optimizer_cpu_offload,
        "--moe-token-dispatcher-type flex": bool(c.num_experts) and c.moe_token_dispatcher_type == "flex",
        "--overlap-moe-expert-parallel-comm": c.overlap_moe_expert_parallel_comm,
        "--record-memory-history": options.logging.record_memory_history,
        "--profile": options.logging.profile and not options.logging.use_pytorch_profiler,
    }


def _of_packages(options: Any) -> Iterator[Need]:
    c = options.core
    wanted = {
        "--hybrid-override-pattern": (bool(c.hybrid_override_pattern), "mamba-ssm"),
        "--hybrid-layer-pattern": (bool(c.hybrid_layer_pattern), "mamba-ssm"),
        f"--optimizer {c.optimizer}": (c.optimizer not in ("adam", "sgd"), "emerging-optimizers"),
        f"--experimental-attention-variant {c.experimental_attention_variant}": (
            c.experimental_attention_variant is not None,
            "flash-linear-attention",
        ),
        "--moe-enable-deepep": (bool(getattr(c, "moe_enable_deepep", False)), "deep-ep"),
        "--wandb-project": (bool(options.logging.wandb_project), "wandb"),
    }
    if package := _OF_TOKENIZERS.get(options.tokenizer.tokenizer_type or ""):
        wanted[f"--tokenizer-type {options.tokenizer.tokenizer_type}"] = (True, package)
    for flag, (on, package) in wanted.items():
        if on:
            yield Need(flag, package)


def in_words(found: list[Need]) -> list[str]:
    """Return each requirement once, in words. Transformer Engine and packages with GPU kernels imply the GPU."""
    names = dict.fromkeys(need.requirement for need in found)
    if {TE, *_ON_GPU} & set(names):
        return list(dict.fromkeys([GPU, *names]))
    return list(names)


def unmet(found: list[Need], has: Callable[[str], bool]) -> list[Problem]:
    """Return (problem, fix) for each requirement that this machine does not meet.

    Args:
        found: the requirements.
        has: whether a requirement is met.
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
    if requirement in (GPU, TE):
        return may_have_gpu() if requirement == GPU else may_have_te()
    return is_installed(requirement)


def is_installed(package: str) -> bool:
    """Return whether a package that a flag can require is installed."""
    return importlib.util.find_spec(_PACKAGES[package]) is not None


def may_have_gpu() -> bool:
    """Return whether this machine may have a GPU. The check does not import torch."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def may_have_te() -> bool:
    """Return whether Transformer Engine is installed on a machine that may have a GPU, without importing torch."""
    return may_have_gpu() and importlib.util.find_spec("transformer_engine") is not None
