"""Where Transformer Engine or Apex is installed DMR takes torch's optimizers, and refuses what it cannot see."""

import zipfile
from types import SimpleNamespace

import dmr_jobs
import pytest
import small_runs as runs
import torch
from core_wheels import newest_wheel

from ft.base.errors import UserError
from ft.systems.dmr.layer import refuse_opaque_optimizer, refuse_varying_attention
from megatron.ft_trainer import model
from megatron.ft_trainer.arguments import parse

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
    [plain], [installed] = (ranks(a_step, 1, flags, there) for there in (False, True))
    assert installed == plain
    assert all(module.startswith("torch.optim") for module in installed[-1])


def kind(name: str, base: type) -> type:
    return type("Fused", (base,), {"__module__": name, "__init__": lambda self: None})


def optimizer_of(inner) -> SimpleNamespace:
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=None), SimpleNamespace(optimizer=inner)])


def test_an_optimizer_that_dmr_cannot_see_into_is_refused_by_name():
    parameters = [torch.nn.Parameter(torch.ones(2))]
    for inner in (torch.optim.AdamW(parameters), torch.optim.SGD(parameters)):
        refuse_opaque_optimizer(optimizer_of(inner))
        refuse_opaque_optimizer(SimpleNamespace(optimizer=inner))
    fused = kind("apex.optimizers.fused_adam", torch.optim.Optimizer)()
    for optimizer in (optimizer_of(fused), SimpleNamespace(optimizer=fused)):
        with pytest.raises(UserError, match=r"apex\.optimizers\.fused_adam\.Fused"):
            refuse_opaque_optimizer(optimizer)


def test_attention_that_varies_is_refused_unless_its_switch_is_off():
    attention = kind("transformer_engine.pytorch.attention", torch.nn.Identity)
    attention.__name__, attention.__init__ = "DotProductAttention", torch.nn.Identity.__init__
    of_core = type("TEDotProductAttention", (attention,), {"__module__": "megatron.core.extensions.transformer_engine"})
    chunks = [torch.nn.Sequential(of_core())]
    with pytest.raises(UserError, match="set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"):
        refuse_varying_attention(chunks, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"})
    refuse_varying_attention(chunks, {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"})
    refuse_varying_attention([torch.nn.Identity()], {})


def test_the_number_of_shards_of_a_weight_is_called_so_in_the_newest_core(request, tmp_path):
    with zipfile.ZipFile(newest_wheel(request, tmp_path)) as wheel:
        source = wheel.read("megatron/core/model_parallel_config.py").decode()
    for name in ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"):
        assert f"\n    {name}: Optional[int] = None" in source


def test_with_dmr_norms_are_torch_s_and_other_fused_kernels_stay(monkeypatch):
    monkeypatch.setattr(model.patches, "platform", lambda: SimpleNamespace(offers=bool, imports=bool))
    fused = ("masked_softmax_fusion", "persist_layer_norm", "gradient_accumulation_fusion", "apply_rope_fusion")
    flags = f"{runs.BASE} --mock-data --transformer-impl local "
    without, with_dmr = (model._kernels(parse(flags + more)) for more in ("", "--ft-dmr naive"))
    assert [without[name] for name in fused] == [True, True, True, False]
    assert [with_dmr[name] for name in fused] == [True, False, True, False]
