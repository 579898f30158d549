"""Hot-swap end to end: `ft run` with faults, against the same training without any."""

import pytest
import small_runs as runs
from ft_runs import flags, ft_run

LAYOUTS = {
    "tp1 pp2 dp2": (4, "--pipeline-model-parallel-size 2"),
    "tp2 pp1 dp2": (4, "--tensor-model-parallel-size 2"),
    "tp2 pp2 dp2": (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "tp1 pp2 dp2, bf16": (4, "--pipeline-model-parallel-size 2 --bf16"),
    "tp2 pp1 dp2, bf16, dropout": (4, "--tensor-model-parallel-size 2 --bf16 --hidden-dropout 0.1"),
    "experts, ep2 dp4": (4, "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear"),
    "interleaved, pp2 dp2": (4, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "overlapped, dp4": (4, "--overlap-grad-reduce --overlap-param-gather"),
    "no distributed optimizer, pp2 dp2": (4, "--pipeline-model-parallel-size 2 --no-use-distributed-optimizer"),
    "no data parallelism, pp4": (4, "--pipeline-model-parallel-size 4"),
}
PHASES = ("forward", "backward", "reduce", "optimizer", "transfer", "save", "evaluate")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    from megatron import patches

    patches.apply()
    return runs.make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def reference(ranks, corpus, tmp_path_factory):
    """Losses of a run without faults and without fault tolerance."""
    known = {}

    def losses(nproc: int, extra: str, steps: int) -> list[float]:
        if (nproc, extra, steps) not in known:
            folder = tmp_path_factory.mktemp("reference")
            wanted = flags(corpus, folder, extra, steps).replace("--ft-hot-swap", "")
            ranks(runs.run, nproc, wanted, timeout=120)
            known[nproc, extra, steps] = runs.losses(folder / "metrics.jsonl")
        return known[nproc, extra, steps]

    return losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_after_faults_in_every_phase_are_those_without(name, corpus, reference, tmp_path):
    nproc, layout = LAYOUTS[name]
    steps = 4 + 4 * len(PHASES)
    extra = f"{layout} --eval-interval 4 --eval-iters 2 --save {tmp_path}/save --save-interval 4"
    faults = ",".join(
        f"kill@step={4 * (i + 1)}:rank={(i + nproc // 2) % nproc}:phase={phase}" for i, phase in enumerate(PHASES)
    )
    done = ft_run(
        tmp_path / "run", flags(corpus, tmp_path / "run", extra, steps), nproc=nproc, options=f"--inject {faults}"
    )
    assert done.code == 0, done.explain()
    assert len(done.named("fault_injected")) == len(PHASES), done.explain()
    assert done.losses == reference(nproc, extra.replace(str(tmp_path), str(tmp_path / "other")), steps)


def test_each_rank_in_turn(corpus, reference, tmp_path):
    layout, steps = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 28
    faults = ",".join(f"kill@step={3 * (rank + 1)}:rank={rank}:phase=backward" for rank in range(8))
    done = ft_run(
        tmp_path / "run", flags(corpus, tmp_path / "run", layout, steps), nproc=8, options=f"--inject {faults}"
    )
    assert done.code == 0, done.explain()
    assert len(done.named("resumed")) >= 8
    assert done.losses == reference(8, layout, steps)
