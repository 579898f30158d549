"""Stands in for the optimizer of Transformer Engine with a state in half precision, whose kernels need a GPU."""

import torch


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
