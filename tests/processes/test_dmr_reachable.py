"""Everything that a call can change is found and put back."""

import functools
import weakref
from collections import deque
from dataclasses import dataclass

import pytest
import torch

from ft.base.errors import UserError
from ft.systems.dmr.runtime import opaque
from ft.systems.dmr.runtime.opaque import Reachable


@dataclass(slots=True)
class Arguments:
    weight: torch.Tensor
    count: int = 0


class Parts(torch.Tensor):
    """A tensor without memory of its own, as quantised ones are."""

    @staticmethod
    def __new__(cls, data, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        made.data_part, made.scale = data, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


class Global:
    history = torch.zeros(3)
    count = 0


def test_tensors_are_found_by_their_paths():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.main_grad, weight.main_param, weight.note = torch.zeros(2), torch.zeros(2), [torch.zeros(2)]
    layer = torch.nn.Linear(2, 2)
    whole_model, inner = torch.zeros(9), torch.ones(5)
    layer.register_forward_hook(lambda *_: whole_model)
    found = Reachable(
        {
            "args": [Arguments(weight), Parts(torch.zeros(4), torch.ones(1)), {"k": (torch.ones(3),)}, layer],
            "made": functools.partial(lambda a: inner, weakref.ref(weight)),
            "Global": Global,
        }
    ).tensors
    assert set(found) == {
        *("args[0].weight", "args[0].weight.main_grad", "args[1].data_part", "args[1].scale", "args[2]['k'][0]"),
        *("args[3]._parameters['weight']", "args[3]._parameters['bias']", "made.inner", "Global.history"),
    }


def test_contents_memory_and_attributes_are_put_back():
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    freed, cleared = torch.ones(4), torch.full((3,), 7.0)
    history, recent, cache, names = [1, 2], deque([1], maxlen=2), {"a": 1}, {"x"}
    given = Arguments(weight)
    roots = {"all": [given, freed, cleared, history, recent, cache, names], "Global": Global}
    before = Reachable(roots)
    copies = before.copies(before.tensors)
    saved = weight * 1.0  # autograd notes the version of ``weight``
    weight.data.mul_(3)
    weight.flag = True
    freed.untyped_storage().resize_(0)
    cleared.data = torch.empty(0)
    history.append(3), recent.append(5), cache.update(b=2), names.add("y")
    given.count, Global.count = 4, 9
    Global.history.add_(1)
    assert before.contents("all[1]").numel() == 0
    before.put_back(copies)
    assert torch.equal(weight, torch.arange(6.0).reshape(2, 3).t()) and not hasattr(weight, "flag")
    assert freed.tolist() == [1.0] * 4 and cleared.tolist() == [7.0] * 3
    assert (history, list(recent), cache, names) == ([1, 2], [1], {"a": 1}, {"x"})
    assert given.count == 0 == Global.count and Global.history.tolist() == [0.0] * 3
    saved.sum().backward()


def test_what_was_known_before_is_not_listed_again():
    old, new = torch.ones(1), torch.ones(1)
    before = Reachable({"args": [old]})
    assert set(Reachable({"result": (new, old)}, known=before).tensors) == {"result[0]"}


def test_a_call_that_reaches_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(opaque, "_MOST", 100)
    with pytest.raises(UserError, match="over 100 objects"):
        Reachable({"args": [[number] for number in range(200)]})
