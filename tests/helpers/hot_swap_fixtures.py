"""Fixtures of the hot-swap tests: a corpus, and the losses of fault-free training on it."""

import subprocess

import pytest
import small_runs as runs
from ft_runs import flags

_KNOWN: dict[tuple, list[float]] = {}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    from megatron import patches

    patches.apply()
    return runs.make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def reference(ranks, corpus, tmp_path_factory):
    """Return a function that computes the losses of a run without faults and without fault tolerance."""

    def losses(nproc: int, extra: str, steps: int) -> list[float]:
        if (corpus, nproc, extra, steps) not in _KNOWN:
            folder = tmp_path_factory.mktemp("reference")
            wanted = flags(corpus, extra, steps).replace("--ft-hot-swap", f"--metrics-file {folder}/metrics.jsonl")
            ranks(runs.run, nproc, wanted)
            _KNOWN[corpus, nproc, extra, steps] = runs.losses(folder / "metrics.jsonl")
        return _KNOWN[corpus, nproc, extra, steps]

    return losses


@pytest.fixture
def small_disk(tmp_path, request):
    """A file system of 2 MiB, or of the size that the test gives as a parameter; removed at the end."""
    folder, size = tmp_path / "disk", getattr(request, "param", "2m")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
