"""Operators that return something and change arguments besides: a flipped bit in any of it is found.

The flips are made by a dispatch mode that lies below DMR's and knows nothing of it: it sees each kernel that runs, in
first and second executions.
"""

import pytest
import torch
from test_dmr_runtime_mode import engine_of
from test_dmr_runtime_operators import overloads
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ft.systems.dmr.digest import same
from ft.systems.dmr.runtime.operators import properties_of, tensors_in
from ft.systems.dmr.runtime.strategy import Strategy

aten = torch.ops.aten


def normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(7))


def batch_norm(*more):
    return (normal(6, 4), normal(4), normal(4), torch.zeros(4), torch.ones(4), *more)


def observed():
    ranges = (torch.tensor([float("inf")]), torch.tensor([float("-inf")]), torch.ones(1), torch.zeros(1).int())
    return (normal(5, 3), torch.ones(1).long(), torch.ones(1).long(), *ranges, 0.01, 0, 255, 0, False, False)


CASES = {
    "batch norm": (aten.native_batch_norm.default, lambda: batch_norm(True, 0.1, 1e-5)),
    "batch norm, marked": (aten._native_batch_norm_legit.default, lambda: batch_norm(True, 0.1, 1e-5)),
    "batch norm with update": (aten._batch_norm_with_update.default, lambda: batch_norm(0.1, 1e-5)),
    "statistics of a batch": (
        aten.batch_norm_update_stats.default,
        lambda: (normal(6, 4), torch.zeros(4), torch.ones(4), 0.1),
    ),
    "batch norm without state": (
        aten.native_batch_norm.default,
        lambda: (normal(6, 4), normal(4), normal(4), None, None, True, 0.1, 1e-5),
    ),
    "noise": (aten.rrelu_with_noise.default, lambda: (normal(6, 4), torch.ones(6, 4), 0.1, 0.3, True)),
    "noise, in place": (aten.rrelu_with_noise_.default, lambda: (normal(6, 4), torch.ones(6, 4), 0.1, 0.3, True)),
    "observer": (aten._fused_moving_avg_obs_fq_helper.default, observed),
    "loss scale": (
        aten._amp_update_scale_.default,
        lambda: (torch.tensor(8.0), torch.tensor(1, dtype=torch.int32), torch.tensor(0.0), 2.0, 0.5, 2),
    ),
    "several": (aten._foreach_add_.List, lambda: ([normal(3), normal(2, 2)], [normal(3), normal(2, 2)])),
    "one": (aten.add_.Tensor, lambda: (normal(3), normal(3))),
}


class Below(TorchDispatchMode):
    """Flips a bit of the ``number``-th tensor that call ``due`` of an operator writes or returns.

    Attributes:
        writes: number of tensors that each call of the operator writes or returns.
    """

    def __init__(self, base: str, due: int = -1, number: int = 0):
        super().__init__()
        self._base, self._due, self._number, self.writes = base, due, number, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = tensors_in((list(args), kwargs))
        before = [tensor.clone() for tensor in given]
        out = func(*args, **(kwargs or {}))
        if func._schema.name.rstrip("_") != self._base:
            return out
        changed = [tensor for tensor, copy in zip(given, before, strict=True) if not same(tensor, copy)]
        # also what had the value before that is written to it, as memory that was used before may have
        made = [tensor for tensor in tensors_in(out) if all(tensor is not one for one in changed)]
        hit = [tensor for tensor in (*changed, *made) if tensor.numel()]
        if len(self.writes) == self._due:
            with torch._C._DisableTorchDispatch():
                hit[self._number].view(-1).view(torch.uint8)[0] ^= 1
        self.writes.append(len(hit))
        return out


def executed(name: str, strategy, below: Below) -> tuple[bool, list[torch.Tensor]]:
    """Execute the operator in a protected iteration; return (whether a mismatch was found, all that it makes)."""
    func, call = CASES[name]
    torch.manual_seed(3)
    args, engine = call(), engine_of(strategy)
    with below, engine.iteration(1):
        out = func(*args)
    return bool(engine.flag().item()), [*tensors_in(list(args)), *tensors_in(out)]


def base_of(name: str) -> str:
    return CASES[name][0]._schema.name.rstrip("_")


