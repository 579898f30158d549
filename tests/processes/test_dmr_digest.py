"""The digest: one value from C and plain torch, of every dtype, layout and length."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dmr_tensors import DTYPES, LENGTHS, anything, from_eager

from ft.base.errors import UserError
from ft.systems.dmr.digest import _backend, backend, definition, differing, digest, digest_many, native, same

ROOT = Path(__file__).parent.parent.parent
VECTORS = [  # digests cross versions and machines: they have to stay what they are
    [-8165034748379291751, -7539282453413473298],
    [-758086880920824568, 957760785999190655],
    [7071905051348975773, -583924113606978914],
    [-7895118161811418199, 265649314351295814],
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The installed C library, or one built for the tests from the same recipe."""
    if backend("cpu") == "native":
        return native.library()
    if not shutil.which(os.environ.get("CC", "cc")):
        pytest.skip("there is no C compiler")
    return native.load(built(tmp_path_factory.mktemp("native")))


def built(folder: Path, **environment: str) -> Path | None:
    """The library, built into ``folder`` by setup.py; None where it found that it could not."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder)]
    subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, check=True, capture_output=True, text=True, timeout=180
    )
    return next(folder.rglob("_native*.so"), None)


def spelt_out(tensor: torch.Tensor, seed: int) -> list[int]:
    """The digest from its definition, in Python's integers."""
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    draw = hashlib.shake_256(b"megatron-ft digest keys" + seed.to_bytes(16, "little")).digest(4 * 2 * 4096 * 8)
    key = [int.from_bytes(draw[i : i + 8], "little") for i in range(0, len(draw), 8)]
    head = hashlib.shake_256(b"megatron-ft digest head" + seed.to_bytes(16, "little")).digest(2 * 130 * 8)
    level = 0
    while True:
        data += bytes(-len(data) % 4)
        words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
        numbers = [
            sum(key[(2 * level + c) * 4096 + i] * word for i, word in enumerate(words[first : first + 4096])) % 2**64
            for first in range(0, max(1, len(words)), 4096)
            for c in (0, 1)
        ]
        if len(numbers) == 2:
            break
        data, level = b"".join(number.to_bytes(8, "little") for number in numbers), level + 1
    code = definition.DTYPES.index(str(tensor.dtype).removeprefix("torch."))
    heads = [code, tensor.dim(), *(half for size in tensor.shape for half in (size % 2**32, size >> 32))]
    for c in (0, 1):
        drawn = [int.from_bytes(head[(130 * c + i) * 8 :][:8], "little") for i in range(len(heads))]
        numbers[c] += sum(k * word for k, word in zip(drawn, heads, strict=True))
    return [(number + 2**63) % 2**64 - 2**63 for number in numbers]


def from_native(tensor: torch.Tensor, seed: int, library, **options) -> list[int]:
    out = torch.empty(2, dtype=torch.int64)
    native.digest(tensor, seed, out, using=library, **options)
    return out.tolist()


def test_its_values_are_what_they_always_were():
    ramp = torch.arange(10000, dtype=torch.float32).reshape(100, 100)
    assert digest(torch.zeros(0), 0).tolist() == VECTORS[0]
    assert digest(torch.tensor(-1, dtype=torch.int8), 1).tolist() == VECTORS[1]
    assert digest(ramp, 2**128 - 1).tolist() == VECTORS[2]
    assert digest(ramp.bfloat16(), 7).tolist() == VECTORS[3]


