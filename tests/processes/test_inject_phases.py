"""Faults inside forward and backward happen in the middle of them."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ft.base.errors import RecoverableError
from ft.faults import Fault
from ft.faults.worker import Injector
from ft.protection.injection import middle_module, plant


class Layer(nn.Module):
    """A layer as megatron-core's: its output is a tuple; it notes when it computes."""

    def __init__(self, name: int, diary: list):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._name, self._diary = name, diary

    def forward(self, x):
        self._diary.append(f"forward {self._name}")
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: self._diary.append(f"backward {self._name}"))
        return y, None


class Chunk(nn.Module):
    def __init__(self, layers: int, diary: list, recompute: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, diary) for i in range(layers))
        self._recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x, _ = checkpoint(layer, x, use_reentrant=True) if self._recompute else layer(x)
        return x


def build(fault: Fault, recompute: bool = False):
    diary: list = []
    chunk = Chunk(4, diary, recompute)
    injector = Injector([fault], 0, "n0", [], lambda f: diary.append("fault"), None)
    return chunk, injector, diary


def train(chunk: nn.Module) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    chunk(x).sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_fault_is_in_the_middle_of_its_phase_of_its_step(phase, recompute):
    chunk, injector, diary = build(Fault(1, "exception", step=2, rank=0, phase=phase), recompute)
    step = 1
    remove = plant(injector, [chunk], lambda: step)
    train(chunk)
    assert "fault" not in diary
    step = 2
    diary.clear()
    with pytest.raises(RecoverableError, match="injected fault 1"):
        train(chunk)
    at = diary.index("fault")
    assert at == len(diary) - 1
    forward, backward = ([e for e in diary if e.startswith(word)] for word in ("forward", "backward"))
    if phase == "forward":
        assert forward == ["forward 0", "forward 1"]
        assert backward == []
    else:
        assert forward[:4] == [f"forward {i}" for i in range(4)]
        assert backward[:1] == ["backward 3"]
        assert "backward 1" not in backward
    diary.clear()
    train(chunk)
    assert "fault" not in diary
    remove()
    assert not _hooks(chunk)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_evaluation_is_no_phase_of_a_step(phase):
    chunk, injector, diary = build(Fault(1, "exception", step=2, rank=0, phase=phase))
    plant(injector, [chunk], lambda: 2)
    chunk.eval()
    with torch.no_grad():
        chunk(torch.ones(2, 4))
    assert "fault" not in diary


@pytest.mark.parametrize("phase", ["reduce", "between", "optimizer"])
def test_without_a_fault_in_these_phases_nothing_is_installed(phase):
    chunk, injector, _ = build(Fault(1, "exception", step=2, rank=0, phase=phase))
    plant(injector, [chunk], lambda: 2)
    assert not _hooks(chunk)


def test_of_several_chunks_the_middle_one_is_chosen():
    chunks = [Chunk(2, []) for _ in range(3)]
    injector = Injector([Fault(1, "kill", step=2, rank=0, phase="forward")], 0, "n0", [], print, None)
    plant(injector, chunks, lambda: 1)
    assert [bool(_hooks(chunk)) for chunk in chunks] == [False, True, False]


def test_the_middle_of_models_of_all_sorts():
    chunk = Chunk(5, [])
    assert middle_module(chunk) is chunk.layers[2]
    linear = nn.Linear(2, 2)
    assert middle_module(linear) is linear
    assert isinstance(middle_module(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))), nn.ReLU)
    bilinear = nn.Module()
    bilinear.a, bilinear.b = nn.Linear(2, 2), nn.Linear(3, 3)
    assert middle_module(bilinear) is bilinear.b


def _hooks(chunk: nn.Module) -> list:
    return [m for m in chunk.modules() if m._forward_hooks or m._forward_pre_hooks]
