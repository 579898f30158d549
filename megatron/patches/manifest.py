"""The manifest: every symbol of megatron-core, torch or Transformer Engine that this project replaces.

An entry (``Patch``) says where the symbol is, its signature, why it is replaced, which file replaces it, on which
platform or for which feature, and on which versions the patch was checked. ``MANIFEST`` has what `megatron.patches`
applies. To add a patch, write `megatron/patches/NAME.py` with an `apply()` that calls `replace()`, and list what it
replaces here with `file="NAME"`. ``ELSEWHERE`` has what other folders replace, because what they put there is theirs.

The features are fault-tolerance systems: WITH_REPLICAS (FT-HSDP), WITH_DMR (SpareTrain's dual modular redundancy),
WITH_CHECKFREE (CheckFree) and WITH_SWAPPED_ENDS (CheckFree+).
"""

from dataclasses import dataclass

SUPPORTED_CORE = "megatron-core 0.16.1 with Python 3.11, 0.19.2 with Python 3.12 and 3.13"
ALWAYS, ON_CPU = "always", "cpu"
WITH_REPLICAS, WITH_DMR, WITH_CHECKFREE, WITH_SWAPPED_ENDS = "replicas", "dmr", "checkfree", "swapped ends"
PROTECTED, IN_WARM_POOL = "protected", "warm pool"
EVERY_FUNCTION = "*"

_CORE_CHECKED = ("0.16.1", "0.19.2")
_TORCH_CHECKED = ("2.13.0", "2.15.0")


@dataclass(frozen=True)
class Patch:
    """One replaced symbol.

    Attributes:
        module: import name of the module that holds the symbol.
        symbol: the symbol's name in the module; "Class.method" names a method; EVERY_FUNCTION stands for the methods
            ``forward`` and ``backward`` of every class of ``torch.autograd.Function`` in the module.
        why: what goes wrong without the patch, or what the patch is for, in one sentence.
        file: the module of `megatron.patches` that replaces the symbol; elsewhere, its path without ".py".
        when: ALWAYS, ON_CPU (on a machine without CUDA), PROTECTED (in each worker of a protected run), IN_WARM_POOL
            (while a node's pool of warm standbys imports packages), or the feature that needs it (WITH_REPLICAS, ...).
        kind: "core" (megatron-core), "torch" or "te" (Transformer Engine).
        signatures: the signatures, without annotations, that the original may have; empty if it is not a function, or
            if any will do.
        added: the patch defines the symbol if core lacks it.
        checked_on: the versions that the patch was tried on or checked against: of torch for the kind "torch",
            otherwise of megatron-core.
    """

    module: str
    symbol: str
    why: str
    file: str = "cpu"
    when: str = ON_CPU
    kind: str = "core"
    signatures: tuple[str, ...] = ()
    added: bool = False
    checked_on: tuple[str, ...] = _CORE_CHECKED

    @property
    def name(self) -> str:
        """Return the full dotted name of the symbol, with its module."""
        return f"{self.module}.{self.symbol}"


TENSOR_MAKERS = (
    *("tensor", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "zeros", "zeros_like"),
    *("ones", "ones_like", "full", "full_like", "arange", "linspace", "logspace", "eye", "normal"),
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
    *("tril_indices", "triu_indices"),
)


def _torch(module: str, names: tuple[str, ...], why: str) -> tuple[Patch, ...]:
    return tuple(Patch(module, name, why, kind="torch", checked_on=_TORCH_CHECKED) for name in names)


_CHECKPOINTS = (
    Patch(
        "torch.distributed.checkpoint.filesystem",
        "pickle",
        "torch unpickles the file .metadata of a sharded checkpoint without restriction: it could execute code",
        file="stored_types",
        when=ALWAYS,
        kind="torch",
        checked_on=("2.13.0", "2.14.1"),
    ),
    Patch(
        "torch.distributed.checkpoint.default_planner",
        "DefaultLoadPlanner.load_bytes",
        "torch unpickles the objects in a sharded checkpoint without restriction",
        file="stored_types",
        when=ALWAYS,
        kind="torch",
        signatures=("(self, read_item, value)",),
        checked_on=("2.13.0", "2.14.1"),
    ),
)

