"""Graphs that ``torch.compile`` compiles are verified as one operator each: forward, recomputation and backward."""

import shutil

import pytest
import torch
from test_dmr_runtime_mode import engine_of
from torch.utils.checkpoint import checkpoint

from ft.systems.dmr.runtime.findings import RECOMPUTATION
from ft.systems.dmr.runtime.opaque import OPAQUE, OpaqueCalls
from ft.systems.dmr.runtime.strategy import Strategy

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler (apt install g++)")


class Below:
    """Flips a bit of a result of call ``due`` of any compiled graph, below DMR.

    Attributes:
        results: number of results of each call.
    """

    def __init__(self):
        self.arm()

    def arm(self, due: int = -1, number: int = 0) -> None:
        self._due, self._number, self.results = due, number, []

    def install(self) -> None:
        from torch._inductor.output_code import CompiledFxGraph

        real = CompiledFxGraph.__call__

        def flipped(graph, inputs):
            out = real(graph, inputs)
            tensors = [one for one in out if isinstance(one, torch.Tensor) and one.numel()]
            if len(self.results) == self._due:
                with torch._C._DisableTorchDispatch():
                    tensors[self._number].untyped_storage()[2] ^= 1
            self.results.append(len(tensors))
            return out

        CompiledFxGraph.__call__ = flipped


class Apart(torch.autograd.Function):
    """Calls compiled functions in both passes, where no gradients are recorded, as functions of megatron-core do."""

    __module__ = "megatron.planted"  # its operators are visible, those of other packages' functions may not be

    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return activation(x, bias)

    @staticmethod
    def backward(ctx, gradient):
        made = activation_backward(gradient, *ctx.saved_tensors)
        return made, made.sum(0)


@torch.compile
def activation(x, bias):
    return torch.nn.functional.gelu(x + bias) * 1.5


@torch.compile
def activation_backward(gradient, x, bias):
    y = x + bias
    return gradient * torch.sigmoid(1.702 * y) * 1.5


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 16))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        y = Apart.apply(self.into(x), self.bias)
        return self.add(self.out(y), x)

    @torch.compile
    def add(self, y, x):
        self.calls.add_(1)
        return x + torch.nn.functional.dropout(torch.tanh(y), 0.25)


def steps(engine, segment: bool, count: int) -> list:
    """Return what is left after each of ``count`` steps from the same state: gradients, buffers, generator; mismatches.

    Args:
        engine: the engine; None: without DMR.
        segment: whether the block is recomputed.
        count: number of steps.
    """
    torch.manual_seed(1)
    block, x, found = Block(), torch.randn(4, 8), []
    for _ in range(count):
        torch.manual_seed(2)
        block.zero_grad()
        block.calls.zero_()
        given = x.clone().requires_grad_()

        def forward():
            function = block if engine is None else engine.recomputed(block)
            return (checkpoint(function, given, use_reentrant=True) if segment else block(given)).sum()  # noqa: B023

        if engine is None:
            forward().backward()
            told = []
        else:
            with engine.iteration(1):
                loss = engine.forward_step(forward, 0, [], lambda made: made)
                engine.backward_step(loss.backward, loss, [])
            told = engine.settle() if engine.flag().item() else []
            engine.share(lambda value: [value])
        left = [*(one.grad.clone() for one in block.parameters()), block.calls.clone(), given.grad]
        found.append(([one.numpy().tobytes() for one in (*left, torch.get_rng_state())], told))
    return found


def in_every_way(segment: bool) -> dict:
    from megatron.patches import double_execution, registry

    torch.compiler.set_stance("default")  # core, if it was imported before, has compiling switched off on a CPU
    below = Below()
    below.install()
    registry.put(patch for patch in double_execution.PATCHES if patch.module == "torch._inductor.output_code")
    found = {"off": steps(None, segment, 1), "graphs": list(below.results), "missed": []}
    for strategy in (Strategy("naive"), Strategy("piggyback")):
        engine = engine_of(strategy)
        engine.watch_opaque_calls(OpaqueCalls(engine))
        double_execution.listen(engine)
        found[strategy.name] = steps(engine, segment, 3)
        below.arm()
        found[f"clean {strategy.name}"] = steps(engine, segment, 1)
        found[f"{strategy.name} counts"] = engine.coverage()
        found[f"{strategy.name} graphs"] = counts = list(below.results)
        for due, count in enumerate(counts):
            for number in range(count):
                steps(engine, segment, 1)
                below.arm(due, number)
                [(_, told)] = steps(engine, segment, 1)
                below.arm()
                if not told or not any("compiled graph" in one.at.operator for one in told):
                    found["missed"].append((strategy.name, due, number))
        found[f"{strategy.name} told"] = [one.how for one in told]
    return found


@pytest.mark.parametrize("segment", [False, True])
def test_a_step_is_the_same_bit_for_bit_and_a_flip_in_any_graph_is_found(segment, ranks):
    [found] = ranks(in_every_way, 1, segment, timeout=400)
    assert len(found["graphs"]) == (6 if segment else 4)
    for way in ("naive", "piggyback"):
        assert all(step == found["off"][0] for step in (*found[way], *found[f"clean {way}"])), way
        assert found[f"{way} counts"][OPAQUE] and not found[f"{way} counts"]["unverified"]
    assert len(found["naive graphs"]) == 2 * len(found["graphs"])
    assert not found["missed"]
    if segment:
        # of the two graphs of the forward pass, the one that is the same graph in the recomputation is executed once
        assert len(found["piggyback graphs"]) == len(found["naive graphs"]) - 2
        assert RECOMPUTATION not in found["naive told"]
