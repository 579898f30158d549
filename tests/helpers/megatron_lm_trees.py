"""Checkouts of Megatron-LM for tests: where they are found, and runs of their trainer with and without protection.

They are looked for in the folder that the variable MEGATRON_LM_TREES names, or else in ``../shared/megatron_lm`` beside
this repository: a subfolder for each release, such as ``core_v0.16.1``.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from harness import started

from ft.adapters.megatron_lm import tree as megatron_lm
from ft.adapters.megatron_lm.tree import SINCE
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parents[2]
PLAIN = Path(__file__).with_name("plain_megatron_lm.py")
BASE = (
    "--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
    "--distributed-backend gloo --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --lr 1e-2 --min-lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 128 --split 90,5,5"
)
"""Flags of a trainer that is small and runs on a CPU. Dropout is on."""

_NEEDED = "six", "regex", "pydantic"


def trees() -> list[Path]:
    """Return the checkouts that are there, the oldest release first."""
    folder = Path(os.environ.get("MEGATRON_LM_TREES") or ROOT.parent / "shared" / "megatron_lm")
    return sorted(path.parent for path in folder.glob("*/pretrain_gpt.py"))


def tree(release: str) -> Path:
    """Return the checkout of a release such as "0.16"; skip the test if it is not there or cannot be run."""
    found = [path for path in trees() if path.name.startswith(f"core_v{release}")]
    if not found:
        pytest.skip(f"no checkout of Megatron-LM {release}: name a folder with core_v{release}.* in MEGATRON_LM_TREES")
    if release >= "0.19" and sys.version_info < (3, 12):
        pytest.skip("this release needs Python 3.12 (tests/newest.sh)")
    for package in _NEEDED:
        pytest.importorskip(package, reason="pip install 'megatron-ft[megatron-lm]'")
    return found[0]


def installed() -> Path:
    """Return the script that trains by the trainer in the installed megatron-core; skip the test if it has none."""
    root = megatron_lm.installed()
    if root is None or megatron_lm.read(root).release[:2] < SINCE:
        pytest.skip("the installed megatron-core carries no trainer that the script knows (tests/newest.sh)")
    return megatron_lm.SCRIPT


def script_of(release: str) -> Path:
    """Return ``pretrain_gpt.py`` of a release, or, for "installed", what :func:`installed` returns."""
    return installed() if release == "installed" else tree(release) / "pretrain_gpt.py"


def plain(script: Path, flags: str, folder: Path, ranks: int = 4, **environment: str) -> tuple[list[dict], str]:
    """Train with torchrun and without any protection; return (what was logged, with all bits, the output)."""
    folder.mkdir(parents=True)
    out = folder / "plain.jsonl"
    shown = _train([PLAIN, out, script, *flags.split()], ranks, folder / "logs", **environment)
    return [json.loads(line) for line in out.read_text().splitlines()], shown


def own(flags: str, folder: Path, ranks: int = 4) -> tuple[list[dict], str]:
    """Train with torchrun and the reference trainer; return the same as ``plain``."""
    folder.mkdir(parents=True)
    out = folder / "metrics.jsonl"
    shown = _train(
        [ROOT / "pretrain_gpt.py", "--reference-trainer", *flags.split(), "--metrics-file", out], ranks, folder / "logs"
    )
    return [json.loads(line) for line in out.read_text().splitlines()], shown


def _train(words: list, ranks: int, logs: Path, **environment: str) -> str:
    """Run a script with its arguments on the ranks of torchrun; return their output, one rank's after the other's.

    torchrun starts Python without buffers. In a common stream the parts of a line would be torn apart by other ranks.
    """
    done = _run([*_torchrun(ranks), "--redirects", "3", "--log-dir", logs, *words], **environment)
    shown = "".join(path.read_text(errors="replace") for path in sorted(logs.rglob("std*.log")))
    assert done.returncode == 0, (done.stdout + shown)[-5000:]
    return shown


def protected(
    script: Path, flags: str, folder: Path, options: str = "", protections: str = "", ranks: int = 4
) -> subprocess.CompletedProcess:
    """Train with ``ft run``, ``--ft-hot-swap`` and further ``protections``; ``folder`` gets its record."""
    ft = [sys.executable, "-m", "ft", "run", "--nproc-per-node", str(ranks), "--run-dir", folder, *options.split()]
    return _run([*ft, script, *flags.split(), "--ft-hot-swap", *protections.split()])


def ft(command: str) -> str:
    """Run a command of ``ft``, which has to succeed; return its output."""
    done = _run([sys.executable, "-m", "ft", *command.split()])
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def write_corpus(prefix: Path) -> Path:
    """Write a small dataset of numbers below 127; return its prefix."""
    draw = numpy.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for _ in range(400):
        length, start = int(draw.integers(20, 90)), int(draw.integers(0, 120))
        builder.add_document(torch.tensor([(start + i) % 127 for i in range(length)]), [length])
    builder.finalize(f"{prefix}.idx")
    return prefix


def metrics(folder: Path) -> dict[int, dict]:
    """Return the lines of a run's metrics file by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


def log_lines(output: str) -> dict[str, str]:
    """Return the lines of the trainer's log on iterations and evaluations, the last of each, without times."""
    found = {}
    for line in output.splitlines():
        if match := re.search(r" iteration +(\d+)/.*", line):
            found[match[1]] = re.sub(r"elapsed time per iteration \(ms\): [\d.]+", "", match[0])
        elif match := re.search(r"validation loss at [^|]*\|.*", line):
            found[match[0].partition("|")[0]] = match[0]
    return found


def _torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def _run(command: list, **also: str) -> subprocess.CompletedProcess:
    queues = "8" if "--use-torch-fsdp2" in command else "1"  # NVIDIA's trainer insists on either
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": queues, **also}
    return started.run(command, ROOT, environment, 540)
