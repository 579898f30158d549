"""Hands each call of a graph that ``torch.compile`` has compiled to the listener of :mod:`double_execution`."""

from functools import partial
from typing import Any

from megatron.patches import double_execution
from megatron.patches.replace import wrap


def apply() -> None:
    wrap("torch._inductor.output_code", "CompiledFxGraph.__call__", _call)


def _call(run: Any, graph: Any, inputs: Any) -> Any:
    listener = double_execution.active()
    return run(graph, inputs) if listener is None else listener.compiled(graph, partial(run, graph), inputs)
