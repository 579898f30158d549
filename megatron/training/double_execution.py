"""What a DMR plan has to have been made for."""

import torch

from ft.dmr.runtime.settings import model_digest
from megatron import core
from megatron.patches import platform
from megatron.training.arguments import Layout, Options

_DECIDE = ("model", "moe", "kernels", "precision", "recompute")
_OTHERS = {
    "data": ("seq_length",),
    "parallel": ("sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce", "context_parallel_size"),
    "training": ("global_batch_size", "calculate_per_token_loss"),
    "optimizer": ("optimizer", "clip_grad"),
}


def fingerprint(options: Options, layout: Layout) -> dict[str, str | int]:
    """By the names of ``ft.dmr.plan.trace.FINGERPRINT``; "model" stands for all that decides which operators a run
    executes beside the layout."""
    told = options.as_dict()
    shape = {name: told[name] for name in _DECIDE}
    shape |= {f"{concern}.{name}": told[concern][name] for concern, names in _OTHERS.items() for name in names}
    here = platform()
    return {
        "model": model_digest(shape),
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": options.parallel.expert_model_parallel_size,
        "micro_batch": options.training.micro_batch_size,
        "torch": torch.__version__.split("+")[0],
        "core": core.__version__,
        "device": torch.cuda.get_device_name() if here.name == "cuda" else "cpu",
    }
