"""What one release of megatron-core wrote, another goes on from."""

import os
import platform
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import small_runs as runs
from pythons import python

from ft.base.errors import UserError

ROOT = Path(__file__).parent.parent.parent
OLDEST = "0.16.1"
LAYOUT = "--pipeline-model-parallel-size 2 --use-distributed-optimizer"


@pytest.fixture(scope="module")
def oldest_core(request, tmp_path_factory) -> Path:
    """A folder to put first on the path: the oldest megatron-core that is supported, for this Python."""
    if version("megatron-core") == OLDEST:
        pytest.skip(f"megatron-core {OLDEST} is the installed one; tests/newest.sh installs another")
    cache = getattr(request.config, "cache", None)
    wheels = Path(cache.mkdir("megatron_core_oldest")) if cache else tmp_path_factory.mktemp("wheels")
    pattern = f"megatron_core-{OLDEST}-cp{sys.version_info.major}{sys.version_info.minor}-*.whl"
    if not list(wheels.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", f"megatron-core=={OLDEST}", "--dest", str(wheels)]
        done = subprocess.run([*command, "--no-deps", "--quiet"], check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no wheel of megatron-core {OLDEST} for Python {platform.python_version()}: {done.stderr}")
    folder = tmp_path_factory.mktemp("core")
    with zipfile.ZipFile(next(wheels.glob(pattern))) as wheel:
        wheel.extractall(folder)
    return folder


def train(flags: str, core: Path | None = None) -> str:
    """Runs pretrain_gpt.py on two processes, with the installed core or the one in a folder; returns its output."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    first = [str(core)] if core else []
    words = [*command, "pretrain_gpt.py", *runs.BASE.split(), *flags.split()]
    done = python(*words, PYTHONPATH=os.pathsep.join([*first, str(ROOT)]))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_update_captured_once_per_process_is_refused():
    """From 0.17 on core can capture the optimizer's step in a CUDA graph, between two barriers."""
    from megatron import patches

    patches.apply()
    from megatron.patches import releases

    class Optimizer:
        def step(self):
            return None

    optimizer = Optimizer()
    releases.refuse_captured_update(optimizer)
    if releases.CORE >= (0, 17):
        from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

        optimizer.step = OptimizerCudaGraphWrapper(optimizer.step)
        with pytest.raises(UserError, match="CUDA graph cannot be protected"):
            releases.refuse_captured_update(optimizer)


def test_a_checkpoint_of_the_oldest_core_is_continued_bit_for_bit(oldest_core, corpus, tmp_path):
    """The steps after it are those that the oldest core itself would have taken."""
    flags = f"{LAYOUT} --data-path {corpus} --train-iters 6 --save {tmp_path}/save --save-interval 3"
    said = train(f"{flags} --metrics-file {tmp_path}/whole.jsonl", oldest_core)
    assert f"megatron-core  {OLDEST}" in said
    flags = f"{LAYOUT} --data-path {corpus} --train-iters 6 --load {tmp_path}/save --ckpt-step 3"
    said = train(f"{flags} --metrics-file {tmp_path}/rest.jsonl")
    assert f"megatron-core  {version('megatron-core')}" in said
    whole, rest = runs.metrics(tmp_path / "whole.jsonl"), runs.metrics(tmp_path / "rest.jsonl")
    assert [step["step"] for step in rest] == [4, 5, 6]
    for name in ("loss", "grad_norm", "lr"):
        assert [step[name] for step in rest] == [step[name] for step in whole[3:]]
