"""Fault injection in a training process: which faults are planned for this rank, and where in a step they occur.

For faults in the middle of the forward and the backward pass, hooks are installed if such a fault is planned. All other
points of a step need no hook: the trainer calls ``Injector.at`` around the gradient reduction, the optimizer step, the
snapshot transfer, a save and an evaluation. Only inside autograd there is no code of this project.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ft.base import events
from ft.faults.faults import Fault
from ft.faults.worker import Actions, Injector
from ft.protection.training_state import TrainingState
from ft.worker.session import Session
from megatron.patches.replace import wrap_attribute

_TOP_MANTISSA_BIT = {torch.float32: (torch.int32, 1 << 22), torch.bfloat16: (torch.int16, 1 << 6)}
_TOP_MANTISSA_BIT[torch.float16] = (torch.int16, 1 << 9)


def make_injector(session: Session, actions: Actions) -> Injector:
    """Return an injector of the faults that are planned for this worker's logical rank and have not occurred yet."""

    def announce(fault: Fault) -> None:
        where = fault.phase if fault.step is not None else "time"
        session.observe(events.FAULT_INJECTED, number=fault.number, kind=fault.kind, where=where, fault=str(fault))

    return Injector.from_environment(session.rank, session.node, session.fired, announce, actions)


def plant_phases(injector: Injector, subject: TrainingState, step: Callable[[], int]) -> None:
    """Install the injection points inside forward, backward and gradient reduction, where a fault is planned there."""
    plant(injector, subject.chunks, step)
    if not injector.has("reduce"):
        return

    def finalize_with_faults(finalize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        injector.at("reduce", step())
        return finalize(*args, **kwargs)

    wrap_attribute(subject.chunks[0].config, "finalize_model_grads_func", finalize_with_faults)


@torch.no_grad()
def corrupt_tensor(subject: TrainingState, fault: Fault) -> None:
    """Change one element in the middle of the largest weight of the module in the middle of the model."""
    module = middle_module(subject.chunks[0])
    weight = max(module.parameters(), key=torch.numel).data.view(-1)
    place = weight[weight.numel() // 2 : weight.numel() // 2 + 1]
    if fault.value == "nan":
        place.fill_(float("nan"))
    else:
        kind, bit = _TOP_MANTISSA_BIT[weight.dtype]
        place.view(kind).bitwise_xor_(bit)


def plant(injector: Injector, chunks: Sequence[nn.Module], step: Callable[[], int]) -> Callable[[], None]:
    """Install the hooks for the planned forward and backward faults of this rank, if there are any."""
    handles = []
    chunk = chunks[len(chunks) // 2]
    module = middle_module(chunk)
    if injector.has("forward"):
        handles.append(module.register_forward_pre_hook(_in_forward(injector, chunk, step)))
    if injector.has("backward"):
        handles.append(module.register_forward_hook(_in_backward(injector, step)))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def middle_module(chunk: nn.Module) -> nn.Module:
    """Return the middle layer of a chunk; without a list of layers, the middle one of its leaf modules with
    parameters.
    """
    lists = [m for m in chunk.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m)]
    if lists:
        layers = max(lists, key=len)
        return layers[len(layers) // 2]
    leaves = [m for m in chunk.modules() if not any(m.children()) and any(True for _ in m.parameters(recurse=False))]
    return leaves[len(leaves) // 2] if leaves else chunk


def _in_forward(injector: Injector, chunk: nn.Module, step: Callable[[], int]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any) -> None:
        # Skip evaluations. Whether gradients are enabled does not tell: recomputed layers first run without them.
        if chunk.training:
            injector.at("forward", step())

    return hook


def _in_backward(injector: Injector, step: Callable[[], int]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        # A recomputed layer creates its differentiable output during backward; this hook then runs again.
        tensor = next(_differentiable(output), None)
        if tensor is not None:
            hooked: Any = tensor
            hooked.register_hook(lambda gradient: injector.at("backward", step()))

    return hook


def _differentiable(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _differentiable(part)
    elif isinstance(output, dict):
        yield from _differentiable(list(output.values()))
