"""The digest: one value from C, plain torch and Triton, of every dtype, layout and length; every flip of bits changes
it, and what the proof says holds on small cases."""

import hashlib
import importlib.util
import itertools
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dmr_tensors import DTYPES, LENGTHS, anything, from_eager
from hypothesis import given, settings
from hypothesis import strategies as st
from pythons import ROOT, python

from ft.systems.dmr.digest import _backend, backend, definition, differing, digest, native, same
from ft.systems.dmr.digest.definition import WORDS

TRITON = importlib.util.find_spec("triton") is not None
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


def test_gradients_are_not_recorded():
    tensor = torch.randn(5, requires_grad=True)
    assert not digest(tensor, 0).requires_grad
    assert not digest(tensor * 2, 0).requires_grad
    assert same(tensor, tensor)


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
    done = python("-c", program, folder=tmp_path, PYTHONPATH="")
    assert done.stdout.strip() == str(digest(torch.arange(9000), 5).tolist())
    assert done.stderr.count("plain torch computes the same") == 1


def flipped(tensor: torch.Tensor, places: list[tuple[int, int]]) -> torch.Tensor:
    """A copy with the given (byte, bit) places flipped."""
    other = tensor.clone()
    octets = other.view(torch.uint8)
    for byte, bit in places:
        octets[byte] ^= 1 << bit
    return other


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_digest_differs_exactly_where_the_bits_do(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    length = data.draw(st.sampled_from([1, 2, 9, 100, WORDS - 1, WORDS, 2 * WORDS + 1]))
    tensor = anything(length, dtype, data.draw(st.integers(0, 99)))
    byte = st.integers(0, length * dtype.itemsize - 1)
    places = data.draw(st.lists(st.tuples(byte, st.integers(0, 0 if dtype == torch.bool else 7)), max_size=64))
    other = flipped(tensor, places)
    seed = data.draw(st.integers(0, 3) | st.just(2**127))
    alike = all(places.count(place) % 2 == 0 for place in places)
    assert same(tensor, other) == alike
    assert bool((digest(tensor, seed) == digest(other, seed)).any()) == alike
    assert bool((digest(tensor, seed) == digest(other, seed)).all()) == alike


def of_two_flips(chance: random.Random):
    """Equal flips at two places, which an XOR of all words misses."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor, width = anything(3 * WORDS, dtype, 2), dtype.itemsize
        mine = digest(tensor, 1)
        for _ in range(1000):
            places, inside, bit = chance.sample(range(3 * WORDS), 2), chance.randrange(width), chance.randrange(8)
            yield mine, flipped(tensor, [(place * width + inside, bit) for place in places])


def of_swaps(chance: random.Random):
    """Swapped elements and blocks, which a sum of all words misses, or of all digests of blocks."""
    tensor = anything(8 * WORDS, torch.int32, 4)
    mine = digest(tensor, 1)
    for unit in (1, 2, 64, WORDS):
        for _ in range(200 if unit < WORDS else 28):
            first, second = chance.sample(range(8 * WORDS // unit), 2)
            other = tensor.clone().view(-1, unit)
            other[[first, second]] = other[[second, first]]
            yield mine, other.view(-1)


def of_differences(_chance: random.Random):
    """Plus and minus the same at two places, which a sum misses, too."""
    tensor = anything(2 * WORDS, torch.int32, 6)
    mine = digest(tensor, 1)
    for distance, amount in itertools.product((1, 2, 4, 1024, WORDS - 1, WORDS), (1, 2**16, 2**30)):
        other = tensor.clone()
        other[0] += amount
        other[distance] -= amount
        yield mine, other


@pytest.mark.parametrize("changes", [of_two_flips, of_swaps, of_differences])
def test_what_simpler_sums_of_words_miss_is_seen_in_both_columns(changes):
    for mine, other in changes(random.Random(3)):
        assert (digest(other, 1) != mine).all()


def executed(program: str, **environ: str) -> None:
    done = python("-c", program, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]), **environ)
    assert done.returncode == 0, done.stderr


needs_triton = pytest.mark.skipif(not TRITON, reason="Triton is not installed (it comes with builds of torch for CUDA)")


@needs_triton
def test_the_triton_kernel_gives_the_same_value_in_its_interpreter():
    program = """
import sys, torch
sys.path.insert(0, "tests/helpers")
import dmr_tensors as here
from ft.systems.dmr.digest import kernel
kernel._FEW_BLOCKS = 3
for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.float64):
    for length in (0, 1, 3, 4096, 4097, 30001):
        tensor, out = here.anything(length, dtype, seed=length), torch.empty(2, dtype=torch.int64)
        kernel.digest(tensor, 4, out)
        assert out.tolist() == here.from_eager(tensor, 4), (dtype, length)
"""
    executed(program, TRITON_INTERPRET="1")


@needs_triton
def test_the_triton_kernel_compiles_for_gpus_that_are_not_here():
    program = """
import triton
from triton.backends.compiler import GPUTarget
from ft.systems.dmr.digest import kernel
pointers = {"words": "*i32", "halves": "*i32", "numbers": "*i64"}
signature = {name: pointers.get(name, "constexpr" if name.isupper() else "i64") for name in kernel.level.arg_names}
for architecture in (80, 90):
    for rows in (1, kernel._ROWS):
        constants = {"WORDS": kernel.WORDS, "ROWS": rows, "WIDTH": kernel.WIDTH}
        source = triton.compiler.ASTSource(kernel.level, signature, constants)
        built = triton.compile(source, GPUTarget("cuda", architecture, 32), {"num_warps": kernel.WARPS})
        assert built.asm["cubin"] and "local" not in built.asm["ptx"].split(".entry")[1]
"""
    executed(program)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_same_value_without_synchronisation(dtype):
    digest(torch.zeros(1, device="cuda"), 5)  # the keys of this seed are there from now on
    for length in [*LENGTHS, 5_000_001]:
        tensor = anything(length, dtype, seed=length)
        there = tensor.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = digest(there, 5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert got.tolist() == digest(tensor, 5).tolist() == from_eager(there, 5), length
        assert same(there, there)
