"""Points inside forward and backward at which a planned fault happens: hooks, where and as long as one is planned.

The other phases are calls of ``Injector.at`` in the trainer: around the gradient reduction, the optimizer step, the
snapshot transfer, a save and an evaluation there is code of ours; in the middle of autograd there is none.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ft.faults.worker import Injector


def plant(injector: Injector, chunks: Sequence[nn.Module], step: Callable[[], int]) -> Callable[[], None]:
    """Installs the hooks for the faults that ``injector`` has; without such faults it installs nothing.

    Args:
        chunks: the model chunks of this rank. step: number of the step under way (the first one is 1).

    Returns:
        a function that removes the hooks.
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
    """The middle one of a chunk's layers; where it has no list of layers, of its innermost modules with parameters."""
    lists = [m for m in chunk.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m)]
    if lists:
        layers = max(lists, key=len)
        return layers[len(layers) // 2]
    leaves = [m for m in chunk.modules() if not any(m.children()) and any(True for _ in m.parameters(recurse=False))]
    return leaves[len(leaves) // 2] if leaves else chunk


def _in_forward(injector: Injector, chunk: nn.Module, step: Callable[[], int]):
    def hook(module: nn.Module, inputs: Any) -> None:
        # An evaluation is forward too, but not of a step. Gradients say nothing: recomputed layers run without.
        if chunk.training:
            injector.at("forward", step())

    return hook


def _in_backward(injector: Injector, step: Callable[[], int]):
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        # A layer that is recomputed makes the tensor that matters then, in the middle of backward, and comes by again.
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