_OPTIMIZER = tuple(
    Patch(
        "megatron.core.optimizer.distrib_optimizer",
        f"DistributedOptimizer.{method}",
        f"{why}, because torch counts steps per parameter, and Apex and Transformer Engine per group",
        file="torch_adam",
        when=ALWAYS,
        signatures=(signature,),
    )
    for method, signature, why in (
        ("state_dict", "(self)", "core fails to resume with torch's Adam before its first step"),
        ("load_state_dict", "(self, state_dict)", "core gives all parameters of torch's Adam one step count in common"),
    )
)

_NORM_SIGNATURE = (
    "(cls, config, hidden_size, eps=1e-05, persist_layer_norm=False, zero_centered_gamma=False, "
    "normalization='LayerNorm')",
)
_CPU_CORE = (
    Patch(
        "megatron.core.jit",
        "jit_fuser",
        "core decorates functions with torch.compile, which on CPU takes minutes at the start and saves no time",
    ),
    Patch(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        "the original queues the state until CUDA is initialized, which never happens; the replacement sets the CPU "
        "generator's state",
        signatures=("(new_state, device=-1, graph_safe=False)",),
    ),
    Patch(
        "megatron.core.tensor_parallel.random",
        "CudaRNGStatesTracker.fork",
        "core warns that the CPU generator's state changed, which is expected here because both generators are the "
        "same",
        signatures=("(self, name='model-parallel-rng')",),
    ),
    Patch(
        "megatron.core.tensor_parallel.mappings",
        "_gather_along_first_dim",
        "gloo gathers only parts of equal size; unequal parts (MoE with tensor parallelism) are gathered by an "
        "all-to-all",
        signatures=("(input_, group, output_split_sizes=None, use_global_buffer=False)",),
    ),
    Patch(
        "megatron.core.tensor_parallel.mappings",
        "_reduce_scatter_along_first_dim",
        "gloo scatters only parts of equal size; unequal parts are scattered by an all-to-all and a sum",
        signatures=("(input_, group, input_split_sizes=None, use_global_buffer=False)",),
    ),
    Patch(
        "megatron.core.transformer.torch_norm",
        "WrappedTorchNorm.__new__",
        "core rejects torch's norms with sequence parallelism only because nothing marks their parameters for the "
        "all-reduce",
        signatures=_NORM_SIGNATURE,
    ),
    Patch(
        "megatron.core.transformer.moe.moe_utils",
        "maybe_move_tensor_to_cpu",
        "core converts split sizes to numpy arrays only when it moves them off a GPU, but the all-to-all needs numpy "
        "arrays here, too",
        signatures=("(tensor, as_numpy=False, record_stream=False)",),
    ),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        "the token dispatcher imported the same function under another name",
    ),
    Patch(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        "core 0.16.1 does not define this name without Transformer Engine, but the router reads it",
        added=True,
    ),
    Patch(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "HybridDeviceOptimizer._get_sub_optimizer_param_groups",
        "core offloads only parameters on a GPU; here the model's parameters are divided as these would be",
        signatures=("(self, offload_fraction)",),
    ),
    Patch(
        "megatron.core.optimizer.optimizer_config",
        "is_te_min_version",
        "with the precision-aware optimizer, core compares the version of Transformer Engine, which is not there, with "
        "a number",
        signatures=("(version, check_equality=True)",),
    ),
    Patch(
        "megatron.core.distributed.torch_fully_sharded_data_parallel",
        "DeviceMesh",
        "core makes the mesh of torch's FSDP2 for CUDA devices",
    ),
)

