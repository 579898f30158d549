"""On the CPU platform the real megatron-core finds what it asks of CUDA, and draws the numbers a GPU run would."""

import pytest
from pythons import python

from megatron.patches import registry

TRACKER = "megatron.core.tensor_parallel.random"


def apply_again():
    import torch

    from megatron import patches
    from megatron.core import jit
    from megatron.patches import replace

    shadows = [torch.empty, torch.Tensor.to, torch.cuda.Stream, jit.jit_fuser]
    first, names = patches.apply(), replace.replaced()
    second = patches.apply()
    assert first == second
    assert names == replace.replaced()
    assert shadows == [torch.empty, torch.Tensor.to, torch.cuda.Stream, jit.jit_fuser]
    assert replace.original("torch.empty") is not torch.empty
    assert not torch.cuda.is_available()
    return [patch.name for patch in first], names


def test_applying_twice_is_applying_once_and_replaces_what_the_manifest_says(ranks):
    [(applied, names)] = ranks(apply_again, 1, init=False)
    assert applied == [patch.name for patch in registry.due("cpu")]
    # A filter quiets `fork`, and the function that core may lack is added only if it does.
    unreplaced = {f"{TRACKER}.CudaRNGStatesTracker.fork"}
    optional = {patch.name for patch in registry.everything() if patch.added}
    assert set(applied) - unreplaced - optional == set(names) - optional


@pytest.mark.on_ranks(1, init=False)
def test_cuda_devices_are_the_cpu():
    import torch

    from megatron.patches.cpu_torch import TENSOR_MAKERS

    like = torch.ones(2)
    arguments = {
        **dict.fromkeys(("tensor", "as_tensor", "asarray"), ([1.0],)),
        **dict.fromkeys(("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like"), (like,)),
        "empty_strided": ((2,), (1,)),
        "full": ((2,), 1.0),
        "full_like": (like, 1.0),
        "linspace": (0, 1, 2),
        "logspace": (0, 1, 2),
        "normal": (0.0, 1.0, (2,)),
        "randint": (0, 4, (2,)),
        "randint_like": (like, 4),
        "tril_indices": (2, 2),
        "triu_indices": (2, 2),
    }
    for name in TENSOR_MAKERS:
        for device in ("cuda", "cuda:0", torch.device("cuda", 1), 0, torch.cuda.current_device()):
            assert getattr(torch, name)(*arguments.get(name, (2,)), device=device).device.type == "cpu", name
    assert torch.empty(2, pin_memory=True).tolist() is not None
    for moved in (like.cuda(), like.to("cuda"), like.to(device="cuda:0"), like.to(0), like.pin_memory()):
        assert moved.device.type == "cpu"
    assert like.to("cuda", torch.float64).dtype == torch.float64
    assert like.to(torch.bfloat16).dtype == torch.bfloat16
    assert torch.nn.Linear(2, 2).cuda().to("cuda").weight.device.type == "cpu"
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
    assert like.type() == "torch.FloatTensor" and like.type(torch.int32).dtype == torch.int32
    for bad in ("nonsense", torch.device("meta")):
        try:
            kind = torch.empty(2, device=bad).device.type
        except RuntimeError:
            kind = "refused"
        assert kind == ("meta" if isinstance(bad, torch.device) else "refused")


@pytest.mark.on_ranks(1, init=False)
def test_streams_and_events_are_points_in_program_order():
    import torch

    side, default = torch.cuda.Stream(), torch.cuda.default_stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    context = torch.cuda.stream(side)
    start.record()
    for _ in range(2):  # core enters one context again and again
        with context, torch.cuda.stream(None):
            assert torch.cuda.current_stream() is side
        assert torch.cuda.current_stream() is default
    side.wait_stream(default)
    side.record_event().wait(default)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0 and end.query()


@pytest.mark.on_ranks(1, init=False)
def test_core_is_not_compiled_and_torch_compile_is_torchs():
    import torch

    from megatron.core.fusions.fused_bias_swiglu import swiglu
    from megatron.core.transformer.torch_norm import L2Norm

    compiled = [f for f in (swiglu, L2Norm._norm) if hasattr(f, "_torchdynamo_orig_callable")]
    assert not compiled and torch.compile.__module__ == "torch", (compiled, torch.compile)