@pytest.mark.parametrize("name", CASES)
def test_a_flip_in_any_execution_of_anything_that_the_operator_makes_is_found(name):
    func, call = CASES[name]
    torch.manual_seed(3)
    args = call()
    expected = [*tensors_in(list(args)), *tensors_in(func(*args))]
    counting = Below(base_of(name))
    found, ours = executed(name, Strategy("naive"), counting)
    assert not found and len(expected) == len(ours) and all(map(same, expected, ours))
    assert sum(counting.writes)
    missed = []
    for due, count in enumerate(counting.writes):
        for number in range(count):
            if not executed(name, Strategy("naive"), Below(base_of(name), due, number))[0]:
                missed.append((due, number))
    assert not missed, f"of {counting.writes}"


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.weight = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x):
        made = torch.nn.functional.batch_norm(self.into(x), self.mean, self.variance, self.weight, training=True)
        return torch.relu(made)


class Counting(torch.nn.Module):
    """Moves counters on in place in each execution, one of them through a view; also writes to temporary memory."""

    def __init__(self):
        super().__init__()
        self.into = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(4))
        self.register_buffer("table", torch.zeros(3, 4))

    def forward(self, x):
        made = self.into(x)
        self.calls.add_(1.0)
        self.table[1].add_(made.detach().sum(0))
        scratch = torch.zeros_like(made)
        scratch.copy_(made)
        return torch.relu(scratch.mul_(2.0))


def trained(strategy, below: Below | None = None, kind: type = Normed) -> tuple[bool, list[torch.Tensor]]:
    """One pass through a recomputed module: (whether a mismatch was found, gradients and buffers)."""
    torch.manual_seed(3)
    model, x = kind(), normal(6, 4).requires_grad_()
    if strategy is None:
        checkpoint(model, x, use_reentrant=False).sum().backward()
        found = False
    else:
        engine = engine_of(strategy)
        with below, engine.iteration(1):
            loss = engine.forward_step(
                lambda: checkpoint(engine.recomputed(model), x, use_reentrant=False).sum(), 0, [], lambda made: made
            )
            engine.backward_step(loss.backward, loss, [])
        found = bool(engine.flag().item())
    return found, [*(one.grad for one in model.parameters()), *model.buffers(), x.grad]


@pytest.mark.parametrize("strategy", [Strategy("naive"), Strategy("piggyback")], ids=lambda one: one.name)
def test_running_statistics_in_a_segment_are_what_they_are_without_and_a_flip_in_them_is_found(strategy):
    _, expected = trained(None)
    base = "aten::native_batch_norm"
    counting = Below(base)
    found, ours = trained(strategy, counting)
    assert not found, "the recomputation changes the statistics a second time, as without DMR"
    assert all(map(same, expected, ours)) and len(counting.writes) == 4  # forward and recomputation, each twice
    for due, count in enumerate(counting.writes):
        for number in range(count):
            assert trained(strategy, Below(base, due, number))[0], (due, number, counting.writes)


@pytest.mark.parametrize("strategy", [Strategy("naive"), Strategy("piggyback")], ids=lambda one: one.name)
def test_a_counter_that_a_segment_moves_on_is_no_mismatch_and_a_flip_in_it_is_found(strategy):
    _, expected = trained(None, kind=Counting)
    trained(strategy, Below("the first digests of a process compute keys"), Counting)
    for base, calls in (("aten::add", (2, 2)), ("aten::mul", (1, 1))):
        counting = Below(base)
        found, ours = trained(strategy, counting, Counting)
        assert not found and all(map(same, expected, ours))
        both = 2 if strategy.name == "naive" or base == "aten::add" else 1
        assert len(counting.writes) >= both * sum(calls), "what outlives the segment is executed twice in each pass"
        for due, count in enumerate(counting.writes):
            for number in range(count):
                assert trained(strategy, Below(base, due, number), Counting)[0], (base, due, number, counting.writes)


def test_no_operator_is_verified_by_a_variant_that_returns_less_than_it_makes():
    kinds = [properties_of(func) for func in overloads()]
    assert {kind.name for kind in kinds if kind.changes_state} > {"native_batch_norm", "rrelu_with_noise"}
    assert not [kind.name for kind in kinds if kind.functional is not None and (kind.changes_state or kind.random)]