_CPU_TORCH = (
    *_torch("torch", TENSOR_MAKERS, 'core makes tensors with device="cuda" and pin_memory=True'),
    *_torch("torch", ("Tensor.to", "Tensor.cuda"), "core moves tensors to the GPU; here they stay on the CPU"),
    *_torch(
        "torch",
        ("Tensor.pin_memory", "Tensor.record_stream"),
        "these functions support copies to the GPU, and raise an error without one",
    ),
    *_torch("torch", ("Tensor.type",), 'core\'s optimizers sort parameters by names like "torch.cuda.FloatTensor"'),
    *_torch(
        "torch.cuda",
        ("Stream", "Event", "StreamContext", "stream", "set_stream", "current_stream", "default_stream"),
        "core orders communication and computation by streams and events; here the program order does",
    ),
    *_torch(
        "torch.cuda",
        ("synchronize", "empty_cache", "reset_peak_memory_stats", "is_current_stream_capturing"),
        "without a GPU there is nothing to wait for, to free or to capture, and the originals raise",
    ),
    *_torch("torch.cuda", ("current_device", "set_device"), "core asks for the current device; the answer is the CPU"),
    *_torch("torch.cuda.nvtx", ("range_push", "range_pop", "mark", "range"), "profiler marks need a CUDA library"),
    *(
        entry
        for module in ("torch.distributed", "torch.distributed.distributed_c10d")
        for entry in _torch(
            module,
            ("isend",),
            "core frees a sent activation at once while gloo still reads it, so gloo gets an alias of the tensor",
        )
    ),
    *_torch(
        "torch.cuda",
        (
            *("get_rng_state", "set_rng_state", "get_rng_state_all", "set_rng_state_all"),
            *("manual_seed", "manual_seed_all"),
        ),
        "core's random states belong to the CUDA generator; here this is the CPU's generator",
    ),
    *_torch(
        "torch.cuda.random",
        ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"),
        "core imports the same functions from another module",
    ),
)

_REPLICAS = tuple(
    Patch(
        "megatron.core.distributed.param_and_grad_buffer",
        f"_ParamAndGradBucketGroup.{name}",
        why,
        file="replicas",
        when=WITH_REPLICAS,
        signatures=("(self, force_all_reduce=False)",),
    )
    for name, why in (
        (
            "start_grad_sync",
            "gradients that are reduced inside a replica are then exchanged with the other replicas (FT-HSDP)",
        ),
        (
            "finish_grad_sync",
            "core waits for the gradients of the other replicas before it uses the gradients (FT-HSDP)",
        ),
    )
)

_P2P_SIGNATURE = (
    "(*, tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next, group, prev_pipeline_rank, "
    "next_pipeline_rank)"
)
_DMR_CORE = tuple(
    Patch(f"megatron.core.{module}", symbol, why, file="double_execution", when=WITH_DMR, signatures=signatures)
    for module, symbol, why, signatures in (
        (
            "pipeline_parallel.schedules",
            "forward_step",
            "DMR follows the forward of every microbatch, and computes digests of what a stage receives and sends",
            (
                "(forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, config, "
                "cp_group_size, collect_non_loss_data=False, checkpoint_activations_microbatch=None, "
                "is_first_microbatch=False, current_microbatch=None, vp_stage=None, is_last_stage=True)",
            ),
        ),
        (
            "pipeline_parallel.schedules",
            "backward_step",
            "DMR follows the backward of every microbatch",
            (
                "(input_tensor, output_tensor, output_tensor_grad, model_type, config)",
                "(input_tensor, output_tensor, output_tensor_grad, config)",
            ),
        ),
        (
            "pipeline_parallel.p2p_communication",
            "_batched_p2p_ops",
            "deferred operators are verified while tensors are sent to other stages (D-DMR)",
            (_P2P_SIGNATURE,),
        ),
        (
            "pipeline_parallel.p2p_communication",
            "_p2p_ops",
            "deferred operators are verified while tensors are sent to other stages (D-DMR)",
            (_P2P_SIGNATURE,),
        ),
        (
            "tensor_parallel.random",
            "CheckpointFunction.forward",
            "the recomputation of a segment is the second execution of its forward (P-DMR)",
            ("(ctx, run_function, distribute_saved_activations, *args)",),
        ),
        (
            "tensor_parallel.random",
            "CheckpointWithoutOutput.checkpoint",
            "the recomputation of a segment is the second execution of its forward (P-DMR)",
            ("(self, run_function, *args)",),
        ),
        (
            "distributed.distributed_data_parallel",
            "DistributedDataParallel.finish_grad_sync",
            "deferred operators are verified while gradients are reduced (D-DMR)",
            ("(self, force_all_reduce=False)",),
        ),
        (
            "distributed.param_and_grad_buffer",
            "_ParamAndGradBucketGroup.start_param_sync",
            "DMR checks that all ranks have the same parameters after they were gathered",
            ("(self, force_sync=False)",),
        ),
        (
            "distributed.param_and_grad_buffer",
            "_ParamAndGradBucketGroup.finish_param_sync",
            "DMR checks that all ranks have the same parameters after they were gathered",
            ("(self, skip_next_bucket_dispatch=False)",),
        ),
        *(
            (module, name, why, ())
            for module in ("tensor_parallel.mappings", "tensor_parallel.layers", "distributed.param_and_grad_buffer")
            for name, why in (
                ("dist_all_gather_func", "DMR checks what an all-gather brings"),
                ("dist_reduce_scatter_func", "DMR checks the sums that a reduce-scatter computes"),
            )
        ),
    )
)
_DMR_TORCH = tuple(
    Patch("torch.distributed", name, why, "double_execution", WITH_DMR, kind="torch", checked_on=_TORCH_CHECKED)
    for name, why in (
        ("all_gather", "DMR checks what an all-gather brings"),
        ("all_reduce", "DMR checks that all ranks of a group have the same result of an all-reduce, and the right sum"),
        ("all_to_all_single", "DMR checks what arrives, and verifies deferred operators meanwhile (D-DMR)"),
    )
)

