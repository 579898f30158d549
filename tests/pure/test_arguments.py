"""Flags: Megatron-LM's names and meanings, and a clear word about everything that cannot work."""

import dataclasses

import pytest

from ft.base.errors import UserError
from ft.base.options import field_docs, spellings
from megatron.ft_trainer import arguments
from megatron.ft_trainer.arguments import Options, check, parse

GOOD = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data "
)


def refusal(flags: str, world_size: int = 4, has_te: bool = False) -> str:
    with pytest.raises(UserError) as error:
        check(parse(GOOD + flags), world_size, has_te=has_te)
    return str(error.value)


def test_every_field_has_a_help_text_and_a_flag_of_its_own():
    seen = {}
    for concern in dataclasses.fields(Options):
        docs = field_docs(concern.default_factory)
        for f in dataclasses.fields(concern.default_factory):
            assert docs.get(f.name) or concern.name == "core", f"{concern.name}.{f.name} has no docstring"
            for spelling in [s for group in spellings(f) for s in group]:
                assert spelling not in seen, f"{spelling} is both {seen[spelling]} and {f.name}"
                seen[spelling] = f.name
    assert "--num-layers" in arguments.help_text()


def test_the_flags_of_a_llama_are_taken():
    options = parse(
        """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
        --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
        --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused
        --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
        --global-batch-size 128 --train-iters 1953125 --lr-decay-iters 1949218 --lr-warmup-iters 3906
        --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
        --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
        --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
        --exit-duration-in-mins 235 --tensor-model-parallel-size 2 --context-parallel-size 1 --sequence-parallel
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data
        --tokenizer-type NullTokenizer --vocab-size 128256 --split '99,1,0' --num-workers 1 --log-interval 1
        --eval-iters 32 --eval-interval 100
        --save-interval 1000 --distributed-timeout-minutes 60
        --save checkpoints --load checkpoints"""
    )
    layout = check(options, 8, has_te=True)
    assert (layout.tp, layout.dp) == (2, 4)
    assert options.core.add_bias_linear is False
    assert options.core.ffn_hidden_size == 14336
    assert options.data.split == "99,1,0"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--hiden-size 3", ["unknown flag --hiden-size", "did you mean --hidden-size?"]),
        ("--hiden-size=3", ["unknown flag --hiden-size", "--hidden-size?"]),
        ("--qwzx", ["unknown flag --qwzx", "--nvidia-trainer", "Megatron-LM checkout"]),
        ("--full-validation", ["unknown flag --full-validation", "--nvidia-trainer"]),
        ("--hybrid-layer-pattern M*", ["unknown flag --hybrid-layer-pattern", "--nvidia-trainer"]),
        ("--ft-hsdp-replicas 2", ["is an option of ft run", "before the script"]),
        ("--num-layers two", ["--num-layers", "two"]),
        ("--normalization BatchNorm", ["BatchNorm", "RMSNorm"]),
        ("--lr 1e-3 stray", ["'stray'"]),
    ],
)
def test_a_flag_that_does_not_fit_is_named_with_what_to_write(flags, words):
    with pytest.raises(UserError) as error:
        parse(flags)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tensor-model-parallel-size 3", ["4 ranks", "TP 3", "multiple of 3"]),
        ("--tensor-model-parallel-size 4 --num-attention-heads 6", ["6 attention heads", "TP 4"]),
        ("--pipeline-model-parallel-size 4 --num-layers 6", ["6 layers", "4 pipeline stages"]),
        ("--global-batch-size 9", ["global batch 9", "micro batch 2 x DP 4 = 8", "multiple of 8"]),
        ("--group-query-attention --num-query-groups 3", ["8 heads", "3 query groups"]),
        ("--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4", ["2 query groups", "TP 4"]),
        ("--max-position-embeddings 64", ["64", "--seq-length 128"]),
        ("--num-layers-per-virtual-pipeline-stage 1", ["interleaved", "--pipeline-model-parallel-size"]),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 2",
            ["1 microbatches", "groups of 4"],
        ),
        ("--num-experts 3 --expert-model-parallel-size 2", ["3 experts", "EP 2"]),
        ("--expert-model-parallel-size 2", ["--num-experts"]),
        ("--num-experts 4 --tensor-model-parallel-size 2", ["--sequence-parallel"]),
        ("--num-experts 4", ["biases of experts", "--disable-bias-linear"]),
        ("--num-experts 4 --moe-shared-expert-intermediate-size 8", ["shared experts", "--disable-bias-linear"]),
        ("--context-parallel-size 2", ["--context-parallel-size needs Transformer Engine"]),
        ("--num-distributed-optimizer-instances 3 --use-distributed-optimizer --overlap-grad-reduce", ["4", "3"]),
        ("--lr-decay-style WSD", ["WSD", "--nvidia-trainer"]),
        ("--lr-warmup-iters 10", ["--lr-warmup-iters 10", "10 steps"]),
        ("--optimizer sgd --use-distributed-optimizer", ["sgd", "--use-distributed-optimizer"]),
        ("--apply-layernorm-1p", ["--apply-layernorm-1p needs Transformer Engine"]),
        ("--recompute-activations --recompute-modules layernorm", ["layernorm", "Transformer Engine"]),
        ("--ft-dmr-profile p.json --ft-dmr-inject bit-flip@step=3", ["--ft-dmr-profile measures", "remove one"]),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_its_numbers_and_the_fix(flags, words):
    text = refusal(flags)
    assert "fix:" in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    "flags",
    [
        "--fp16 --bf16",
        "--overlap-param-gather",
        "--recompute-granularity full",
        "--lr 1e-3 --min-lr 1",
        "--swiglu --squared-relu",
        "--num-experts 4 --moe-router-topk 5",
        "--moe-layer-freq __import__('os')",
        "--moe-layer-freq 9**9**9",
        "--moe-layer-freq [1]*9999999999",
        "--lr nan",
        "--attention-dropout 1.5",
        "--optimizer sgd --num-distributed-optimizer-instances 2",
        "--keep-last 0",
        "--tokenizer-type HuggingFaceTokenizer",
    ],
)
def test_a_dataclass_refuses_what_is_wrong_in_itself(flags):
    with pytest.raises(UserError) as error:
        parse(GOOD + flags)
    assert error.value.fix


