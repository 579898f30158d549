"""Fixtures of the hot-swap tests: a corpus, and the losses of fault-free training on it."""

import pytest
import small_disks
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
    with small_disks.small_disk(tmp_path / "disk", getattr(request, "param", "2m")) as folder:
        yield folder