_COMPILED_GRAPHS = (
    Patch(
        "torch._inductor.output_code",
        "CompiledFxGraph.__call__",
        "the kernels of graphs that torch.compile has compiled bypass torch's dispatcher; DMR executes a graph twice",
        file="compiled_graphs",
        when=WITH_DMR,
        kind="torch",
        signatures=("(self, inputs)",),
        checked_on=_TORCH_CHECKED,
    ),
)

_PLAIN_KERNELS = tuple(
    Patch(
        f"megatron.core.{module}",
        symbol,
        "core uses the kernels of Transformer Engine or Apex where installed, which DMR cannot intercept; with DMR, "
        "torch's kernels are used",
        file="plain_kernels",
        when=WITH_DMR,
        signatures=_NORM_SIGNATURE if symbol.endswith("__new__") else (),
        added=symbol in ("multi_tensor_scale_tensor_impl", "te_general_gemm"),
    )
    for module, symbols in {
        "optimizer": ("Adam", "SGD", "USING_PYTORCH_OPTIMIZER"),
        "optimizer.distrib_optimizer": ("Adam", "HAVE_APEX_OR_TE", "USING_TE_OPTIMIZER", "USING_APEX_OPTIMIZER"),
        "optimizer.optimizer": ("multi_tensor_scale_impl",),
        "optimizer.clip_grads": ("l2_norm_impl", "multi_tensor_scale_impl", "multi_tensor_scale_tensor_impl"),
        "transformer.transformer_block": ("LayerNormImpl",),
        "transformer.torch_norm": ("WrappedTorchNorm.__new__",),
        "transformer.moe.moe_utils": ("te_general_gemm",),
        "models.backends": ("LNImpl",),
        "models.gpt.gpt_layer_specs": ("LNImpl",),
    }.items()
    for symbol in symbols
)

