"""What this project replaces in megatron-core, torch and Transformer Engine: the records of it, and where they stand.

A record (``Patch``) says where a symbol is, its signature, why it is replaced, and by what. The modules of
`megatron.patches` in ``MODULES`` have the records of what they replace in a tuple ``PATCHES``, and those that do more
than that have a function ``apply``. To add a patch, write such a module and list it there. ``ELSEWHERE`` has what other
folders replace, because what they put there is theirs.

The features are fault-tolerance systems: WITH_REPLICAS (FT-HSDP), WITH_DMR (SpareTrain's dual modular redundancy),
WITH_CHECKFREE (CheckFree) and WITH_SWAPPED_ENDS (CheckFree+).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SUPPORTED_CORE = "megatron-core 0.16.1 with Python 3.11, 0.19.2 with Python 3.12 and 3.13"
SUPPORTED_TORCH = "torch 2.8.0 to 2.15.0"
ALWAYS, ON_CPU = "always", "cpu"
WITH_REPLICAS, WITH_DMR, WITH_CHECKFREE, WITH_SWAPPED_ENDS = "replicas", "dmr", "checkfree", "swapped ends"
PROTECTED, IN_WARM_POOL = "protected", "warm pool"
EVERY_FUNCTION = "*"
STAYS = object()

MODULES = {
    ALWAYS: ("stored_types", "torch_adam"),
    ON_CPU: ("cpu_torch", "cpu"),
    WITH_REPLICAS: ("replicas",),
    WITH_DMR: ("double_execution", "plain_kernels"),
    WITH_CHECKFREE: ("stage_norms",),
    WITH_SWAPPED_ENDS: ("swapped_pipeline",),
}
"""ALWAYS, ON_CPU (on a machine without CUDA) or a feature -> the modules of `megatron.patches` that it needs."""


@dataclass(frozen=True)
class Patch:
    """One replaced symbol.

    Attributes:
        module: import name of the module that holds the symbol.
        symbol: the symbol's name in the module; "Class.method" names a method; EVERY_FUNCTION stands for the methods
            ``forward`` and ``backward`` of every class of ``torch.autograd.Function`` in the module.
        why: what goes wrong without the patch, or what the patch is for, in one sentence.
        wrapper: the function that is called in place of the original, with the original and its arguments.
        signatures: the signatures, without annotations, that the original may have; empty if it is not a function, or
            if any will do.
        new: without a ``wrapper``, what the symbol is replaced by; STAYS if other code does something about it.
        added: the patch defines the symbol if core lacks it.
        file: the module of `megatron.patches` that replaces the symbol; elsewhere, its path without ".py".
        when: a key of MODULES, PROTECTED (in each worker of a protected run) or IN_WARM_POOL (while a node's pool of
            warm standbys imports packages).
    """

    module: str
    symbol: str
    why: str
    wrapper: Callable[..., Any] | None = None
    signatures: tuple[str, ...] = ()
    new: Any = STAYS
    added: bool = False
    file: str = ""
    when: str = ""

    @property
    def name(self) -> str:
        """Return the full dotted name of the symbol, with its module."""
        return f"{self.module}.{self.symbol}"

    @property
    def package(self) -> str:
        """Return "megatron", "torch" or "transformer_engine"."""
        return self.module.partition(".")[0]


FUNCTIONS_OF_CORE = tuple(
    f"megatron.core.{name}"
    for name in (
        *(f"fusions.fused_{name}" for name in ("softmax", "indices_converter", "mla_yarn_rope_apply")),
        *("transformer.moe.fused_a2a", "transformer.custom_layers.batch_invariant_kernels"),
        "transformer.experimental_attention_variant",
    )
)
"""Modules of megatron-core whose functions call extensions of Apex, DeepEP, cuDNN or Triton kernels."""
FUSED_GRADIENTS = "LinearWithGradAccumulationAndAsyncCommunication"
"""The class of core's layers that adds to the gradient buffer by an extension of Apex, if that is fused."""
_CALLED_TWICE = "its kernels bypass torch's dispatcher: DMR calls it twice"
_BY_FOLDER = {
    ("ft/state/groups/registry", PROTECTED): (
        (
            "torch.distributed.distributed_c10d",
            ("_new_process_group_helper",),
            "process groups are made by hot-swap, which can make them again after a recovery",
        ),
        *(
            (
                module,
                ("batch_isend_irecv",),
                "messages of one batch are launched together in hot-swap's groups, too: one by one they can deadlock",
            )
            for module in ("torch.distributed", "torch.distributed.distributed_c10d")
        ),
    ),
    ("ft/systems/dmr/runtime/functions", WITH_DMR): (
        (
            "torch.autograd",
            ("Function.__init_subclass__",),
            "classes of Transformer Engine, Apex and others that are defined later are called twice, too",
        ),
        *((each, (EVERY_FUNCTION,), _CALLED_TWICE) for each in (*FUNCTIONS_OF_CORE, "transformer_engine.pytorch")),
        (
            "megatron.core.tensor_parallel.layers",
            (f"{FUSED_GRADIENTS}.forward", f"{FUSED_GRADIENTS}.backward"),
            _CALLED_TWICE,
        ),
        *(
            (
                f"transformer_engine.pytorch.{module}",
                ("FP8GlobalStateManager.reduce_and_update_fp8_tensors",),
                "it changes fp8 scales after a step, which DMR compares",
            )
            for module in ("quantization", "fp8")
        ),
    ),
    ("ft/job/agent/preload", IN_WARM_POOL): (
        (
            "torch.cuda",
            ("_lazy_init", "current_device", "get_device_properties"),
            "a package that initialises CUDA is named: the pool could not fork after that",
        ),
    ),
}
ELSEWHERE = tuple(
    Patch(module, symbol, why, added=symbol == EVERY_FUNCTION, file=file, when=when)
    for (file, when), replaced in _BY_FOLDER.items()
    for module, symbols, why in replaced
    for symbol in symbols
)

