"""The summary of a run before its first step."""

from importlib.metadata import PackageNotFoundError, version

import torch

from megatron import patches
from megatron.core import parallel_state
from megatron.ft_trainer.arguments import Layout, Options
from megatron.ft_trainer.model import params_dtype, uses_te


def startup_summary(options: Options, layout: Layout, parameters: int, tokenizer) -> str:
    """Return a summary of model, data and platform, in a few lines. ``parameters``: those of the whole model."""
    m, t = options.core, options.training
    experts = f", {options.core.num_experts} experts" if options.core.num_experts else ""
    rows = {
        "megatron-core": f"{version('megatron-core')}, torch {torch.__version__}, {_installed('transformer-engine')}, "
        f"{_installed('apex')}",
        "platform": f"{patches.platform().name}, {layout}",
        "layers": "transformer_engine" if uses_te(options) else "local (torch)",
        "model": f"{m.num_layers} layers, hidden {m.hidden_size}, {m.num_attention_heads} heads{experts}, "
        f"{parameters / 1e6:.2f} M parameters, {str(params_dtype(options)).removeprefix('torch.')}",
        "tokenizer": f"{type(tokenizer).__name__}, vocabulary {tokenizer.vocab_size}",
        "batch": f"{t.global_batch_size} samples of {options.data.seq_length} tokens, micro batch {t.micro_batch_size}",
        "length": f"{t.train_iters} steps",
    }
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())


def count_parameters(chunks: list[torch.nn.Module]) -> int:
    """Return the number of parameters of the whole model, each counted once.

    All ranks have to call it, and get the same result.
    """
    counts = torch.zeros(2, dtype=torch.int64, device=torch.cuda.current_device())
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for param in (p for chunk in chunks for p in chunk.parameters()):
        if getattr(param, "shared", False):
            continue
        if not getattr(param, "allreduce", True):
            counts[1] += param.numel()
        elif getattr(param, "tensor_model_parallel", False) or tp_rank == 0:
            counts[0] += param.numel()
    torch.distributed.all_reduce(counts[:1], group=parallel_state.get_model_parallel_group())
    torch.distributed.all_reduce(counts[1:], group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return int(counts.sum())


def _installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"
