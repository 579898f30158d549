"""The CPU platform: megatron-core trains on CPU because `torch.cuda` is replaced (FT-HSDP, section 5).

Core passes device="cuda" to the calls that create tensors, asks `torch.cuda` for streams, events and the generator,
and compares `Tensor.type()` with CUDA names. All of these get replacements for a machine without a GPU
(`cpu_torch.py`), and the few places in core that are only right with a GPU are replaced here.
`torch.cuda.is_available()` still returns False, so that code which asks for a GPU gets the true answer.

There is no cost per operator: only the functions that take a device are wrapped, and no torch function mode is active.
"""

import logging

import torch
import torch.distributed as dist

from megatron.core import jit
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as core_random
from megatron.patches.manifest import Patch
from megatron.patches.plain_kernels import NORM_SIGNATURES, under_sequence_parallel


class _HostMesh:
    """Makes the mesh of a group for tensors in host memory, where core asks for one of CUDA devices."""

    @staticmethod
    def from_group(group, device_type):
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(group, "cpu")


def _there_is_none(_, version, check_equality=True):
    return False


class _OneGenerator(logging.Filter):
    """Drops core's warning that the CPU random generator changed while core had swapped the CUDA generator's state.

    On this platform both are the same generator.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("CPU RNG state changed within GPU RNG context")


def apply() -> None:
    """Suppress core's warning that the state of the CPU random generator has changed, which is expected on a CPU."""
    logger = logging.getLogger(core_random.__name__)
    if not any(isinstance(f, _OneGenerator) for f in logger.filters):
        logger.addFilter(_OneGenerator())


def _set_generator_state(_, new_state, device=-1, graph_safe=False):
    torch.default_generator.set_state(new_state)


