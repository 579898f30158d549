"""DMR on the model of CUDA: second executions, digests and the rollback copy are ordered after what they read, and
before what changes it, also where training uses several streams."""

import random

import pytest
import torch
from cuda_model import Cuda, NcclWork, Race
from test_devices_snapshot import fails
from test_devices_snapshot import late as late
from torch.utils._python_dispatch import _disable_current_modes

from ft.protection.undo import Undo
from ft.state.snapshot.state import OWNED, REPLICATED
from ft.systems.dmr.digest import definition, eager
from ft.systems.dmr.plan.trace import D_INTER, NAIVE
from ft.systems.dmr.runtime import findings
from ft.systems.dmr.runtime.cursor import ExecutionCursor
from ft.systems.dmr.runtime.engine import Engine
from ft.systems.dmr.runtime.findings import Findings
from ft.systems.dmr.runtime.mode import PRIMARY, DoubleExecutionMode
from ft.systems.dmr.runtime.queue import Queue
from ft.systems.dmr.runtime.strategy import CheckMethod, PlannedSegment, Strategy

SIZE = 6


class AnyWindow(Strategy):
    """Draws for each operator when it is verified. All are in the plan, with ``replayed`` of them in AGC segments."""

    def __init__(self, draw: random.Random):
        super().__init__("naive")
        self._draw, self._ordinal = draw, 0
        self.replays = {name: PlannedSegment(draw.randint(1, 4), draw.randint(0, 60)) for name in "abcdef"}
        self._left = [(name, segment.size) for name, segment in self.replays.items()]
        self._open: list[str] = []

    def decide(self, unit, index, operator, in_segment) -> CheckMethod:
        self._ordinal += 1
        if not self._open and self._left and self._draw.random() < 0.2:
            name, size = self._left.pop()
            self._open = [name] * size
        if self._open:
            return CheckMethod(D_INTER, 0, self._open.pop(), ordinal=self._ordinal)
        due = self._ordinal + self._draw.randint(0, 30)
        return self._draw.choice(
            (
                CheckMethod(NAIVE, ordinal=self._ordinal),
                CheckMethod(D_INTER, due, ordinal=self._ordinal),
                CheckMethod(D_INTER, None, check_us=1.0, ordinal=self._ordinal),
            )
        )


class FlipOne:
    """Falsifies the first execution of operator number ``at``."""

    def __init__(self, at: int):
        self._left = at

    def falsify(self, execution, operator, cursor, tensors) -> None:
        if execution == PRIMARY:
            self._left -= 1
            if self._left == 0:
                tensors[0].mul_(3).add_(1)


class Subject:
    """A rank's state for the rollback copy: weights and the optimizer's moments."""

    envelope, blobs = {}, {}

    def __init__(self, cuda: Cuda):
        self.weights = [cuda.tensor(torch.randn(SIZE, SIZE)) for _ in range(3)]
        self.moments = [cuda.tensor(torch.zeros(SIZE, SIZE)) for _ in range(3)]

    def state(self, position) -> "Subject":
        return self

    def sections(self):
        return {
            OWNED: {str(at): tensor for at, tensor in enumerate(self.moments)},
            REPLICATED: {str(at): tensor for at, tensor in enumerate(self.weights)},
        }

    def abandon_step(self) -> None: ...

    def apply(self, meta) -> None: ...

    publish_parameters = abandon_step


class Position:
    get = set = staticmethod(lambda *_: {})