_SWAPPED_ENDS = (
    Patch(
        "megatron.core.pipeline_parallel.schedules",
        "forward_backward_pipelining_without_interleaving",
        "half of the microbatches pass the first two and the last two stages in swapped order (CheckFree+)",
        file="swapped_pipeline",
        when=WITH_SWAPPED_ENDS,
        signatures=(
            "(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, "
            "decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None, "
            "adjust_tensor_shapes_fn=None, p2p_communicator=None, pg_collection=None, force_all_reduce=False)",
        ),
    ),
    *(
        Patch(f"megatron.core.{module}", symbol, why, "swapped_pipeline", WITH_SWAPPED_ENDS, signatures=signatures)
        for module, symbol, why, signatures in (
            (
                "parallel_state",
                "initialize_model_parallel",
                "the first two and the last two stages share the embedding's weight, if it is tied (CheckFree+)",
                (),
            ),
            (
                "models.gpt.gpt_model",
                "GPTModel.__init__",
                "the first two stages have the embedding, and the last two the output layer (CheckFree+)",
                (),
            ),
            *(
                (
                    "parallel_state",
                    f"is_pipeline_{end}_stage",
                    f"another stage is the {end} one for half of the microbatches (CheckFree+)",
                    ("(ignore_virtual=True, vp_stage=None)",),
                )
                for end in ("first", "last")
            ),
        )
    ),
)

_CHECKFREE = tuple(
    Patch(f"megatron.core.optimizer.{module}", symbol, why, "stage_norms", WITH_CHECKFREE, signatures=signatures)
    for module, symbol, why, signatures in (
        (
            "clip_grads",
            "multi_tensor_applier",
            "CheckFree records this rank's part of a gradient norm, because it weights the neighbours of a lost "
            "stage by their norms",
            (),
        ),
        (
            "optimizer",
            "get_grad_norm_fp32",
            "after core computes the global gradient norm, CheckFree sums the norms of the pipeline stages from the "
            "same parts",
            (),
        ),
    )
)

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
_FUNCTIONS, _CALLED_TWICE = (
    "ft/systems/dmr/runtime/functions",
    "its kernels bypass torch's dispatcher: DMR calls it twice",
)

ELSEWHERE: tuple[Patch, ...] = (
    Patch(
        "torch.distributed.distributed_c10d",
        "_new_process_group_helper",
        "process groups are made by hot-swap, which can make them again after a recovery",
        file="ft/state/groups/torch_hook",
        when=PROTECTED,
        kind="torch",
        checked_on=_TORCH_CHECKED,
    ),
    *(
        Patch(
            module,
            "batch_isend_irecv",
            "messages of one batch are launched together in hot-swap's groups, too: one by one they can deadlock",
            file="ft/state/groups/torch_hook",
            when=PROTECTED,
            kind="torch",
            checked_on=_TORCH_CHECKED,
        )
        for module in ("torch.distributed", "torch.distributed.distributed_c10d")
    ),
    Patch(
        "torch.autograd",
        "Function.__init_subclass__",
        "classes of Transformer Engine, Apex and others that are defined later are called twice, too",
        file=_FUNCTIONS,
        when=WITH_DMR,
        kind="torch",
        checked_on=_TORCH_CHECKED,
    ),
    *(Patch(module, EVERY_FUNCTION, _CALLED_TWICE, _FUNCTIONS, WITH_DMR, added=True) for module in FUNCTIONS_OF_CORE),
    *(
        Patch("megatron.core.tensor_parallel.layers", f"{FUSED_GRADIENTS}.{phase}", _CALLED_TWICE, _FUNCTIONS, WITH_DMR)
        for phase in ("forward", "backward")
    ),
    Patch("transformer_engine.pytorch", EVERY_FUNCTION, _CALLED_TWICE, _FUNCTIONS, WITH_DMR, "te", checked_on=()),
    *(
        Patch(
            f"transformer_engine.pytorch.{module}",
            "FP8GlobalStateManager.reduce_and_update_fp8_tensors",
            "it changes fp8 scales after a step, which DMR compares",
            file=_FUNCTIONS,
            when=WITH_DMR,
            kind="te",
            checked_on=(),
        )
        for module in ("quantization", "fp8")
    ),
    *(
        Patch(
            "torch.cuda",
            name,
            "a package that initialises CUDA is named: the pool could not fork after that",
            file="ft/job/agent/preload",
            when=IN_WARM_POOL,
            kind="torch",
            checked_on=_TORCH_CHECKED,
        )
        for name in ("_lazy_init", "current_device", "get_device_properties")
    ),
)