def test_a_blend_of_datasets_is_refused_with_the_trainer_that_reads_it():
    flags = GOOD.replace("--mock-data", "--data-path 0.3 a 0.7 b")
    with pytest.raises(UserError, match="--data-path has 4 words, and this trainer reads one dataset") as error:
        check(parse(flags), 4, has_te=False)
    assert "--nvidia-trainer" in error.value.fix
    for flags in ("--dataloader-type cyclic", "--train-data-path a", "--lr-wsd-decay-iters 4"):
        with pytest.raises(UserError, match=r"unknown flag .*(\n|.)*--nvidia-trainer"):
            parse(flags)


def test_all_problems_are_named_at_once():
    text = refusal("--tensor-model-parallel-size 2 --num-attention-heads 3 --global-batch-size 3")
    assert "1. 3 attention heads" in text
    assert "2. global batch 3" in text


def test_what_is_missing_is_named():
    with pytest.raises(UserError) as error:
        check(parse("--hidden-size 4"), 1, has_te=False)
    for name in ("--num-layers", "--num-attention-heads", "--seq-length", "--micro-batch-size", "--train-iters"):
        assert name in str(error.value)


def test_unknown_flags_wrong_values_and_contradictions_are_one_list():
    misspelt = GOOD.replace("--hidden-size", "--hiden-size").replace("--seq-length", "--seq-lenght")
    line = f"{misspelt} --max-position-embeddings 64 --full-validation --lr-warmup-iters 40 --keep-last 0 stray"
    with pytest.raises(UserError) as error:
        parse(line)
    assert [problem.split()[:3] for problem, _ in error.value.problems[:3]] == [
        ["unknown", "flag", "--hiden-size"],
        ["unknown", "flag", "--seq-lenght"],
        ["unknown", "flag", "--full-validation"],
    ]
    line = line.replace("--keep-last 0 ", "")  # it hides no other flag, but its concern cannot be judged
    _, problems = arguments.refusals(line, 4, has_te=False)
    says = "\n".join(problem for problem, _ in problems)
    assert "--max-position-embeddings 64 is shorter than --seq-length 128" in says, "what was meant is judged"
    assert "--lr-warmup-iters 40 does not end before" in says and "'stray'" in says
    assert "is missing" not in says and all(fix for _, fix in problems)


def test_the_flags_of_another_trainer_are_not_guessed():
    assert arguments.read("--hiden-size 3")[0].core.hidden_size == 3
    assert arguments.read("--hiden-size 3", guesses=False)[0].core.hidden_size is None


def test_what_depends_on_a_value_that_cannot_be_read_is_not_judged():
    _, problems = arguments.refusals(
        GOOD.replace("--train-iters 10", "--train-iters ten") + "--lr-warmup-iters 9", 3, has_te=True
    )
    assert [problem for problem, _ in problems] == ["--train-iters: invalid int value: 'ten'"]


def test_defaults_follow_from_other_flags():
    options = parse(GOOD + "--swiglu --sequence-parallel --bf16")
    check(options, 4, has_te=False)
    assert options.training.global_batch_size == 8
    assert options.core.ffn_hidden_size == 128
    assert options.core.kv_channels == 8
    assert options.core.max_position_embeddings == 128
    assert options.core.sequence_parallel is False
    assert options.core.accumulate_allreduce_grads_in_fp32 is True


def test_gloo_between_stages_on_gpus_is_refused_before_anything_is_sent():
    options = parse(f"{GOOD} --pipeline-model-parallel-size 2 --distributed-backend gloo")
    with pytest.raises(UserError, match="gloo cannot send tensors of a GPU"):
        check(options, 4, has_te=False, has_gpu=True)
    check(options, 4, has_te=False, has_gpu=False)
    check(parse(f"{GOOD} --distributed-backend gloo"), 4, has_te=False, has_gpu=True)