_BUCKETS = "distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
_WHY_ONCE = {
    "it depends on arguments and configuration, which are equal on all workers": (
        "dist_checkpointing.gpt_checkpoint_interop.retarget_sharded_state_dict_to_gpt_checkpoint",
        "dist_checkpointing.gpt_checkpoint_interop._retarget",
        "models.mimo.comm.colocated_communicator._ColocatedCommunicate.forward",
        "tensor_parallel.mappings._AllToAll.forward",
    ),
    "no trainer of this project calls it": (
        "dist_checkpointing.strategies.async_utils.PersistentAsyncCaller.schedule_async_call",
        "dist_checkpointing.strategies.async_utils.PersistentAsyncCaller._get_process",
        "rerun_state_machine.RerunStateMachine.should_run_forward_backward",
    ),
    "its object is created again for each save": (
        "dist_checkpointing.strategies.fully_parallel.FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
    ),
    "its object is created again for each load": (
        "dist_checkpointing.strategies.fully_parallel.FullyParallelLoadStrategyWrapper.apply_loading_parallelization",
    ),
    "its state belongs to one step: step_state.abandon_step resets it on all workers": (
        *(f"{_BUCKETS}.{when}_{what}_sync" for when in ("start", "finish") for what in ("param", "grad")),
        f"{_BUCKETS}.register_grad_ready",
    ),
    "every worker calls it while it builds its model": (
        "distributed.param_and_grad_buffer._ParamAndGradBuffer.__init__",
        *(f"models.{name}Model.__init__" for name in ("T5.t5_model.T5", "bert.bert_model.Bert", "gpt.gpt_model.GPT")),
        *(f"models.{name}Model.__init__" for name in ("hybrid.hybrid_model.Hybrid", "mamba.mamba_model.Mamba")),
        "parallel_state.initialize_model_parallel",
        "pipeline_parallel.bridge_communicator.BridgeCommunicator._get_or_create_broadcast_pg",
        "pipeline_parallel.bridge_communicator.BridgeCommunicator._get_or_create_bridge_pg",
    ),
    "releases.clear_cached_collective_results makes all workers call it again": (
        "optimizer.layer_wise_optimizer.LayerWiseDistributedOptimizer.has_grad_norm_group",
        "optimizer.optimizer.MegatronOptimizer.has_grad_norm_group",
        "optimizer.optimizer.ChainedOptimizer.has_grad_norm_group",
    ),
    "hot-swap rejects such an optimizer: releases.refuse_captured_update": (
        "optimizer.optimizer_cuda_graph.OptimizerCudaGraphWrapper.__call__",
    ),
}
ONCE_PER_PROCESS = {function: why for why, functions in _WHY_ONCE.items() for function in functions}
"""Functions of core, without ``megatron.core.``, that call a collective only once per process, because they keep its
result -> why that is harmless.

After a failure, a worker that joins calls the collective for the first time, and the others have its result already:
the joiner would call it alone, and the job hang. So each such function either runs before a worker joins, or is called
again by all workers after a recovery.
"""
ON_OBJECTS = {
    "optimizer.step": "layers of protections run before and after the update (ft.protection.stack)",
    "config.finalize_model_grads_func": (
        "planned faults in the gradient reduction (ft.protection.injection), tokens of all replicas, and FSDP2's "
        "gradients (ft.systems.hsdp.components), sums over both copies of embedding and output layer "
        "(ft.systems.checkfree.plus)"
    ),
}
"""Attribute of an optimizer or a model's configuration -> what is wrapped around it, and by which modules."""
