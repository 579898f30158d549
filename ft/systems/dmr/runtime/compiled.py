"""Verify graphs that ``torch.compile`` has compiled, each as one operator, for DMR (SpareTrain).

The kernels of a compiled graph bypass torch's dispatcher. What the backward pass needs of a forward graph is among the
graph's results, and the backward pass is a graph of its own. So each call of a graph is an opaque call
(:class:`ft.systems.dmr.runtime.opaque.OpaqueCalls`), whose results are all that has to be compared.
"""

import hashlib
import re
from collections.abc import Callable
from typing import Any

from ft.systems.dmr.runtime.opaque import Executed, OpaqueCalls

_OPERATOR = re.compile(r"torch\.ops\.\w+\.(\w+)")
_MOST_NAMED = 4
_NAME = "name_for_dmr"
"""Attribute of a graph under which its name is kept."""


def call(calls: OpaqueCalls, graph: Any, run: Callable[[list], Any], inputs: list) -> Any:
    """Execute a compiled graph, and verify what it computes.

    Args:
        calls: executes and verifies the call.
        graph: the graph, ``torch._inductor.output_code.CompiledFxGraph``.
        run: executes it on a list of inputs, which it empties.
        inputs: the inputs; emptied when the call returns, as without DMR.

    Returns:
        The results.
    """
    given = list(inputs)
    inputs.clear()
    executed = calls.call(name_of(graph), lambda: Executed(run(list(given))), lambda: {"inputs": given})
    return executed.value


def name_of(graph: Any) -> str:
    """Return a name that is equal on all ranks that compute the same: the graph's first operators, and a hash of it."""
    name = getattr(graph, _NAME, "")
    if not name:
        text = getattr(graph, "inductor_post_grad_graph_str", "") or getattr(graph, "source_code", "")
        operators = list(dict.fromkeys(_OPERATOR.findall(text)))
        shown = ", ".join(operators[:_MOST_NAMED]) + (", ..." if len(operators) > _MOST_NAMED else "")
        name = f"compiled graph {hashlib.sha256(text.encode()).hexdigest()[:8]} ({shown})"
        setattr(graph, _NAME, name)
    return name
