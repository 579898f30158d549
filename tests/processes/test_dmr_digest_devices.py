"""The digest's Triton kernel: interpreted and compiled without a GPU, and run where there is one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dmr_tensors import DTYPES, LENGTHS, anything, from_eager

from ft.systems.dmr.digest import digest, same

ROOT = Path(__file__).parent.parent.parent
TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.skipif(not TRITON, reason="Triton is not installed (it comes with builds of torch for CUDA)")
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
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, timeout=180)


@pytest.mark.skipif(not TRITON, reason="Triton is not installed (it comes with builds of torch for CUDA)")
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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, timeout=180)


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
