"""Hands each call of a graph that ``torch.compile`` has compiled to the listener of :mod:`double_execution`."""

from typing import Any

from megatron.patches import double_execution
from megatron.patches.replace import original, replace

_MODULE, _CALL = "torch._inductor.output_code", "CompiledFxGraph.__call__"


def apply() -> None:
    replace(_MODULE, _CALL, _call)


def _call(self: Any, inputs: Any) -> Any:
    run = original(f"{_MODULE}.{_CALL}")
    listener = double_execution.active()
    return run(self, inputs) if listener is None else listener.compiled(self, lambda given: run(self, given), inputs)
