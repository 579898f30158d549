"""The state that is protected: megatron-core's model chunks, optimizer and learning-rate schedule of one rank."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ft.base.errors import Problem, UserError
from ft.state.grid import groups_like
from ft.state.snapshot import capture, optimizers
from megatron import core
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.patches import platform, releases, step_state
from megatron.patches.replace import wrap_attribute

_KNOWN = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)
_MOST_NAMES = 3
_WRAP = f"wrap the model in {DistributedDataParallel.__module__.rpartition('.')[0]}.DistributedDataParallel"
_MAKE = "make it with megatron.core.optimizer.get_megatron_optimizer(OptimizerConfig(...), chunks)"


class TrainingState(capture.Capture):
    """The live objects of one rank, and what of them a copy holds. They survive every recovery.

    Args:
        chunks: ``DistributedDataParallel`` model chunks.
        optimizer: megatron-core's optimizer.
        scheduler: an object with ``state_dict`` and ``load_state_dict``, or None.

    Raises:
        UserError: a recovery could not restore all of it, or a worker that joins later could not take part in the
            optimizer's step.

    Attributes:
        shards: names of the logical shards that only this rank owns.
        dp_peers: logical ranks that hold the same part of the model, including this rank, in ring order.
        dp_groups: the ``dp_peers`` lists of all ranks.
        role: name of the pipeline stage; all ranks of a stage have the same work in every step.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, scheduler: Any = None):
        if problems := list(what_is_not_restored(chunks, optimizer, scheduler)):
            raise UserError.of(problems)
        releases.refuse_captured_update(optimizer)
        self.chunks, self.optimizer, self.scheduler = list(chunks), optimizer, scheduler
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.dp_peers = dist.get_process_group_ranks(group)
        self.dp_groups = groups_like(self.dp_peers, "dp-cp")
        tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        self.shards = [f"optimizer tp{tp} pp{pp} dp{self.dp_peers.index(dist.get_rank())}"]
        self.role = f"stage {pp}"
        super().__init__(self.chunks, optimizer, scheduler, alone=len(self.dp_peers) == 1)

    def before_update(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called before each optimizer step, the last point at which no state has changed."""

        def step_after_callback(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            callback()
            return step(*args, **kwargs)

        wrap_attribute(self.optimizer, "step", step_after_callback)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the live parameters and learnt buffers of the model, by name."""
        return {
            f"{number}/{name}": held.detach()
            for number, chunk in enumerate(self.chunks)
            for name, held in (*chunk.named_parameters(), *learnt_buffers(chunk))
        }

    def abandon_step(self) -> None:
        step_state.abandon_step(self.chunks, self.optimizer)
        self._scales.abandon_step()

    def publish_parameters(self, live: Collection[int] = ()) -> None:
        """Copy the optimizer's main parameters to the model parameters. All ranks have to call it.

        Args:
            live: logical ranks whose models have all of these parameters already. Data-parallel peers that are all
                among them do nothing.
        """
        whole = set(live).intersection(self.dp_peers if step_state.keeps_parameters(self.chunks) else ())
        if len(whole) < len(self.dp_peers):
            step_state.publish_parameters(self.chunks, self.optimizer, min(whole, default=None))


def what_is_not_restored(chunks: Sequence[Any], optimizer: Any, scheduler: Any) -> Iterator[Problem]:
    """Yield (problem, fix) for each part of a training state that a recovery could not restore."""
    if not parallel_state.model_parallel_is_initialized():
        yield (
            "megatron.core.parallel_state is not initialised: it says which ranks hold the same part of the model",
            "call parallel_state.initialize_model_parallel() after session.init_process_group()",
        )
    yield from _of_chunks(chunks)
    unknown = list(_of_optimizer(optimizer))
    yield from unknown or _of_parameters(chunks, optimizer)
    if scheduler is not None:
        yield from _of_scheduler(scheduler)


def _of_chunks(chunks: Sequence[Any]) -> Iterator[Problem]:
    if not chunks:
        yield "there are no model chunks to protect", "give ft.protect the list of this rank's model chunks"
    for number, chunk in enumerate(chunks):
        held = chunk.named_parameters() if isinstance(chunk, torch.nn.Module) else ()
        split = [name for name, parameter in held if isinstance(parameter, DTensor)]
        if split and not step_state.is_fsdp2(chunk):
            yield f"parameters of model chunk {number} are DTensors, which no snapshot holds: {_first(split)}", _WRAP
        if lacks := step_state.lacking(chunk):
            yield (
                f"model chunk {number} is a {_kind(chunk)}, which lacks what a recovery resets: {', '.join(lacks)}",
                _WRAP,
            )


def _of_optimizer(optimizer: Any) -> Iterator[Problem]:
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        inner = getattr(part, "optimizer", None)
        if not isinstance(part, _KNOWN):
            what = "the optimizer" if part is optimizer else "a part of the optimizer"
            yield f"{what} is a {_kind(part)}, and not megatron-core's: no snapshot would hold its weights", _MAKE
        elif inner is not None and (
            names := sorted({key for group in optimizers.groups(inner) for key in _tensors(group)})
        ):
            problem = f"parameter groups of the optimizer have tensors, which no snapshot holds: {', '.join(names)}"
            yield problem, "give the optimizer plain numbers, and leave capturable off"


def _of_scheduler(scheduler: Any) -> Iterator[Problem]:
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        problem = f"the scheduler is a {_kind(scheduler)}, which has no state_dict and load_state_dict"
        yield problem, "give it both, or give ft.protect None, and keep its state in the position"
    elif names := _tensors(scheduler.state_dict()):
        problem = f"the state of the scheduler has tensors, which no snapshot holds: {', '.join(names)}"
        yield problem, "give it a state of plain numbers"


def _of_parameters(chunks: Sequence[Any], optimizer: Any) -> Iterator[Problem]:
    """Compare the parameters of the chunks with those that the optimizer trains."""
    held = {id(p): (name, p) for chunk in chunks for name, p in chunk.named_parameters()}
    trained = {id(p) for part in optimizers.parts(optimizer) for p in optimizers.model_parameters(part)}
    if left := [name for key, (name, p) in held.items() if p.requires_grad and key not in trained]:
        yield (
            f"{len(left)} parameter(s) of the model chunks belong to no part of the optimizer, and so to no snapshot: "
            f"{_first(left)}",
            "make the optimizer for all chunks, or set requires_grad to False before the chunks are wrapped",
        )
    if strange := len(trained - held.keys()):
        yield (
            f"the optimizer trains {strange} parameter(s) of a model that is none of the protected chunks",
            "give ft.protect all model chunks of this rank",
        )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


def _tensors(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the values that are tensors."""
    return [name for name, value in values.items() if isinstance(value, torch.Tensor)]


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def learnt_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the state of a model that training changes without a gradient: persistent floating-point buffers, such as a
    router's expert bias.
    """
    for prefix, part in module.named_modules():
        for name, held in part.named_buffers(prefix, recurse=False):
            own = name.rpartition(".")[2]
            if held.is_floating_point() and own not in part._non_persistent_buffers_set:
                yield name, held


def fingerprint(
    settings: Mapping[str, Any], *, tp: int, pp: int, vpp: int, dp: int, ep: int, micro_batch: int, global_batch: int
) -> dict[str, str | int]:
    """Return the fingerprint of a run on this machine: property -> value.

    Args:
        settings: all other settings that determine the operators, by name; the fingerprint has their digest, "model".
        vpp: number of model chunks per stage.
        micro_batch: samples in a microbatch.
        global_batch: samples in a step, after a batch-size ramp.
    """
    text = json.dumps(settings, sort_keys=True, default=str)
    return {
        "model": hashlib.sha256(text.encode()).hexdigest()[:16],
        "tp": tp,
        "pp": pp,
        "vpp": vpp,
        "dp": dp,
        "ep": ep,
        "micro_batch": micro_batch,
        "microbatches": global_batch // (micro_batch * dp),
        "torch": torch.__version__.split("+")[0],
        "core": core.__version__,
        "device": torch.cuda.get_device_name() if platform().name == "cuda" else "cpu",
    }