@pytest.mark.parametrize("length", [0, 1, 3, 4096, 4097, 20000])
def test_plain_torch_computes_the_definition(length):
    for dtype in (torch.int8, torch.float32):
        tensor = anything(length, dtype, seed=length)
        assert from_eager(tensor, 11) == spelt_out(tensor, 11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c_and_plain_torch_give_one_value_for_every_dtype_and_length(dtype, library):
    for length in LENGTHS:
        tensor = anything(length, dtype, seed=length)
        assert from_native(tensor, 3, library) == from_eager(tensor, 3), length


@pytest.mark.parametrize("width", [0, 2, 512])
def test_neither_the_instructions_nor_the_threads_change_the_value(width, library):
    if width > library.width:
        pytest.skip("this processor does not have them")
    for length in (5, 33, 4097, 5 * 4096 + 7, 2**21 + 12345, 2**22 + 4097):
        tensor = anything(length, torch.int32, seed=length)
        expected = from_eager(tensor, 9)
        for threads in (1, 2, 3, 7):
            assert from_native(tensor, 9, library, width=width, threads=threads) == expected, (length, threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_strides_do_not_matter(dtype):
    tensor = anything(7 * 50 * 33, dtype).reshape(7, 50, 33)
    for view in (
        tensor.transpose(0, 2),
        tensor[:, ::3],
        tensor[2:, 1:, 5:],
        tensor.flip(1)[..., 1],
        tensor[:1].expand(4, -1, -1),
    ):
        assert torch.equal(digest(view, 1), digest(view.contiguous().clone(), 1))
        assert from_eager(view, 1) == digest(view, 1).tolist()


def test_bytes_that_do_not_lie_on_a_word_are_read():
    octets = anything(40000, torch.uint8)
    for offset in range(1, 8):
        for tensor in (octets[offset:], octets[offset:-3], octets[2 * offset : 4002].view(torch.bfloat16)):
            assert digest(tensor, 1).tolist() == digest(tensor.clone(), 1).tolist() == from_eager(tensor, 1)


def test_conjugated_and_negated_views_have_the_bits_that_one_reads():
    tensor = torch.randn(100, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    for view in (tensor.conj(), tensor.conj().imag):
        assert torch.equal(digest(view, 0), digest(view.clone().resolve_conj().resolve_neg(), 0))
        assert same(view, view.clone())


def test_shape_dtype_order_and_seed_count():
    tensor = torch.arange(24, dtype=torch.float32)
    others = [
        tensor.reshape(24, 1),
        tensor.reshape(1, 24),
        tensor.reshape(4, 6),
        tensor.reshape(6, 4),
        tensor.view(torch.int32),
        tensor.flip(0),
        torch.cat((tensor, torch.zeros(1))),
        tensor[:-1],
    ]
    empty = [torch.zeros(0), torch.zeros(0, 1), torch.zeros(1, 0), torch.zeros(0, dtype=torch.int8), torch.zeros(())]
    values = [tuple(digest(other, 0).tolist()) for other in [tensor, *others, *empty]]
    values += [tuple(digest(tensor, seed).tolist()) for seed in (1, 2**64, 2**128 - 1)]
    assert len(set(values)) == len(values)


def test_digest_many_gives_a_row_per_tensor():
    tensors = [torch.zeros(()), torch.randn(3, 5000), torch.ones(0, 4), torch.ones(9, dtype=torch.bool)]
    rows = digest_many(tensors, 12)
    assert rows.dtype == torch.int64
    assert rows.shape == (4, 2)
    assert all(torch.equal(row, digest(tensor, 12)) for row, tensor in zip(rows, tensors, strict=True))
    assert digest_many([], 12).shape == (0, 2)


def test_gradients_are_not_recorded():
    tensor = torch.randn(5, requires_grad=True)
    assert not digest(tensor, 0).requires_grad
    assert not digest(tensor * 2, 0).requires_grad
    assert same(tensor, tensor)


@pytest.mark.parametrize("seed", [-1, 2**128])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(UserError, match="seed"):
        digest(torch.zeros(1), seed)


def test_tensors_without_plain_memory_are_refused():
    quantised = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)
    for tensor in (torch.zeros(3).to_sparse(), torch.zeros(3, device="meta"), quantised):
        with pytest.raises(UserError, match="dense"):
            digest(tensor, 0)
        with pytest.raises(UserError, match="dense"):
            same(tensor, tensor)


def test_compare_looks_at_bits():
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.zeros(2)
    assert same(nan, nan.clone())
    assert not same(zero, -zero)
    assert not same(zero, zero.view(1, 2))
    assert not same(zero, zero.int())
    assert same(torch.zeros(0), torch.zeros(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compare_and_differing_agree_with_the_digest(dtype):
    tensor = anything(1001, dtype)
    other = tensor.clone()
    octets = other.view(torch.uint8)
    octets[-1] ^= 1
    octets[0] ^= 1
    assert same(tensor, tensor.clone())
    assert not same(tensor, other)
    assert differing(tensor, tensor) == 0
    assert differing(tensor, other) == 2
    assert not torch.equal(digest(tensor, 0), digest(other, 0))
    assert definition.integers(tensor).numel() == 1001 * (2 if dtype.is_complex else 1)


def test_without_a_compiler_the_installation_goes_on(tmp_path):
    assert built(tmp_path, CC=str(tmp_path / "no-compiler")) is None


def says_otherwise(tensor, seed, out):
    out.fill_(seed)


def cannot(tensor, seed, out):
    raise RuntimeError("no compiler found")


@pytest.mark.parametrize(("fast", "fault"), [(says_otherwise, "another digest"), (cannot, "no compiler found")])
def test_a_fast_backend_that_fails_its_trial_is_not_used(fast, fault, monkeypatch, capsys):
    monkeypatch.setattr("ft.systems.dmr.digest._fast", lambda device_type: fast)
    _backend.cache_clear()
    try:
        assert backend("cpu") == "eager"
        assert digest(torch.zeros(0), 0).tolist() == VECTORS[0]
        assert capsys.readouterr().err.count(fault) == 1
    finally:
        _backend.cache_clear()


def test_without_the_library_digests_are_the_same_and_that_is_said_once(tmp_path):
    shutil.copytree(ROOT / "ft", tmp_path / "ft", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    program = """
import torch
from ft.systems.dmr.digest import _backend, backend, digest
assert backend("cpu") == "eager"
for seed in range(3):
    digest(torch.arange(9000), seed)
print(digest(torch.arange(9000), 5).tolist())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == str(digest(torch.arange(9000), 5).tolist())
    assert done.stderr.count("plain torch computes the same") == 1
