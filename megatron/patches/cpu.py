"""The CPU platform: megatron-core trains on CPU because `torch.cuda` is replaced (FT-HSDP, section 5).

Core passes device="cuda" to the calls that create tensors, asks `torch.cuda` for streams, events and the generator,
and compares `Tensor.type()` with CUDA names. All of these get replacements for a machine without a GPU
(`cpu_torch.py`), and the few places in core that are only right with a GPU are replaced here.
`torch.cuda.is_available()` still returns False, so that code which asks for a GPU gets the true answer.

There is no cost per operator: only the functions that take a device are wrapped, and no torch function mode is active.
"""

import functools
import logging
import sys
from importlib import import_module

import torch
import torch.distributed as dist

from megatron.patches.cpu_torch import shadow_generator, shadow_sends, shadow_streams, shadow_tensors
from megatron.patches.plain_kernels import under_sequence_parallel
from megatron.patches.replace import replace

RANDOM = "megatron.core.tensor_parallel.random"
MAPPINGS = "megatron.core.tensor_parallel.mappings"
TORCH_NORM = "megatron.core.transformer.torch_norm"
MOE_UTILS = "megatron.core.transformer.moe.moe_utils"
MOE_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
OFFLOADING = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"


def apply() -> None:
    """Replace the CUDA functions that megatron-core uses. Idempotent. Call it before any model code.

    Core modules that were imported earlier are adapted too: their functions that are decorated with `torch.compile`
    then run eagerly by `torch.compiler.set_stance`, which costs microseconds per call.
    """
    shadow_tensors()
    shadow_streams()
    shadow_sends()
    shadow_generator()
    import_core()
    _patch_core()


@functools.cache
def import_core() -> None:
    """Import `megatron.core` with its `torch.compile` decorators off: compiling takes minutes and gains nothing."""
    if "megatron.core" in sys.modules:
        from megatron.core import jit

        if jit.jit_fuser is not jit.noop_decorator:
            torch.compiler.set_stance("force_eager")
    else:
        compile_ = torch.compile
        torch.compile = lambda model=None, **kwargs: model if model is not None else (lambda f: f)
        try:
            from megatron.core import jit
        finally:
            torch.compile = compile_


def _patch_core() -> None:
    replace("megatron.core.jit", "jit_fuser", import_module("megatron.core.jit").noop_decorator)
    replace(RANDOM, "_set_cuda_rng_state", _set_generator_state)
    _quiet_generator_fork()
    mappings = import_module(MAPPINGS)
    replace(MAPPINGS, "_gather_along_first_dim", _uneven_gather(mappings._gather_along_first_dim))
    replace(MAPPINGS, "_reduce_scatter_along_first_dim", _uneven_scatter(mappings._reduce_scatter_along_first_dim))
    plain_norm = import_module(TORCH_NORM).WrappedTorchNorm.__new__
    replace(TORCH_NORM, "WrappedTorchNorm.__new__", staticmethod(under_sequence_parallel(plain_norm)))
    for module in (MOE_UTILS, MOE_DISPATCHER):
        replace(module, "maybe_move_tensor_to_cpu", _splits_on_host)
    if not hasattr(import_module(MOE_UTILS), "te_general_gemm"):
        replace(MOE_UTILS, "te_general_gemm", None)
    replace(OFFLOADING, "HybridDeviceOptimizer._get_sub_optimizer_param_groups", _offloaded)
    replace("megatron.core.optimizer.optimizer_config", "is_te_min_version", _there_is_none)
    replace("megatron.core.distributed.torch_fully_sharded_data_parallel", "DeviceMesh", _HostMesh)


class _HostMesh:
    """Makes the mesh of a group for tensors in host memory, where core asks for one of CUDA devices."""

    @staticmethod
    def from_group(group, device_type):
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(group, "cpu")


def _there_is_none(version, check_equality=True):
    return False


class _OneGenerator(logging.Filter):
    """Drops core's warning that the CPU random generator changed while core had swapped the CUDA generator's state.

    On this platform both are the same generator.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("CPU RNG state changed within GPU RNG context")


def _quiet_generator_fork() -> None:
    logger = logging.getLogger(RANDOM)
    if not any(isinstance(f, _OneGenerator) for f in logger.filters):
        logger.addFilter(_OneGenerator())


def _set_generator_state(new_state, device=-1, graph_safe=False):
    torch.default_generator.set_state(new_state)


def _splits_on_host(tensor, as_numpy=False, record_stream=False):
    """Convert split sizes to numpy.

    Core does so only when it moves them off the GPU, but gloo's all-to-all needs it too.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _uneven_gather(even):
    """Wrap core's all-gather `even` so that it also gathers parts of unequal size, by an all-to-all.

    Gloo's all-gather needs parts of equal size.
    """

    @functools.wraps(even)
    def gather(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return even(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        output = input_.new_empty((sum(sizes), *input_.shape[1:]))
        copies = input_.repeat(group.size(), *[1] * (input_.dim() - 1))
        dist.all_to_all_single(output, copies, sizes, [input_.shape[0]] * group.size(), group=group)
        return output

    return gather


def _uneven_scatter(even):
    """Wrap core's reduce-scatter `even` so that it also handles parts of unequal size.

    An all-to-all sends each part to the rank that owns it, and that rank adds up the parts in rank order.
    """

    @functools.wraps(even)
    def reduce_scatter(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return even(input_, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        mine = sizes[group.rank()]
        parts = input_.new_empty((group.size() * mine, *input_.shape[1:]))
        dist.all_to_all_single(parts, input_.contiguous(), [mine] * group.size(), sizes, group=group)
        return parts.view(group.size(), mine, *input_.shape[1:]).sum(dim=0)

    return reduce_scatter


def _offloaded(self, offload_fraction):
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