def _splits_on_host(_, tensor, as_numpy=False, record_stream=False):
    """Convert split sizes to numpy.

    Core does so only when it moves them off the GPU, but gloo's all-to-all needs it too.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _uneven_gather(even, input_, group, output_split_sizes=None, use_global_buffer=False):
    """Run core's all-gather `even`, or gather parts of unequal size by an all-to-all.

    Gloo's all-gather needs parts of equal size.
    """
    if output_split_sizes is None or group.size() == 1:
        return even(input_, group, output_split_sizes, use_global_buffer)
    sizes = [int(size) for size in output_split_sizes]
    output = input_.new_empty((sum(sizes), *input_.shape[1:]))
    copies = input_.repeat(group.size(), *[1] * (input_.dim() - 1))
    dist.all_to_all_single(output, copies, sizes, [input_.shape[0]] * group.size(), group=group)
    return output


def _uneven_scatter(even, input_, group, input_split_sizes=None, use_global_buffer=False):
    """Run core's reduce-scatter `even`, or scatter parts of unequal size.

    An all-to-all sends each part to the rank that owns it, and that rank adds up the parts in rank order.
    """
    if input_split_sizes is None or group.size() == 1:
        return even(input_, group, input_split_sizes, use_global_buffer)
    sizes = [int(size) for size in input_split_sizes]
    mine = sizes[group.rank()]
    parts = input_.new_empty((group.size() * mine, *input_.shape[1:]))
    dist.all_to_all_single(parts, input_.contiguous(), [mine] * group.size(), sizes, group=group)
    return parts.view(group.size(), mine, *input_.shape[1:]).sum(dim=0)


def _offloaded(_, self, offload_fraction):
    """Divide core's parameter groups between the host and the device, as core does for parameters on a GPU.

    Core offloads parameters with ``is_cuda`` only. Here the model's parameters stand for those of a device: the first
    ``offload_fraction`` of their elements get copies, which stand for those in the host's memory.

    Returns:
        what core's method returns: groups of the host, groups of the device, parameter -> its copy on the host, the
        reverse, parameter in half precision -> its fp32 copy.
    """
    left = sum(param.numel() for group in self.param_groups for param in group["params"]) * offload_fraction
    on_host, on_device, copies, originals, full = [], [], {}, {}, {}
    for group in self.param_groups:
        host, device = {**group, "params": []}, {**group, "params": []}
        for original in group["params"]:
            is_offloaded, param = left > 0, original
            if is_offloaded:
                left -= param.numel()
                param = param.detach().clone()
            if self.param_update_in_fp32 and param.dtype != torch.float32:
                param = full[original] = param.detach().float()
            if is_offloaded:
                copies[original], originals[param] = param, original
            (host if is_offloaded else device)["params"].append(param)
        on_host += [host] if host["params"] else []
        on_device += [device] if device["params"] else []
    return on_host, on_device, copies, originals, full


_MOE = "megatron.core.transformer.moe."
PATCHES = (
    Patch(
        jit.__name__,
        "jit_fuser",
        "core decorates functions with torch.compile, which on CPU takes minutes at the start and saves no time",
        new=jit.noop_decorator,
    ),
    Patch(
        core_random.__name__,
        "_set_cuda_rng_state",
        "the original queues the state until CUDA is initialized, which never happens; the replacement sets the CPU "
        "generator's state",
        _set_generator_state,
        ("(new_state, device=-1, graph_safe=False)",),
    ),
    Patch(
        core_random.__name__,
        "CudaRNGStatesTracker.fork",
        "core warns that the CPU generator's state changed, which is expected here because both generators are the "
        "same",
        signatures=("(self, name='model-parallel-rng')",),
    ),
    Patch(
        mappings.__name__,
        "_gather_along_first_dim",
        "gloo gathers only parts of equal size; unequal parts (MoE with tensor parallelism) are gathered by an "
        "all-to-all",
        _uneven_gather,
        ("(input_, group, output_split_sizes=None, use_global_buffer=False)",),
    ),
    Patch(
        mappings.__name__,
        "_reduce_scatter_along_first_dim",
        "gloo scatters only parts of equal size; unequal parts are scattered by an all-to-all and a sum",
        _uneven_scatter,
        ("(input_, group, input_split_sizes=None, use_global_buffer=False)",),
    ),
    Patch(
        "megatron.core.transformer.torch_norm",
        "WrappedTorchNorm.__new__",
        "core rejects torch's norms with sequence parallelism only because nothing marks their parameters for the "
        "all-reduce",
        under_sequence_parallel,
        NORM_SIGNATURES,
    ),
    Patch(
        f"{_MOE}moe_utils",
        "maybe_move_tensor_to_cpu",
        "core converts split sizes to numpy arrays only when it moves them off a GPU, but the all-to-all needs numpy "
        "arrays here, too",
        _splits_on_host,
        ("(tensor, as_numpy=False, record_stream=False)",),
    ),
    Patch(
        f"{_MOE}token_dispatcher",
        "maybe_move_tensor_to_cpu",
        "the token dispatcher imported the same function under another name",
        _splits_on_host,
    ),
    Patch(
        f"{_MOE}moe_utils",
        "te_general_gemm",
        "core 0.16.1 does not define this name without Transformer Engine, but the router reads it",
        new=None,
        added=True,
    ),
    Patch(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "HybridDeviceOptimizer._get_sub_optimizer_param_groups",
        "core offloads only parameters on a GPU; here the model's parameters are divided as these would be",
        _offloaded,
        ("(self, offload_fraction)",),
    ),
    Patch(
        "megatron.core.optimizer.optimizer_config",
        "is_te_min_version",
        "with the precision-aware optimizer, core compares the version of Transformer Engine, which is not there, with "
        "a number",
        _there_is_none,
        ("(version, check_equality=True)",),
    ),
    Patch(
        "megatron.core.distributed.torch_fully_sharded_data_parallel",
        "DeviceMesh",
        "core makes the mesh of torch's FSDP2 for CUDA devices",
        new=_HostMesh,
    ),
)
