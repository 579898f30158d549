"""Initialises a rank: its process groups, its random seeds and megatron-core's compiled functions."""

import os
import random
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist

from ft.base.errors import UserError
from ft.platform import network
from megatron import patches
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train
from megatron.core.fusions.fused_bias_gelu import bias_gelu
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu
from megatron.core.transformer import TransformerConfig
from megatron.ft_trainer.arguments import Layout, Options
from megatron.ft_trainer.arguments.core_options import CoreOptions
from megatron.ft_trainer.launcher import Launch


def init_process_group(options: CoreOptions, launch: Launch) -> None:
    """Create torch.distributed's default process group. MASTER_ADDR and MASTER_PORT give the address of its store.

    Raises:
        UserError: NCCL was requested without a GPU, MASTER_PORT is missing, or there are fewer GPUs than local ranks.
    """
    backend = patches.platform().choose_backend(options.distributed_backend)
    patches.platform().select_device(launch.local_rank)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if launch.world_size == 1:
        os.environ.setdefault("MASTER_PORT", str(network.free_port()))
    elif "MASTER_PORT" not in os.environ:
        raise UserError("MASTER_PORT is not set", "start with torchrun, or set MASTER_ADDR and MASTER_PORT")
    dist.init_process_group(
        backend,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(minutes=options.distributed_timeout_minutes),
    )


def init_model_parallel(options: CoreOptions, layout: Layout) -> None:
    """Make megatron-core's process groups for ``layout``."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_distributed_optimizer_instances=options.num_distributed_optimizer_instances,
        distributed_timeout_minutes=options.distributed_timeout_minutes,
        order="tp-cp-ep-pp-dp" if options.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=options.create_gloo_process_groups,
    )


_STEP_SEEDS = 1_000_003


def seed_everything(options: Options, step: int = 0) -> None:
    """Seed Python, numpy, torch and megatron-core's tracker, by pipeline stage and tensor-parallel rank.

    Data-parallel ranks share their seeds. The first call makes the tracker, of the
    kind that the flags ask for: CUDA graphs need one whose states can be captured.

    Args:
        options: options of the run.
        step: number that is added to the seeds, so that each step can have its own.
    """
    training, core = options.training, options.core
    seed = training.seed + 100 * parallel_state.get_pipeline_model_parallel_rank() + _STEP_SEEDS * step
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    graphs = getattr(core, "cuda_graph_impl", "none") != "none"
    graphs = graphs or any(getattr(core, name, False) for name in ("enable_cuda_graph", "external_cuda_graph"))
    tensor_parallel.model_parallel_cuda_manual_seed(seed, use_cudagraphable_rng=graphs)


_CALLS = 5
_DROPOUT = 0.1


def compile_fused_functions(config: TransformerConfig, seq_length: int, micro_batch_size: int, *, gated: bool) -> None:
    """Compile megatron-core's fused functions before the first step, by calls as the layers will make them.

    The fused activation and the fused dropout are called with and without gradients.

    Megatron-LM does the same after it has set the seeds. The inputs and the dropout are drawn from the device's default
    random numbers, from which later the dropout outside of tensor-parallel regions is drawn (on a CPU also some initial
    weights). So the same draws are needed here for the losses to equal Megatron-LM's.

    Args:
        config: the model's configuration.
        seq_length: tokens of a sample.
        micro_batch_size: samples of a microbatch.
        gated: whether the MLPs have a gated activation (--swiglu).
    """
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    width, rows = config.ffn_hidden_size // tp, seq_length // cp

    bias, inputs = _random(config, width), _random(config, rows, micro_batch_size, width)
    for needs_input_gradient in (False, True):
        bias.requires_grad, inputs.requires_grad = True, needs_input_gradient
        for _ in range(_CALLS):
            bias_swiglu(inputs, bias) if gated else bias_gelu(bias, inputs)

    rows = (seq_length // tp if config.sequence_parallel else seq_length) // cp
    shape = rows, micro_batch_size, config.hidden_size
    inputs, residual = _random(config, *shape), _random(config, *shape)
    bias = _random(config, config.hidden_size).expand_as(residual)
    for needs_input_gradient in (False, True):
        inputs.requires_grad, bias.requires_grad, residual.requires_grad = needs_input_gradient, True, True
        for _ in range(_CALLS):
            bias_dropout_add_fused_train([inputs, bias], residual, _DROPOUT)


def _random(config: TransformerConfig, *shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=config.params_dtype, device=torch.cuda.current_device())


def destroy() -> None:
    """Destroy all process groups, in the reverse order of their creation."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
