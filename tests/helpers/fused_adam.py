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


class ScaledAdam(torch.optim.Optimizer):
    """Transformer Engine's FusedAdam with moments and weights in half precision (``_apply_scale``,
    ``get_unscaled_state``, ``initialize_state`` and ``step`` of its fused_adam.py): the scale of each of these tensors
    is in ``_scales``, outside of the state, and gradients come in ``decoupled_grad``.
    """

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self._scales = {}

    def get_unscaled_state(self, p, name):
        return self.state[p][name].float() * self._scales[p][name]

    @torch.no_grad()
    def set_scaled_state(self, p, name, value):
        torch.div(value.abs().max(), torch.finfo(torch.float16).max / 2, out=self._scales[p][name][0])
        scale = self._scales[p][name]
        self.state[p][name].copy_(value * torch.where(scale > 0, scale.reciprocal(), 0.0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self._initialize(p)
                if (gradient := getattr(p, "decoupled_grad", None)) is None:
                    continue
                first, second = (self.get_unscaled_state(p, name) for name in ("exp_avg", "exp_avg_sq"))
                first = 0.9 * first + 0.1 * gradient
                second = 0.99 * second + 0.01 * gradient**2
                weight = self.get_unscaled_state(p, "master_param") - group["lr"] * first / (second.sqrt() + 1e-8)
                for name, value in (("exp_avg", first), ("exp_avg_sq", second), ("master_param", weight)):
                    self.set_scaled_state(p, name, value)
                p.copy_(weight)

    def _initialize(self, p):
        self._scales[p] = {}
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            self.state[p][name] = torch.zeros_like(p, dtype=torch.float16)
            self._scales[p][name] = torch.ones(1)
        self.set_scaled_state(p, "master_param", p.clone().float())


def install() -> None:
    """Have megatron-core use the optimizer, as where Apex is installed. Call it when megatron-core is imported."""
    for module in ("megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer"):
        replace(module, "Adam", FusedAdam)
    replace("megatron.core.optimizer", "USING_PYTORCH_OPTIMIZER", False)
    replace("megatron.core.optimizer.distrib_optimizer", "HAVE_APEX_OR_TE", True)
    replace("megatron.core.optimizer.distrib_optimizer", "USING_APEX_OPTIMIZER", True)
