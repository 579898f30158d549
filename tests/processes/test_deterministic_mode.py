"""--deterministic-mode: equal runs write equal checkpoints, and what excludes that is refused."""

from pathlib import Path

import pytest
import small_runs as runs

from megatron.ft_trainer import determinism

# Padded optimizer buckets, as they lie in memory: what is not initialised gets into the files.
FLAGS = (
    f"{runs.BASE} --train-iters 2 --save-interval 1 --mock-data --deterministic-mode --bf16 --attention-dropout 0.1 "
    "--hidden-dropout 0.1 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
    "--no-dist-ckpt-optim-fully-reshardable --num-experts 4 --disable-bias-linear "
)


def _files(folder: Path) -> dict[str, bytes]:
    """Every file but those with the time or a random name in them."""
    named = {"manifest.json", ".metadata"}
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name not in named
    }


def test_two_runs_write_the_same_bytes(ranks, tmp_path):
    written = []
    for name in ("first", "second"):
        assert ranks(runs.launch, 4, f"{FLAGS} --save {tmp_path}/run", init=False) == [0] * 4
        (tmp_path / "run").rename(tmp_path / name)  # the path is part of what a checkpoint says about its run
        written.append(_files(tmp_path / name))
    first, second = written
    assert sorted(first) == sorted(second) and "iter_0000002/__3_0.distcp" in first
    assert [name for name in first if first[name] != second[name]] == []
    assert first["iter_0000001/__0_0.distcp"] != first["iter_0000002/__0_0.distcp"]


@pytest.mark.on_ranks(1)
def test_a_process_is_made_reproducible():
    import os

    import torch

    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(2)
    determinism.enforce()
    cudnn = torch.backends.cudnn
    assert torch.are_deterministic_algorithms_enabled() and cudnn.deterministic and not cudnn.benchmark
    assert torch.get_num_threads() == 1


def test_a_run_is_refused_where_the_environment_contradicts(ranks, tmp_path):
    assert ranks(runs.launch, 2, f"{FLAGS} --save {tmp_path}", init=False, env={"NCCL_ALGO": "NVLS"}) == [2, 2]
    assert ranks.output(0).count("error: --deterministic-mode with NCCL_ALGO=NVLS") == 1
    assert "error" not in ranks.output(1)
