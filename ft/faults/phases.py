"""Hooks for faults in the middle of the forward and the backward pass; they are installed only if such a fault is
planned.

All other points of a step need no hook: the trainer calls ``Injector.at`` around the gradient reduction, the optimizer
step, the snapshot transfer, a save and an evaluation. Only inside autograd there is no code of this project.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ft.faults.worker import Injector


def plant(injector: Injector, chunks: Sequence[nn.Module], step: Callable[[], int]) -> Callable[[], None]:
    """Install the hooks for the planned forward and backward faults of this rank, if there are any.

    Args:
        injector: the planned faults of this rank.
        chunks: the model chunks of this rank (virtual pipeline stages).
        step: returns the number of the present step, counted from 1.

    Returns:
        A function that removes the hooks.
    """
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


def _in_forward(injector: Injector, chunk: nn.Module, step: Callable[[], int]):
    def hook(module: nn.Module, inputs: Any) -> None:
        # Skip evaluations. Whether gradients are enabled does not tell: recomputed layers first run without them.
        if chunk.training:
            injector.at("forward", step())

    return hook


def _in_backward(injector: Injector, step: Callable[[], int]):
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        # A recomputed layer creates its differentiable output during backward; this hook then runs again.
        tensor = next(_differentiable(output), None)
        if tensor is not None:
            tensor.register_hook(lambda gradient: injector.at("backward", step()))

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
