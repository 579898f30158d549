"""NVIDIA's own trainer loses whole pipeline stages under ``ft run``: CheckFree and CheckFree+.

The checkouts are found by ``megatron_lm_trees``; without them the tests are skipped.
"""

import functools
import math

import megatron_lm_trees as checkouts
import numpy
import pytest
from test_megatron_lm import faults, of_run

FOUR_STAGES = (
    f"{checkouts.BASE} --pipeline-model-parallel-size 4 --num-layers 4 --train-iters 8 --lr-decay-iters 8 "
    "--eval-interval 4 --eval-iters 1 --log-interval 1"
)
SHARDED = (
    "--untie-embeddings-and-output-weights --use-distributed-optimizer --overlap-grad-reduce --global-batch-size 8"
)
TIED = "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --global-batch-size 4"
NEWEST = pytest.param("0.19", marks=pytest.mark.newest)


def lost(stage: int, holder: int) -> str:
    """Return options for the loss of a stage at step 6 together with the worker that holds its copy."""
    return faults(f"kill@step=6:rank={stage}", f"kill@step=5:rank={holder}:phase=leave", standby=2)


def trained(script, flags: str, folder, options: str = "", ranks: int = 4) -> tuple[dict[int, tuple[str, str]], str]:
    """Train under ``ft run``; return ((loss, gradient norm) of each step as hex floats, the output)."""
    done = checkouts.protected(script, flags, folder, options, ranks=ranks)
    assert done.returncode == 0, done.stdout[-5000:]
    return of_run(folder), done.stdout


def check_went_on(steps: dict[int, tuple[str, str]], output: str, last: int) -> None:
    """The run has gone on to step ``last`` without a restart from a checkpoint, and has learnt."""
    assert "restarted" not in output, output[-5000:]
    losses = [float.fromhex(loss) for loss, _ in steps.values()]
    assert sorted(steps) == list(range(1, last + 1)) and all(map(math.isfinite, losses)) and losses[-1] < losses[0]


@pytest.mark.long
def test_a_stage_lost_with_its_copy_is_rebuilt_from_its_neighbours(tmp_path):
    script = checkouts.tree("0.16") / "pretrain_gpt.py"
    flags = f"{FOUR_STAGES} {SHARDED} --mock-data --ft-checkfree"
    steps, output = trained(script, flags, tmp_path / "run", lost(1, holder=2))
    assert "stage 1 rebuilt from its neighbours" in output
    check_went_on(steps, output, 8)


@pytest.fixture(scope="module")
def of_reference_trainer(tmp_path_factory):
    """Return a function that trains this project's reference trainer, with the same flags once only."""

    @functools.cache
    def train(flags: str, ranks: int) -> dict[int, tuple[str, str]]:
        folder = tmp_path_factory.mktemp("ours")
        flags = f"{flags} --data-cache-path {folder}/cache --reference-trainer"
        found, _ = trained(checkouts.ROOT / "pretrain_gpt.py", flags, folder / "run", ranks=ranks)
        norms = {step: float(numpy.float32(float.fromhex(norm))).hex() for step, (_, norm) in found.items()}
        return {step: (loss, norms[step]) for step, (loss, _) in found.items()}

    return train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return checkouts.write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


@pytest.mark.parametrize(
    ("release", "more", "ranks"),
    [
        ("0.16", SHARDED, 4),
        pytest.param("0.19", SHARDED, 4, marks=pytest.mark.newest),
        pytest.param("0.16", TIED, 8, marks=pytest.mark.long),
        pytest.param("0.19", TIED, 8, marks=pytest.mark.long),
    ],
)
def test_swapped_ends_train_as_those_of_the_reference_trainer_bit_for_bit(
    release, more, ranks, corpus, of_reference_trainer, tmp_path
):
    """With dropout, evaluations and real data. The checkout logs gradient norms in fp32, and its NullTokenizer of 0.16
    has one id more.
    """
    flags = f"{FOUR_STAGES} {more} --data-path {corpus} --ft-checkfree-plus"
    theirs = f"{flags} --data-cache-path {tmp_path}/cache"
    theirs = theirs.replace("--vocab-size 128", "--vocab-size 127") if release == "0.16" else theirs
    found, _ = trained(checkouts.tree(release) / "pretrain_gpt.py", theirs, tmp_path / "theirs", ranks=ranks)
    assert found == of_reference_trainer(flags, ranks) and len(found) == 8


@pytest.mark.parametrize(
    ("release", "stage", "holder"),
    [
        pytest.param("0.16", 0, 1, marks=pytest.mark.long),
        pytest.param("0.16", 3, 0, marks=pytest.mark.long),
        pytest.param("0.19", 3, 0, marks=pytest.mark.newest),
    ],
)
def test_an_end_that_is_lost_with_its_copy_is_rebuilt_with_swapped_ends(tmp_path, release, stage, holder):
    """Optimizers that count from different steps have one checkpoint, from which another run goes on."""
    script, save = checkouts.tree(release) / "pretrain_gpt.py", tmp_path / "save"
    flags = FOUR_STAGES.replace("iters 8", "iters 10")
    flags += f" {SHARDED} --mock-data --save {save} --save-interval 8 --ft-checkfree-plus"
    steps, output = trained(script, flags, tmp_path / "run", lost(stage, holder))
    assert f"stage {stage} rebuilt" in output
    check_went_on(steps, output, 10)
    again, _ = trained(script, f"{flags} --load {save} --ckpt-step 8", tmp_path / "again")
    assert again[9] == steps[9] and sorted(again) == [9, 10]
    assert float.fromhex(again[10][0]) == pytest.approx(float.fromhex(steps[10][0]), abs=0.05)
