"""With every operator executed twice a plain torch model computes what it computes without, bit for bit."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ft.systems.dmr.plan.trace import NAIVE, PIGGYBACK, UNCHECKED
from ft.systems.dmr.runtime.cursor import ExecutionCursor
from ft.systems.dmr.runtime.engine import Engine
from ft.systems.dmr.runtime.findings import AT_ONCE, RECOMPUTATION, Findings
from ft.systems.dmr.runtime.mode import CHECKER, PRIMARY, DoubleExecutionMode
from ft.systems.dmr.runtime.queue import Queue
from ft.systems.dmr.runtime.strategy import Strategy

NAIVELY, PIGGYBACKED = Strategy("naive"), Strategy("piggyback")


class Searching(Strategy):
    """Follows a plan that knows no matrix products."""

    def decide(self, unit, index, operator, in_segment):
        self.misfits.update([(unit.phase, operator)] if operator in ("mm", "addmm") else [])
        return super().decide(unit, index, operator, in_segment)


def engine_of(strategy, disturbance=None) -> Engine:
    cursor, findings = ExecutionCursor(), Findings(torch.device("cpu"), 99)
    queue = Queue(findings)
    mode = DoubleExecutionMode(cursor, strategy, findings, queue, disturbance=disturbance)
    return Engine(cursor, findings, queue, mode)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.into = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32)
        self.out, self.drop = torch.nn.Linear(32, 16), torch.nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.out(torch.nn.functional.gelu(self.into(self.norm(x)))))


class Model(torch.nn.Module):
    """Embedding, two blocks that are recomputed, and a loss."""

    def __init__(self, dtype: torch.dtype, *, reentrant: bool = True, early_stop: bool = True):
        super().__init__()
        self.embedding, self.blocks = torch.nn.Embedding(20, 16), torch.nn.ModuleList([Block(), Block()])
        self.engine, self.reentrant, self.early_stop = None, reentrant, early_stop
        self.to(dtype)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            function = block if self.engine is None else self.engine.recomputed(block)
            kwargs = {} if self.reentrant else {"early_stop": self.early_stop}
            x = checkpoint(function, x, use_reentrant=self.reentrant, **kwargs)
        logits = x @ self.embedding.weight.t()
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(1).flatten())


def train(strategy=None, dtype=torch.float32, optimizer="adamw", **kwargs) -> tuple[list[torch.Tensor], Engine | None]:
    """Two steps of two microbatches: (losses, gradients, parameters, optimizer's state, generator), and the engine."""
    torch.manual_seed(3)
    model = Model(dtype, **kwargs)
    engine = model.engine = None if strategy is None else engine_of(strategy)
    make = {"adamw": torch.optim.AdamW, "sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)}[optimizer]
    stepper = make(model.parameters(), lr=1e-2)
    left = []
    for step in range(2):
        if engine is None:
            left += iterate(model, stepper, step)
            continue
        with engine.iteration(2):
            left += iterate(model, stepper, step)
        assert not engine.flag().item(), engine.findings.settle()
    state = [value for each in stepper.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return [*left, *model.parameters(), *state, torch.get_rng_state()], engine


def iterate(model: Model, stepper: torch.optim.Optimizer, step: int) -> list[torch.Tensor]:
    stepper.zero_grad()
    losses, engine = [], model.engine
    for microbatch in range(2):
        tokens = (torch.arange(24).view(2, 12) * (3 + step) + microbatch) % 20
        if engine is None:
            loss = model(tokens)
            loss.backward()
        else:
            loss = engine.forward_step(lambda: model(tokens), 0, [], lambda made: made)  # noqa: B023
            engine.backward_step(loss.backward, loss, [])
        losses.append(loss.detach())
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if engine is not None:
        engine.before_update()
    stepper.step()
    return [*losses, *gradients, norm]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", [NAIVELY, PIGGYBACKED], ids=lambda s: s.name)
def test_everything_is_the_same_bit_for_bit(strategy, dtype, optimizer):
    expected, _ = train(None, dtype, optimizer)
    found, engine = train(strategy, dtype, optimizer)
    assert len(expected) == len(found) > 50
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    counts = engine.coverage()
    assert (counts.get(PIGGYBACK, 0) > 0) == (strategy.name == "piggyback")
    assert counts[NAIVE] > 0 and counts["unverified"] == 0


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("strategy", [NAIVELY, PIGGYBACKED], ids=lambda s: s.name)
def test_recomputation_that_is_not_reentrant(strategy, early_stop):
    kwargs = {"reentrant": False, "early_stop": early_stop}
    expected, _ = train(None, **kwargs)
    found, engine = train(strategy, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert (engine.coverage()["unverified"] > 0) == (early_stop and strategy.name == "piggyback")


def test_what_comes_before_an_early_stop_is_compared():
    found = findings_with(PIGGYBACKED, Flip(PRIMARY, "forward", "gelu"), reentrant=False)
    assert (found[0].at.operator, found[0].how) == ("gelu", RECOMPUTATION)


class Flip:
    """Flips one bit of the ``number``-th result of an operator in one phase."""

    def __init__(self, execution: str, phase: str, operator: str, number: int = 0):
        self._wanted, self._left = (execution, phase, operator), number

    def falsify(self, execution, operator, cursor, tensors):
        if (execution, cursor.unit.phase, operator) != self._wanted or not tensors[0].numel():
            return
        if self._left == 0:
            tensors[0].view(-1).view(torch.uint8)[1].bitwise_xor_(1)
        self._left -= 1


FLIPS = [
    (NAIVELY, PRIMARY, "forward", "embedding", AT_ONCE),
    (NAIVELY, CHECKER, "forward", "addmm", AT_ONCE),
    (NAIVELY, PRIMARY, "backward", "native_layer_norm_backward", AT_ONCE),
    (NAIVELY, PRIMARY, "optimizer", "addcdiv_", AT_ONCE),
    (PIGGYBACKED, PRIMARY, "forward", "native_layer_norm", RECOMPUTATION),
    (PIGGYBACKED, PRIMARY, "forward", "gelu", RECOMPUTATION),
    (PIGGYBACKED, CHECKER, "recompute", "addmm", RECOMPUTATION),
    (PIGGYBACKED, PRIMARY, "backward", "gelu_backward", AT_ONCE),
]


def findings_with(strategy, flip: Flip, **kwargs) -> list:
    """Of one step."""
    torch.manual_seed(3)
    model = Model(torch.float32, **kwargs)
    model.engine = engine = engine_of(strategy, flip)
    with engine.iteration(2):
        iterate(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), 0)
    assert engine.flag().item() == 1
    return engine.findings.settle()


@pytest.mark.parametrize("case", FLIPS, ids=lambda c: f"{c[0].name}-{c[1]}-{c[2]}-{c[3]}")
def test_one_flipped_bit_is_found_where_it_was(case):
    strategy, execution, phase, operator, how = case
    found = findings_with(strategy, Flip(execution, phase, operator))
    first = found[0]
    assert (first.at.operator, first.how) == (operator, how)
    assert first.at.phase == (phase if how == AT_ONCE else "forward")


def test_an_unchecked_operator_in_a_segment_makes_what_follows_naive():
    expected, _ = train(None)
    found, engine = train(Strategy("piggyback", ["gelu"]))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    counts = engine.coverage()
    assert counts[UNCHECKED] == 2 * 2 * 2  # blocks, microbatches, forward and recomputation
    _, whole = train(PIGGYBACKED)
    assert 0 < counts[PIGGYBACK] < whole.coverage()[PIGGYBACK]


def test_a_graph_that_is_kept_is_recomputed_twice():
    engine, block = engine_of(PIGGYBACKED), Block()
    with engine.iteration(1):
        x = torch.randn(4, 16, requires_grad=True)
        out = checkpoint(engine.recomputed(block), x, use_reentrant=False).sum()
        out.backward(retain_graph=True)
        once = x.grad.clone()
        out.backward()
    assert torch.equal(x.grad, 2 * once)
    assert not engine.flag().item(), engine.findings.settle()


def test_outside_of_an_iteration_nothing_is_watched():
    engine = engine_of(PIGGYBACKED)
    function = engine.recomputed(torch.exp)
    assert torch.equal(function(torch.ones(2)), torch.exp(torch.ones(2)))
    assert engine.coverage() == {"in windows": 0, "late": 0, "unverified": 0} | {
        name: 0 for name in engine.coverage() if name == "early"
    }


@pytest.mark.parametrize("left_out", [(), ("native_dropout",)])
def test_operators_that_are_not_in_the_plan_are_told_of_each_iteration(left_out):
    strategy = Searching("naive", left_out)
    _, engine = train(strategy)
    assert 2 * engine.coverage()["not in the plan"] == sum(strategy.misfits.values()) > 0
    assert "not in the plan" not in train(Strategy("naive", left_out))[1].coverage()


def coverage_of_steps(flags: str) -> tuple:
    import dmr_jobs

    job = dmr_jobs.assemble(flags)
    again, verifier = dmr_jobs.Again(job), dmr_jobs.protection(job, "naive")
    told, shares = [], []
    verifier._witness.coverage_fell = lambda *fell: told.append(fell)
    mode = verifier.engine.mode
    for left_out in ((), (), ("mm",), ("mm",), ()):
        mode._strategy = Strategy("naive", left_out or mode._strategy._unstable)
        again.step()
        shares.append(verifier.metrics()["dmr_coverage"])
    return told, shares


def test_the_coverage_is_that_of_the_rank_with_the_least_and_its_fall_is_told_once(ranks):
    import small_runs as runs

    flags = f"{runs.BASE} --mock-data --pipeline-model-parallel-size 2 --hidden-dropout 0.1"
    found = ranks(coverage_of_steps, 2, flags)
    assert found[0][1] == found[1][1]
    for told, shares in found:
        assert shares[:2] == [1.0, 1.0] and 0.5 < shares[2] == shares[3] < 1.0
        [(step, before, now, counts)] = told
        assert (step, before, now) == (1, 1.0, shares[2]) and counts["unchecked"]
        assert 1.0 - counts["unchecked"] / (counts["naive"] + counts["unchecked"]) >= now - 1e-6
