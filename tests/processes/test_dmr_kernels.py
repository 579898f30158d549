"""Where Transformer Engine or Apex is installed DMR sees every operator all the same, or refuses."""

from types import SimpleNamespace

import dmr_jobs
import pytest
import small_runs as runs
import torch

from ft.base.errors import UserError
from ft.systems.dmr.runtime.opaque import refuse_opaque
from megatron.training import config
from megatron.training.arguments import check, parse

MOE = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear "


def opaque(*_args, **_kwargs):
    """A kernel that nobody can see into."""
    raise RuntimeError("the kernel was executed")


class Opaque(torch.nn.Module):
    __module__ = "apex.normalization"

    def __init__(self, *_args, **_kwargs):
        opaque()


def as_if_installed() -> None:
    """What core's modules hold where Apex and Transformer Engine can be imported."""
    from importlib import import_module

    from megatron.patches import replace

    # Without a GPU the router's kernel is replaced in every run.
    replace._originals.pop("megatron.core.transformer.moe.moe_utils.te_general_gemm", None)
    for module, names in {
        "optimizer": ("Adam", "SGD"),
        "optimizer.optimizer": ("multi_tensor_scale_impl",),
        "optimizer.clip_grads": ("l2_norm_impl", "multi_tensor_scale_impl", "multi_tensor_scale_tensor_impl"),
        "optimizer.distrib_optimizer": ("Adam",),
        "transformer.moe.moe_utils": ("te_general_gemm",),
    }.items():
        for name in names:
            setattr(import_module(f"megatron.core.{module}"), name, opaque)
    for module, name in (
        ("transformer.transformer_block", "LayerNormImpl"),
        ("models.backends", "LNImpl"),
        ("models.gpt.gpt_layer_specs", "LNImpl"),
    ):
        setattr(import_module(f"megatron.core.{module}"), name, Opaque)
    import_module("megatron.core.optimizer").USING_PYTORCH_OPTIMIZER = False
    distributed = import_module("megatron.core.optimizer.distrib_optimizer")
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True


def a_step(flags: str, installed: bool) -> tuple:
    if installed:
        as_if_installed()
    job = dmr_jobs.assemble(flags)
    again = dmr_jobs.Again(job)
    dmr_jobs.protection(job, "naive")
    taken = again.step()
    inner = {
        type(each.optimizer) for each in getattr(job.trainee.optimizer, "chained_optimizers", [job.trainee.optimizer])
    }
    return taken.loss, taken.grad_norm, taken.state, sorted(kind.__module__ for kind in inner)


@pytest.mark.parametrize(
    "flags", ["--clip-grad 0.1 --use-distributed-optimizer --bf16 ", "--optimizer sgd --clip-grad 0.1 " + MOE]
)
def test_with_dmr_core_takes_torch_s_own_where_fused_ones_are_installed(ranks, flags):
    flags = f"{runs.BASE} --mock-data {flags}"
    [plain], [installed] = (ranks(a_step, 1, flags, there, timeout=120) for there in (False, True))
    assert installed == plain
    assert all(module.startswith("torch.optim") for module in installed[-1])


def kind(name: str, base: type) -> type:
    return type("Fused", (base,), {"__module__": name, "__init__": lambda self: None})


def optimizer_of(inner) -> SimpleNamespace:
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=None), SimpleNamespace(optimizer=inner)])


def test_a_model_or_an_optimizer_that_dmr_cannot_see_into_is_refused_by_name():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    for inner in (torch.optim.AdamW(parameters), torch.optim.SGD(parameters)):
        refuse_opaque([plain], optimizer_of(inner))
        refuse_opaque([plain], SimpleNamespace(optimizer=inner))
    fused = kind("apex.optimizers.fused_adam", torch.optim.Optimizer)()
    for optimizer in (optimizer_of(fused), SimpleNamespace(optimizer=fused)):
        with pytest.raises(UserError, match=r"apex\.optimizers\.fused_adam\.Fused"):
            refuse_opaque([plain], optimizer)
    for module in ("transformer_engine.pytorch.module.layernorm", "megatron.core.fusions.fused_layer_norm"):
        layer = kind("here", kind(module, torch.nn.Module))
        chunk = torch.nn.Module()
        torch.nn.Module.__init__(made := layer())
        chunk.add_module("norm", made)
        with pytest.raises(UserError, match="Fused may bypass"):
            refuse_opaque([plain, chunk], SimpleNamespace(optimizer=None))


@pytest.mark.parametrize(
    "flags, named",
    [
        (MOE + "--moe-grouped-gemm", "--moe-grouped-gemm"),
        (MOE + "--moe-permute-fusion", "--moe-permute-fusion"),
        ("--transformer-impl transformer_engine", "--transformer-impl transformer_engine"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "--cross-entropy-fusion-impl te"),
        ("--apply-layernorm-1p", "--apply-layernorm-1p"),
    ],
)
@pytest.mark.parametrize("has_te", [True, False])
def test_flags_for_kernels_that_dmr_cannot_see_into_are_refused(flags, named, has_te):
    with pytest.raises(UserError) as refused:
        check(parse(f"{runs.BASE} --mock-data {flags} --ft-dmr piggyback"), 1, has_te=has_te)
    assert f"{named} needs Transformer Engine, whose kernels bypass" in str(refused.value)
    assert "not installed" not in str(refused.value)


def test_fused_kernels_of_core_are_off_with_dmr(monkeypatch):
    monkeypatch.setattr(config.patches, "platform", lambda: SimpleNamespace(offers=bool, imports=bool))
    fused = ("masked_softmax_fusion", "persist_layer_norm", "gradient_accumulation_fusion", "apply_rope_fusion")
    flags = f"{runs.BASE} --mock-data --transformer-impl local "
    without, with_dmr = (config._kernels(parse(flags + more)) for more in ("", "--ft-dmr naive"))
    assert [without[name] for name in fused] == [True, True, True, False]
    assert [with_dmr[name] for name in fused] == [False] * 4
