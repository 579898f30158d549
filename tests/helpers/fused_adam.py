"""Stands in for the optimizer of Apex and Transformer Engine, whose kernels need a GPU.

NVIDIA's trainer cannot load the state of a distributed optimizer around torch's own AdamW, which counts steps for each
parameter. This optimizer counts them for each parameter group, as those two do, and computes with torch's function.
"""

import torch
from torch.optim.adamw import adamw

from megatron.patches.replace import replace


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the arguments and the state of Apex's class of this name."""

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, capturable=False
    ):
        assert adam_w_mode and not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            done = group.get("step", 0)
            group["step"] = done + 1
            moved = [p for p in group["params"] if p.grad is not None]
            for p in moved:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            adamw(
                moved,
                [p.grad for p in moved],
                [self.state[p]["exp_avg"] for p in moved],
                [self.state[p]["exp_avg_sq"] for p in moved],
                [],
                [torch.tensor(float(done)) for _ in moved],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def install() -> None:
    """Have megatron-core use the optimizer, as where Apex is installed. Call it when megatron-core is imported."""
    for module in ("megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer"):
        replace(module, "Adam", FusedAdam)
    replace("megatron.core.optimizer", "USING_PYTORCH_OPTIMIZER", False)
    replace("megatron.core.optimizer.distrib_optimizer", "HAVE_APEX_OR_TE", True)
    replace("megatron.core.optimizer.distrib_optimizer", "USING_APEX_OPTIMIZER", True)
