"""What DMR knows of an operator, and second executions of those that write in place."""

import pytest
import torch

from ft.systems.dmr.digest import same
from ft.systems.dmr.runtime.operators import (
    call_of,
    check_in_place,
    execute_again,
    expected,
    is_verified_by_inspection,
    properties_of,
    results,
    state_before,
    tensors_in,
    written,
)

aten = torch.ops.aten


def overloads():
    """Every operator of torch's own."""
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        try:
            if name.startswith("aten::"):
                yield getattr(getattr(aten, base), overload or "default")
        except (AttributeError, RuntimeError):  # those of TorchScript alone
            continue


def test_every_operator_of_torch_has_a_nature():
    natures = [(func, properties_of(func)) for func in overloads()]
    assert len(natures) > 2000
    for func, kind in natures:
        draws = any("Generator" in str(argument.type) for argument in func._schema.arguments)
        assert not draws or kind.random or not kind.executes, kind
        if kind.functional is not None:
            assert not properties_of(kind.functional).written, kind
        for position, name in kind.written:
            assert position is None or func._schema.arguments[position].name == name


def normal(*size: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(7)).to(dtype)


def _transposed():
    return normal(6, 4).t()


def _aliased():
    x = normal(9)
    return (x,), {"out": x}


def _drawn(**kwargs):
    return (normal(64), 0.3), kwargs


IN_PLACE = {
    "functional": (aten.add_.Tensor, lambda: ((normal(5, 3), normal(5, 3)), {"alpha": 2})),
    "broadcast": (aten.mul_.Tensor, lambda: ((normal(5, 3), normal(3)), {})),
    "of another type": (aten.add_.Tensor, lambda: ((normal(5, dtype=torch.bfloat16), normal(5)), {})),
    "comparison": (aten.eq_.Tensor, lambda: ((normal(5), normal(5)), {})),
    "transposed": (aten.add_.Tensor, lambda: ((_transposed(), normal(4, 6)), {})),
    "every second": (aten.mul_.Scalar, lambda: ((normal(8, 6)[::2, 1::2], 3.0), {})),
    "part of a buffer": (aten.addcmul_.default, lambda: ((normal(40)[8:20], normal(12), normal(12)), {"value": 0.5})),
    "reads itself": (aten.addmm_.default, lambda: ((normal(4, 4), *[normal(4, 4)] * 2), {})),
    "lerp": (aten.lerp_.Scalar, lambda: ((normal(7), normal(7) + 1, 0.1), {})),
    "foreach": (aten._foreach_add_.List, lambda: (([normal(3), normal(2, 2)], [normal(3), normal(2, 2)]), {})),
    "foreach, strided": (aten._foreach_mul_.Scalar, lambda: (([_transposed(), normal(9)[::3]], 0.5), {})),
    "index_put": (
        aten.index_put_.default,
        lambda: ((normal(6), [torch.tensor([1, 1, 4])], normal(3), True), {}),
    ),
    "scatter_add": (aten.scatter_add_.default, lambda: ((normal(6), 0, torch.tensor([1, 1, 4]), normal(3)), {})),
    "masked_fill": (aten.masked_fill_.Scalar, lambda: ((normal(6), normal(6) > 0, 9.0), {})),
    "out=": (aten.exp.out, lambda: ((normal(9),), {"out": torch.empty(9)})),
    "out= of another size": (aten.exp.out, lambda: ((normal(9),), {"out": torch.empty(0)})),
    "two outs": (aten.max.dim_max, lambda: ((normal(4, 3), 1), {"max": torch.empty(4), "max_values": _numbers(4)})),
    "aliased": (aten.exp.out, _aliased),
    "drawn": (aten.bernoulli_.float, _drawn),
    "drawn, strided": (aten.normal_.default, lambda: ((_transposed(),), {})),
    "drawn from a generator": (aten.bernoulli_.float, lambda: _drawn(generator=_own)),
    "empty": (aten.add_.Tensor, lambda: ((torch.empty(0), torch.empty(0)), {})),
    "one number": (aten.add_.Tensor, lambda: ((torch.tensor(2.0), torch.tensor(3.0)), {})),
    "not a number": (aten.div_.Tensor, lambda: ((torch.zeros(5), torch.zeros(5)), {})),
    "whole numbers": (aten.add_.Scalar, lambda: ((_numbers(4), 3), {})),
    "loss scale": (
        aten._amp_update_scale_.default,
        lambda: ((torch.tensor(8.0), torch.tensor(1, dtype=torch.int32), torch.tensor(0.0), 2.0, 0.5, 2), {}),
    ),
}
_own = torch.Generator().manual_seed(5)


