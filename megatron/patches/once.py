"""Finds functions of megatron-core that call a collective only once per process, because they cache its result.

After a failure, a *joiner* (a new worker) continues the job together with the *survivors* (the workers that were not
affected). If the survivors have cached a result that the joiner still has to compute, the joiner calls the collective
alone, and the job hangs. So every such function is listed in ``KNOWN`` with the reason why it is harmless, or with the
code that resets its state in a recovery. ``unknown`` finds functions of a release that are not listed.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.patches.sources import CoreSources

_COLLECTIVES = frozenset(
    (
        *("all_reduce", "all_gather", "all_gather_into_tensor", "_all_gather_base", "all_gather_object"),
        *("reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all", "all_to_all_single"),
        *("broadcast", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier"),
        *("monitored_barrier", "new_group", "new_subgroups_by_enumeration"),
    )
)
# Packages of core that training does not call, and FSDP, whose parameters no fault-tolerance system here protects.
_ELSEWHERE = ("inference", "export", "post_training", "resharding", "distributed.fsdp")
# Method names so common that a call does not show which function is called.
_ANYTHING = frozenset(
    (
        *("__init__", "__call__", "forward", "backward", "step", "wait", "apply", "run", "get", "update", "load"),
        *("save", "build", "init", "reset", "wrapper", "inner"),
    )
)

_SET_UP = "every worker calls it while it builds its model"
_STEP_STATE = "its state belongs to one step: step_state.abandon_step resets it on all workers"
_ASKED_AGAIN = "releases.clear_cached_collective_results makes all workers call it again"
_NOT_STATE = "it depends on arguments and configuration, which are equal on all workers"
_NOT_USED = "no trainer of this project calls it"
_BUCKETS = "distributed.param_and_grad_buffer._ParamAndGradBucketGroup"

# Function, without ``megatron.core.`` -> the reason why it is harmless.
KNOWN = {
    "dist_checkpointing.gpt_checkpoint_interop.retarget_sharded_state_dict_to_gpt_checkpoint": _NOT_STATE,
    "dist_checkpointing.gpt_checkpoint_interop._retarget": _NOT_STATE,
    "dist_checkpointing.strategies.async_utils.PersistentAsyncCaller.schedule_async_call": _NOT_USED,
    "dist_checkpointing.strategies.async_utils.PersistentAsyncCaller._get_process": _NOT_USED,
    "dist_checkpointing.strategies.fully_parallel.FullyParallelSaveStrategyWrapper.apply_saving_parallelization": (
        "checkpointing.plan.SavePlanning.forget drops its state on all workers"
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


@dataclass(frozen=True)
class OnceOnly:
    """A function whose collectives depend on state that an earlier call of it left.

    Attributes:
        name: dotted name of the function, without ``megatron.core.``.
        line: number of its first line.
        state: names of the attributes and globals that it keeps from call to call, sorted.
        why: why joiner and survivors nevertheless call the same collectives; None: not reviewed yet.
    """

    name: str
    line: int
    state: tuple[str, ...]
    why: str | None


def once_only(core: CoreSources) -> list[OnceOnly]:
    """Return all such functions of ``core``, in the order of modules and lines, without importing ``core``.

    A function is included if it calls a collective (or another function of core that calls one) only under a condition
    on lasting state that the function itself assigns: an attribute, a global, or an entry of either. The condition may
    enclose the call, or return before it. Functions with a caching decorator are included, too.
    """
    functions = [entry for module in _modules(core) for entry in _functions(core, module)]
    collective = _COLLECTIVES | {
        node.name for _, node in functions if node.name not in _ANYTHING and _calls(node, _COLLECTIVES)
    }
    found = []
    for name, node in functions:
        if calls := _calls(node, collective):
            state = _caching_decorators(node) | _conditions(node, calls)
            if state:
                found.append(OnceOnly(name, node.lineno, tuple(sorted(state)), KNOWN.get(name)))
    return found


def unknown(core: CoreSources) -> list[OnceOnly]:
    """Return the functions that are not in ``KNOWN``: with this release of core, a recovery may hang in them."""
    return [each for each in once_only(core) if each.why is None]


def _modules(core: CoreSources) -> Iterator[str]:
    for module in core.modules():
        inside = module.removeprefix("megatron.core.")
        if not any(inside == folder or inside.startswith(f"{folder}.") for folder in _ELSEWHERE):
            yield module


def _functions(core: CoreSources, module: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    def inside(node: ast.AST, path: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield f"{path}.{child.name}", child
            yield from inside(child, f"{path}.{child.name}" if isinstance(child, ast.ClassDef) else path)

    yield from inside(core.tree(module), module.removeprefix("megatron.core."))


def _calls(function: ast.FunctionDef, names: frozenset[str] | set[str]) -> list[ast.Call]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [call for call in calls if _last_name(call.func) in names]


def _last_name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _caching_decorators(function: ast.FunctionDef) -> set[str]:
    return {text for decorator in function.decorator_list if "cache" in (text := ast.unparse(decorator))}


def _conditions(function: ast.FunctionDef, calls: list[ast.Call]) -> set[str]:
    """Return the names of lasting state that decide whether one of ``calls`` is reached."""
    lasting, state = _lasting(function), set()
    for node in ast.walk(function):
        if not isinstance(node, ast.If) or not (asked := _mentioned(node.test) & lasting):
            continue
        inside = set(map(id, ast.walk(node)))
        returns = any(isinstance(statement, ast.Return) for statement in node.body)
        if any(id(call) in inside or (returns and call.lineno > node.lineno) for call in calls):
            state |= asked
    return state


def _lasting(function: ast.FunctionDef) -> set[str]:
    """Return the names of the attributes and globals that ``function`` assigns: state that outlives the call."""
    assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    shared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    aliases = {
        target.id
        for node in assignments
        if isinstance(node.value, ast.Attribute)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    changes = (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)
    targets = [target for node in assignments for target in node.targets]
    targets += [node.target for node in ast.walk(function) if isinstance(node, changes)]
    lasting = set()
    for target in targets:
        base = target
        while isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.Attribute):
            lasting.add(base.attr)
        elif isinstance(base, ast.Name) and (base.id in shared or (base is not target and base.id in aliases)):
            lasting.add(base.id)
    return lasting


def _mentioned(test: ast.expr) -> set[str]:
    """Return the names, attributes and constants in a condition."""
    names = {_last_name(node) for node in ast.walk(test)}
    return names | {node.value for node in ast.walk(test) if isinstance(node, ast.Constant)}
