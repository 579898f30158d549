"""NVIDIA's trainer goes on from checkpoints of this one, and its own are compared by ``ft diagnose compare``.

The checkouts are found by ``megatron_lm_trees``; without them the tests are skipped.
"""

import json
import shutil

import megatron_lm_trees as checkouts
import numpy
import pytest
from checkpoint_flips import flip, places, poison

from ft import cli
from ft.observe.diagnose import stored

FLAGS = (
    f"{checkouts.BASE} --num-layers 4 --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer --mock-data "
    "--global-batch-size 8 --train-iters 4 --lr-decay-iters 4 --eval-iters 0 --eval-interval 100 --log-interval 1"
)
STAGES = "--pipeline-model-parallel-size 2"
SHAPE = "num-layers 4", "hidden-size 32", "num-attention-heads 4", "max-position-embeddings 32", "seq-length 32"


def theirs(tree, flags, folder, ranks=2) -> tuple[dict, str]:
    """Train with NVIDIA's trainer; return ((loss, gradient norm) of each step, the output)."""
    lines, shown = checkouts.plain(tree / "pretrain_gpt.py", flags, folder, ranks)
    return {
        line["step"]: (float.fromhex(line["losses"]["lm loss"]), float.fromhex(line["grad_norm"])) for line in lines
    }, shown


def ours(tree, flags, folder, ranks=2) -> tuple[dict, str]:
    """Train with this project's trainer; return the same, with gradient norms rounded as NVIDIA's trainer does it."""
    if "0.16" in tree.name:  # its NullTokenizer has one more id than --vocab-size
        flags = flags.replace("--vocab-size 128", "--vocab-size 129").replace("--vocab-size 127", "--vocab-size 128")
    lines, shown = checkouts.own(flags, folder, ranks)
    return {line["step"]: (line["loss"], float(numpy.float32(line["grad_norm"]))) for line in lines}, shown


def without_shape(flags: str) -> str:
    """Return the flags less those that --use-checkpoint-args takes from the checkpoint."""
    for flag in SHAPE:
        flags = flags.replace(f"--{flag}", "")
    return flags


@pytest.mark.long
@pytest.mark.parametrize("release", ["0.16", "0.19"])
def test_a_run_goes_on_in_nvidias_trainer(tmp_path, release):
    tree, flags = checkouts.tree(release), f"{FLAGS} {STAGES}"
    whole, _ = ours(tree, f"{flags} --save {tmp_path}/saved --save-interval 3", tmp_path / "ours")
    there = f"--load {tmp_path}/saved --ckpt-step 3 --use-checkpoint-args"
    again, _ = theirs(tree, f"{without_shape(flags)} {there}", tmp_path / "theirs")
    assert again == {4: whole[4]}


@pytest.mark.long
@pytest.mark.parametrize("release", ["0.16", "0.19"])
def test_another_layout_goes_on_in_nvidias_trainer(tmp_path, release):
    """The vocabulary is padded to the same size in both layouts; what the padding holds counts in the loss."""
    tree = checkouts.tree(release)
    flags = FLAGS.replace("--vocab-size 128", "--vocab-size 127 --make-vocab-size-divisible-by 64")
    split = f"{STAGES} --tensor-model-parallel-size 2"
    whole, _ = ours(tree, f"{flags} --save {tmp_path}/saved --save-interval 3", tmp_path / "ours", ranks=4)
    back = f"{flags} --dist-ckpt-optim-fully-reshardable {split} --load {tmp_path}/saved --ckpt-step 3"
    last, _ = theirs(tree, back, tmp_path / "theirs", ranks=4)
    assert last[4][0] == pytest.approx(whole[4][0], rel=1e-4)


@pytest.mark.long
def test_nvidias_trainer_executes_nothing_of_a_checkpoint_from_elsewhere(tmp_path):
    script, flags = checkouts.installed(), f"{FLAGS} {STAGES}"
    done = checkouts.protected(script, f"{flags} --save {tmp_path}/saved", tmp_path / "saving")
    assert done.returncode == 0, done.stdout[-5000:]
    for where in (".metadata", "common.pt", "object"):
        marker, hostile, run = (tmp_path / f"{name}-{where}" for name in ("marker", "hostile", "run"))
        shutil.copytree(tmp_path / "saved", hostile)
        poison(next(hostile.glob("iter_*")), where, marker)
        done = checkouts.protected(script, f"{flags} --load {hostile}", run, "--max-restarts 0")
        assert done.returncode != 0 and "UnpicklingError" in done.stdout, done.stdout[-5000:]
        assert not marker.exists()


def compared(capsys, *folders) -> dict:
    capsys.readouterr()
    cli.main(["diagnose", "compare", *map(str, folders), "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "release", [pytest.param("0.16", marks=pytest.mark.long), pytest.param("installed", marks=pytest.mark.newest)]
)
def test_checkpoints_of_nvidias_trainer_are_compared(tmp_path, capsys, release):
    """Without --deterministic-mode the padding in the optimizer's shards is what was in memory."""
    flags = f"{FLAGS} {STAGES} --save-interval 2"
    a, b, c = (tmp_path / name for name in "abc")
    for folder in (a, b):
        done = checkouts.protected(
            checkouts.script_of(release), f"{flags} --save {folder}", tmp_path / f"{folder.name}-run"
        )
        assert done.returncode == 0, done.stdout[-5000:]
    shutil.copytree(a, c)
    found = compared(capsys, a, b, c)
    assert found["equal"] and found["steps"] == [2, 4]
    checkpoint = b / "iter_0000004"
    unset = stored.padding(stored.read(checkpoint))
    shards = sorted(key for key in places(checkpoint) if key[0].endswith(".exp_avg") and "bucket_idx" in key[0])
    rank = flip(checkpoint, *next(key for key in shards if key not in unset), element=0, bit=20)
    found = compared(capsys, a, b, c)
    assert found["first_different_step"] == 4 and found["outliers"] == [str(b)]
    assert found["suspects"] == {str(b): [rank]} and len(found["differences"]) == 1