def _numbers(size: int) -> torch.Tensor:
    return torch.arange(size)


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_is_known_before(name):
    func, given_to = IN_PLACE[name]
    args, kwargs = given_to()
    call = call_of(func, args, kwargs)
    assert call.kind.executes and call.kind.written
    given = [tensor.clone() for tensor in tensors_in((args, kwargs))]
    generators = [torch.get_rng_state(), _own.get_state()]
    again = check_in_place(call)
    assert all(same(a, b) for a, b in zip(given, tensors_in((args, kwargs)), strict=True))
    assert all(map(torch.equal, generators, [torch.get_rng_state(), _own.get_state()]))
    func(*args, **kwargs)
    ours = tensors_in(written(call))
    assert len(ours) == len(again) > 0
    assert all(same(a, b) for a, b in zip(ours, again, strict=True))


def test_a_wrong_result_in_place_is_seen():
    x = normal(8)
    again = check_in_place(call_of(aten.mul_.Scalar, (x, 2.0)))
    x.mul_(2.0)
    x.view(torch.int32)[3] ^= 1
    assert not same(x, again[0])


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("offset", [0, 1])
def test_zeroes_are_verified_by_looking(size, dtype, offset):
    assert is_verified_by_inspection(call_of(aten.zero_.default, (torch.ones(1),)))
    x = torch.ones(size + offset, dtype=dtype)[offset:]
    x.zero_()
    call = call_of(aten.zero_.default, (x,))
    assert same(*expected(call))
    if size:
        x[-1] = 1
        assert not same(*expected(call))


def test_a_zero_of_the_wrong_sign_is_seen():
    x = torch.zeros(4, 3).t()
    x[1, 2] = -0.0
    assert not same(*expected(call_of(aten.zero_.default, (x,))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_copies_are_verified_by_looking(dtype):
    target, source = torch.empty(4, 6, dtype=dtype).t(), normal(4)
    for call in (
        call_of(aten.copy_.default, (target, source)),
        call_of(aten.copy_.default, (target,), {"src": source}),
    ):
        assert is_verified_by_inspection(call)
        aten.copy_(*call.args, **call.kwargs)
        assert same(*expected(call))
    target[2, 1] += 1
    assert not same(*expected(call))


def test_a_drawn_result_is_drawn_again():
    for generator in (None, _own):
        kwargs = {} if generator is None else {"generator": generator}
        call = call_of(aten.bernoulli.default, (torch.full((200,), 0.5),), kwargs)
        state = state_before(call)
        out = aten.bernoulli(*call.args, **kwargs)
        now = state_before(call)
        assert same(out, execute_again(call, state))
        assert torch.equal(now, state_before(call))
        assert not same(out, aten.bernoulli(*call.args, **kwargs))


def test_the_generator_comes_back_after_an_error():
    before = torch.get_rng_state()
    state = torch.Generator().manual_seed(3).get_state()
    with pytest.raises(RuntimeError):
        execute_again(call_of(aten.bernoulli.default, (torch.full((2,), 7.0),)), state)
    assert torch.equal(before, torch.get_rng_state())


def test_results_are_what_was_returned_or_else_written():
    x = normal(3)
    assert results(call_of(aten.exp.default, (x,)), x.exp())[0].shape == x.shape
    lists = [normal(3), normal(2)]
    assert results(call_of(aten._foreach_mul_.Scalar, (lists, 2.0)), None) == lists
    attention = call_of(aten._scaled_dot_product_flash_attention.default, (x, x, x))
    assert results(attention, (x, x, None, None, 3, 3, normal(2), normal(1))) == [x, x], "only dropout writes the rest"