class Rank:
    """A rank with DMR whose layers use two streams, as core's shared experts do (``--moe-shared-expert-overlap``,
    megatron/core/transformer/moe/shared_experts.py): one for the shared expert, while tokens are exchanged."""

    def __init__(self, cuda: Cuda, draw: random.Random, flip: int | None):
        self.cuda, self.draw = cuda, draw
        self.side, self.nccl = torch.cuda.Stream(), torch.cuda.Stream()
        self.subject = Subject(cuda)
        self.undo = Undo(self.subject, Position())
        strategy, cursor, found = AnyWindow(draw), ExecutionCursor(), Findings(cuda.device, 7)
        queue = Queue(found, strategy.replays, headroom=draw.choice((0.0, 500.0, 1e9)))
        mode = DoubleExecutionMode(cursor, strategy, found, queue, disturbance=None if flip is None else FlipOne(flip))
        self.engine = Engine(cursor, found, queue, mode)

    def all_reduce(self, tensor) -> NcclWork:
        """Double the values in place, as a sum over two equal ranks; the dispatcher announces it (c10d.allreduce_)."""
        with _disable_current_modes():
            self.engine.queue.before_change([tensor])

        def doubled() -> None:
            self.cuda.queue("all_reduce", [tensor], [tensor], lambda: tensor.inner.mul_(2))

        return NcclWork(self.cuda, self.nccl, doubled)

    def layer(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        main, hidden = torch.cuda.current_stream(), (x @ weight).relu()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            shared = (hidden * 0.5).tanh()
            if self.draw.random() < 0.5:
                hidden_too = shared + hidden
                hidden_too.add_(1)
        sent = hidden + 1
        work = self.all_reduce(sent)
        if self.draw.random() < 0.7:
            polls = iter(range(self.draw.randint(0, 9)))
            self.engine.dynamic_window(lambda: next(polls, None) is None)
        else:
            self.engine.window("tp")
        work.wait()
        main.wait_stream(self.side)
        return (sent + shared) * 0.3

    def step(self) -> int:
        """Train one step; return the flag that all ranks would exchange."""
        copied_at = self.draw.randint(0, 2)
        self.undo.begin()
        with torch.no_grad(), self.engine.iteration(1):
            x = self.subject.weights[0] * 0.1
            for number, weight in enumerate(self.subject.weights):
                if number == copied_at:
                    self._copier_runs()
                x = self.layer(x, weight)
            gradient = x.t() @ x
            work = self.all_reduce(gradient)
            self.engine.window("dp")
            work.wait()
            self.engine.before_update()
        flag = int(self.engine.flag().item())
        assert not flag or self.engine.settle(), "the ranks were told of a mismatch that nobody has found"
        self.undo.wait()
        for weight, moment in zip(self.subject.weights, self.subject.moments, strict=True):
            moment.mul_(0.9).add_(gradient)
            weight.sub_(moment * 1e-3)
        return flag

    def _copier_runs(self) -> None:
        self.undo._own._copier._jobs.put(None)
        with self.cuda.thread(), _disable_current_modes():
            self.undo._own._copier._run()

    def values(self) -> list[torch.Tensor]:
        return [tensor.cpu().clone() for tensor in (*self.subject.weights, *self.subject.moments)]


@pytest.fixture(autouse=True)
def on_the_model(late, monkeypatch):
    """Operators on the model's GPU go through Python's dispatch, so that DMR's own ones may leave out the modes only.
    Keys of an earlier model are not on this one's GPU."""
    monkeypatch.setattr(Engine, "unwatched", lambda self: _disable_current_modes())
    monkeypatch.setattr(findings, "writer", lambda device: eager.digest)


def train(seed: int, without: str | None = None, flip: int | None = None) -> Cuda:
    """Train two steps, roll the second back and train it again."""
    definition.keys.cache_clear()
    draw = random.Random(seed)
    torch.manual_seed(seed)
    try:
        with Cuda(seed, without=without) as cuda:
            rank = Rank(cuda, draw, flip)
            flags = [rank.step()]
            before = rank.values() if seed % 2 else None  # reading them makes the host wait
            flags.append(rank.step())
            rank.undo.roll_back()
            assert not before or all(map(torch.equal, before, rank.values())), "the rollback restored another state"
            flags.append(rank.step())
            assert flags == [int(flip is not None), 0, 0], f"flags of three steps: {flags}"
            assert not cuda.foreign, cuda.foreign
    finally:
        definition.keys.cache_clear()
    return cuda


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(1000, 3000), marks=pytest.mark.long)], ids=str)
def test_second_executions_digests_and_the_rollback_copy_race_with_nothing(seeds):
    for seed in seeds:
        print("seed", seed)
        train(seed)


@pytest.mark.parametrize("flip", [1, 5, 9])
def test_a_flip_is_found_on_the_model_whenever_its_operator_is_verified(flip):
    for seed in range(2):
        train(seed, flip=flip)


@pytest.mark.parametrize("without", ["joined", "Copier._queue_on_device"])
def test_every_wait_is_needed_and_the_model_sees_that_it_is_missing(without):
    assert any(fails(train, seed, without, how=Race) for seed in range(12))