def test_applying_after_core_was_imported_still_keeps_it_eager(tmp_path):
    script = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch\n"
        "from megatron.core.fusions.fused_bias_swiglu import swiglu\n"
        "from megatron import patches; patches.apply()\n"
        "from torch._dynamo.utils import counters\n"
        "assert swiglu(torch.ones(2, 4)).shape == (2, 2) and not counters['stats'], counters\n"
    )
    done = python("-c", script)
    assert done.returncode == 0, done.stderr


def recompute_with_dropout(distribute):
    import torch

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    weight = torch.linspace(-1, 1, 64).view(8, 8)

    def block(x):
        x = torch.nn.functional.dropout(x @ weight, 0.3)
        with get_cuda_rng_tracker().fork():
            x = torch.nn.functional.dropout(x, 0.5)
        return x * torch.rand(8)

    def gradient(recompute):
        model_parallel_cuda_manual_seed(11, force_reset_rng=True)
        x = torch.ones(4, 8, requires_grad=True)
        y = checkpoint(block, distribute, x) if recompute else block(x)
        z = y + torch.rand(1)  # numbers drawn between forward and backward
        (z * z).sum().backward()
        return y.detach(), x.grad, torch.rand(3), get_cuda_rng_tracker().get_states()["model-parallel-rng"]

    plain, recomputed = gradient(False), gradient(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    return plain[0].count_nonzero().item(), plain[0].tolist(), plain[3].tolist()


@pytest.mark.parametrize("distribute", [False, True])
def test_recomputation_draws_the_same_numbers(ranks, distribute):
    (kept, first, first_state), (_, second, second_state) = ranks(recompute_with_dropout, 2, distribute)
    assert 0 < kept < 32
    assert first_state != second_state and first != second  # tensor-parallel ranks draw their own masks


def fork_and_return():
    import torch

    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(force_reset=True)
    tracker = get_cuda_rng_tracker()
    torch.cuda.manual_seed(5)
    tracker.add("a", 7)
    outside = torch.rand(2)
    with tracker.fork("a"):
        inside = torch.rand(2)
    outside_again = torch.rand(2)
    torch.manual_seed(7)
    assert torch.equal(inside, torch.rand(2))
    torch.manual_seed(5)
    assert torch.equal(outside, torch.rand(2)) and torch.equal(outside_again, torch.rand(2))
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(2)
    torch.cuda.set_rng_state(state)
    assert torch.equal(drawn, torch.rand(2))


def test_the_tracker_forks_the_cpu_generator_quietly(ranks):
    ranks(fork_and_return, 1, init=False)
    assert ranks.output(0) == ""


@pytest.mark.on_ranks(3)
def test_unequal_parts_are_gathered_and_scattered():
    import torch
    import torch.distributed as dist

    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

    rank, sizes = dist.get_rank(), [1, 0, 3]
    mine = torch.full((sizes[rank], 2), float(rank), requires_grad=True)
    whole = gather_from_sequence_parallel_region(mine, group=dist.group.WORLD, output_split_sizes=torch.tensor(sizes))
    (whole * (rank + 1)).sum().backward()
    reduced = reduce_scatter_to_sequence_parallel_region(
        whole.detach() + rank, group=dist.group.WORLD, input_split_sizes=sizes
    )
    assert whole[:, 0].tolist() == [0.0, 2.0, 2.0, 2.0]
    assert mine.grad.tolist() == [[6.0, 6.0]] * sizes[rank]  # 1 + 2 + 3 from the three ranks
    assert reduced.tolist() == [[3.0 * rank + 3.0] * 2] * sizes[rank]


@pytest.mark.on_ranks(2)
def test_torch_norms_take_part_in_sequence_parallelism():
    import torch

    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "tensor_model_parallel_size": 2}
    sizes["persist_layer_norm"] = False
    split = TransformerConfig(**sizes, sequence_parallel=True)
    norm = WrappedTorchNorm(split, 8)
    plain = WrappedTorchNorm(TransformerConfig(**sizes), 8)
    assert split.sequence_parallel and isinstance(norm, torch.nn.LayerNorm)
    found = [[getattr(p, "sequence_parallel", None) for p in module.parameters()] for module in (norm, plain)]
    assert found == [[True, True], [None, None]], found
