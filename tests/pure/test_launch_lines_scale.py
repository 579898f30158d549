"""How launch lines are scaled down for a CPU: sizes keep their ratios, and what is left out is said."""

import sys
from pathlib import Path

import launch_lines as lines
import pytest

from megatron.ft_trainer.arguments import read
from megatron.ft_trainer.arguments.check import examine
from megatron.ft_trainer.arguments.needs import Need, needs

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "experiments"))
import launch_lines_scale as scaling

DENSE = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 4 --global-batch-size 32 "
    "--seq-length 1024 --max-position-embeddings 1024 --train-iters 50 --lr-decay-iters 320000 --lr 0.00015 "
    "--eval-interval 1000 --eval-iters 10 --bf16 --save ${SAVE} --ckpt-format torch_dist "
)
STEPS = 20


def scaled(flags: str, **how) -> tuple[dict[str, list[str]], scaling.Scaled]:
    """Return (flag -> values, the whole answer)."""
    found = scaling.scale([*DENSE.split(), *flags.split()], STEPS, **how)
    values: dict[str, list[str]] = {}
    for word in found.flags:
        if word.startswith("--"):
            values[word] = []
        else:
            values[list(values)[-1]].append(word)
    return values, found


def test_sizes_keep_their_ratios():
    flags, found = scaled("--tensor-model-parallel-size 2")
    assert found.ranks == 4 and found.lacks == []
    sizes = [flags[f"--{name}"] for name in ("hidden-size", "num-attention-heads", "num-layers", "seq-length")]
    assert sizes == [["32"], ["4"], ["2"], ["32"]]
    assert flags["--global-batch-size"] == ["8"] and flags["--train-iters"] == flags["--lr-decay-iters"] == ["20"]


def test_model_chunks_keep_their_number():
    flags, found = scaled("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1")
    assert found.ranks == 4 and flags["--num-layers"] == ["12"]


def test_a_layout_of_too_many_ranks_is_halved():
    flags, found = scaled(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4 "
        "--expert-tensor-parallel-size 1 --num-experts 64 --moe-router-topk 8 --moe-router-num-groups 8 "
        "--moe-router-group-topk 4"
    )
    assert found.ranks == 4 and flags["--expert-model-parallel-size"] == ["2"]
    assert flags["--num-experts"] == ["16"] and flags["--moe-router-topk"] == ["2"]


def test_what_is_left_out_is_said():
    _, found = scaled(
        "--context-parallel-size 2 --moe-grouped-gemm --recompute-modules [moe_act] --attention-backend fused"
    )
    assert found.lacks == ["context parallelism", "grouped GEMM", "recomputation of moe_act"]


def test_flags_of_checkpoints_stay_with_runs_that_resume():
    assert "--ckpt-format" not in scaled("")[0]
    assert "--ckpt-format" in scaled("", resumes=True)[0]


def test_a_line_about_fp8_needs_a_gpu():
    asked = [Need("--fp8-format", "transformer-engine"), Need("--moe-grouped-gemm", "transformer-engine")]
    assert scaling.needs_gpu(asked) == ["--fp8-format (transformer-engine)"]


@pytest.mark.skipif(not lines.trees(), reason="no Megatron-LM trees beside the checkout (MEGATRON_LM_TREES)")
@pytest.mark.parametrize("tree", lines.trees(), ids=lambda tree: tree.name)
def test_scaled_lines_are_accepted_and_need_no_gpu(tree):
    refused = []
    for name, words in lines.lines_of(tree).items():
        options, problems, _ = read(words)
        if options is None or problems or not (options.training.train_iters or options.training.train_samples):
            continue
        if scaling.needs_gpu(needs(options, None)) or "--use-torch-fsdp2" in words or "--use-megatron-fsdp" in words:
            continue
        small = scaling.scale(words, STEPS)
        data = ["--data-path", "a", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(scaling.VOCABULARY)]
        options, problems, _ = read([*small.flags, *data])
        if not problems:
            problems = examine(options, small.ranks, has_te=False)[1]
        if problems:
            refused.append((name, problems))
    assert refused == []