MANIFEST: tuple[Patch, ...] = (
    *(*_CHECKPOINTS, *_OPTIMIZER, *_CPU_CORE, *_CPU_TORCH),
    *(*_REPLICAS, *_DMR_CORE, *_DMR_TORCH, *_COMPILED_GRAPHS, *_PLAIN_KERNELS, *_CHECKFREE, *_SWAPPED_ENDS),
)

_SET_UP = "every worker calls it while it builds its model"
_STEP_STATE = "its state belongs to one step: step_state.abandon_step resets it on all workers"
_ASKED_AGAIN = "releases.clear_cached_collective_results makes all workers call it again"
_NOT_STATE = "it depends on arguments and configuration, which are equal on all workers"
_NOT_USED = "no trainer of this project calls it"
_BUCKETS = "distributed.param_and_grad_buffer._ParamAndGradBucketGroup"

ONCE_PER_PROCESS = {
    "dist_checkpointing.gpt_checkpoint_interop.retarget_sharded_state_dict_to_gpt_checkpoint": _NOT_STATE,
    "dist_checkpointing.gpt_checkpoint_interop._retarget": _NOT_STATE,
    "dist_checkpointing.strategies.async_utils.PersistentAsyncCaller.schedule_async_call": _NOT_USED,
    "dist_checkpointing.strategies.async_utils.PersistentAsyncCaller._get_process": _NOT_USED,
    "dist_checkpointing.strategies.fully_parallel.FullyParallelSaveStrategyWrapper.apply_saving_parallelization": (
        "its object is created again for each save"
    ),
    "dist_checkpointing.strategies.fully_parallel.FullyParallelLoadStrategyWrapper.apply_loading_parallelization": (
        "its object is created again for each load"
    ),
    f"{_BUCKETS}.start_param_sync": _STEP_STATE,
    f"{_BUCKETS}.finish_param_sync": _STEP_STATE,
    f"{_BUCKETS}.start_grad_sync": _STEP_STATE,
    f"{_BUCKETS}.finish_grad_sync": _STEP_STATE,
    f"{_BUCKETS}.register_grad_ready": _STEP_STATE,
    "distributed.param_and_grad_buffer._ParamAndGradBuffer.__init__": _SET_UP,
    "models.T5.t5_model.T5Model.__init__": _SET_UP,
    "models.bert.bert_model.BertModel.__init__": _SET_UP,
    "models.gpt.gpt_model.GPTModel.__init__": _SET_UP,
    "models.hybrid.hybrid_model.HybridModel.__init__": _SET_UP,
    "models.mamba.mamba_model.MambaModel.__init__": _SET_UP,
    "models.mimo.comm.colocated_communicator._ColocatedCommunicate.forward": _NOT_STATE,
    "optimizer.layer_wise_optimizer.LayerWiseDistributedOptimizer.has_grad_norm_group": _ASKED_AGAIN,
    "optimizer.optimizer.MegatronOptimizer.has_grad_norm_group": _ASKED_AGAIN,
    "optimizer.optimizer.ChainedOptimizer.has_grad_norm_group": _ASKED_AGAIN,
    "optimizer.optimizer_cuda_graph.OptimizerCudaGraphWrapper.__call__": (
        "hot-swap rejects such an optimizer: releases.refuse_captured_update"
    ),
    "parallel_state.initialize_model_parallel": _SET_UP,
    "pipeline_parallel.bridge_communicator.BridgeCommunicator._get_or_create_broadcast_pg": _SET_UP,
    "pipeline_parallel.bridge_communicator.BridgeCommunicator._get_or_create_bridge_pg": _SET_UP,
    "rerun_state_machine.RerunStateMachine.should_run_forward_backward": _NOT_USED,
    "tensor_parallel.mappings._AllToAll.forward": _NOT_STATE,
}
"""Functions of core, without ``megatron.core.``, that call a collective only once per process, because they keep its
result -> why that is harmless.

After a failure, a worker that joins calls the collective for the first time, and the others have its result already:
the joiner would call it alone, and the job hang. So each such function either runs before a worker joins, or is called
again by all workers after a recovery.
"""
