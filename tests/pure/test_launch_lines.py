"""Real launch lines of Megatron-LM: which are taken, what they need, and what is said about flags without effect."""

import launch_lines as lines
import pytest

from ft.commands.check import smallest_world
from megatron import patches
from megatron.ft_trainer.arguments import core_options, known, parse, read
from megatron.ft_trainer.arguments.check import examine
from megatron.ft_trainer.arguments.needs import GPU, TE, in_words, needs

COMMON = (
    "--use-mcore-models --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 32 --train-iters 50 --lr 0.00015 "
    "--min-lr 1.0e-5 --lr-decay-style cosine --lr-warmup-fraction .01 --clip-grad 1.0 --data-path ${DATA_PATH}/a "
    "--vocab-file ${DATA_PATH}/vocab.json --merge-file ${DATA_PATH}/merges.txt --split 949,50,1 --save ${SAVE} "
    "--save-interval 10000 --log-timers-to-tensorboard --distributed-backend nccl "
)


def needed(flags: str) -> list[str]:
    """Return what a line needs; the line is taken, as parts and as a whole."""
    options = parse(COMMON + flags)
    grid, problems = examine(options, smallest_world(options), has_te=True, assumes_machine=True)
    assert problems == []
    return in_words(needs(options, grid))


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--bf16 --transformer-impl local", [GPU]),
        ("--transformer-impl transformer_engine --attention-backend flash --fp16", [TE, GPU]),
        ("--fp8-format hybrid --fp8-recipe delayed --fp8-param-gather --use-distributed-optimizer --bf16", [TE, GPU]),
        ("--context-parallel-size 2 --cp-comm-type p2p", [TE, GPU]),
        ("--position-embedding-type rope --no-position-embedding", []),
        ("--cuda-graph-impl local --te-rng-tracker", [TE, GPU]),
        ("--recompute-granularity selective --recompute-modules [layernorm moe_act]", [TE]),
        ("--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --position-embedding-type rope", [TE]),
        ("--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --position-embedding-type rope", [GPU]),
        ("--optimizer muon --muon-momentum 0.9 --muon-scale-mode spectral", ["emerging-optimizers"]),
        ("--hybrid-override-pattern M-M*-M-M*-M- --spec megatron.core.models.mamba stack", ["mamba-ssm", GPU]),
        ("--wandb-project p --wandb-exp-name n --wandb-entity e", ["wandb"]),
        ("--tokenizer-type TikTokenizer --tokenizer-model ${M} --tiktoken-pattern v2", ["tiktoken"]),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model ${M}", ["sentencepiece"]),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model ${M}", ["sentencepiece"]),
        (
            "--num-experts 8 --moe-router-topk 2 --disable-bias-linear --expert-model-parallel-size 4 "
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-layer-freq ([0]*3+[1]*9)",
            [GPU],
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|(tt|)*4tL --moe-z-loss-coeff 0",
            [GPU],
        ),
        (
            "--check-weight-hash-across-dp-replicas-interval 10 --profile --use-pytorch-profiler --tensorboard-dir t",
            [GPU],
        ),
        ("--dist-ckpt-strictness ignore_all --ckpt-format torch --rerun-mode validate_results --async-save", [GPU]),
    ],
)
def test_a_line_of_this_kind_is_taken_and_says_what_it_needs(flags, wanted):
    assert set(wanted) <= set(needed(flags))


def test_a_list_is_read_in_every_spelling():
    for spelling in ("384 128 9000", "[384 128 9000]", "'[384 128 9000]'", "'384 128 9000'"):
        assert parse(f"--train-samples 10000 --rampup-batch-size {spelling}").training.rampup_batch_size == [
            384,
            128,
            9000,
        ]
    modules = parse("--recompute-granularity selective --recompute-modules '[mlp moe_act]'").core.recompute_modules
    assert modules == ["mlp", "moe_act"]


def test_a_flag_without_effect_is_said_once():
    notices = parse(COMMON + "--use-mcore-models --use-persistent-ckpt-worker --ckpt-format torch_dcp").notices
    for flag in ("--use-mcore-models", "--use-persistent-ckpt-worker", "--ckpt-format torch_dcp"):
        assert sum(flag in notice for notice in notices) == 1
    assert parse("--save-interval 5").notices == (
        "without effect here: --save-interval 5: without --save no checkpoints are written",
    )


def test_the_batch_follows_a_schedule_of_thresholds_in_tokens():
    line = COMMON.replace("--train-iters 50", "--train-samples 4000").replace("--seq-length 1024", "--seq-length 1000")
    options = parse(line + "--step-batch-size-schedule '0:32 1M:64 2M:128'")
    examine(options, 4, has_te=True, assumes_machine=True)
    from megatron.ft_trainer.arguments.batch import global_batch_size, train_steps

    sizes = [global_batch_size(options.training, samples) for samples in (0, 999, 1000, 2000)]
    assert sizes == [32, 32, 64, 128]
    consumed = steps = 0
    while (size := global_batch_size(options.training, consumed)) + consumed <= 4000:
        consumed, steps = consumed + size, steps + 1
    assert train_steps(options.training) == steps


def test_a_new_field_of_core_is_a_new_flag(tmp_path, monkeypatch):
    """The flags are those of the core that is installed: here one with a field that no release has."""
    import shutil

    from megatron.ft_trainer.arguments import core_fields

    core = tmp_path / "core"
    for file in {*core_fields.CONFIGS.values(), "transformer/enums.py"}:
        (core / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(core_fields.installed_core() / file, core / file)
    config = core / core_fields.CONFIGS["OptimizerConfig"]
    head = "class OptimizerConfig:\n"
    text = config.read_text()
    assert head in text
    config.write_text(text.replace(head, f'{head}    brand_new: int = 3\n    """It is new."""\n\n', 1))
    monkeypatch.setattr(core_options, "installed_core", lambda: core)
    row = next(row for row in core_options.rows.__wrapped__() if row.name == "brand_new")
    assert (row.on, row.kind, row.default, row.help) == (("--brand-new",), int, 3, "It is new.")


def test_a_default_that_is_computed_is_cores_own():
    """megatron-core writes some defaults as products and powers, such as 2**32."""
    from megatron.core.optimizer import OptimizerConfig

    assert parse("--fp16").core.initial_loss_scale == OptimizerConfig().initial_loss_scale > 1


def test_number_formats_have_the_type_that_core_compares_them_with():
    patches.apply()
    import torch

    from megatron.core.optimizer import OptimizerConfig
    from megatron.ft_trainer.config import same_names, transformer_config

    options = parse(COMMON + "--num-experts 4 --disable-bias-linear --moe-router-dtype fp32 --transformer-impl local")
    grid, _ = examine(options, 1, has_te=True, assumes_machine=True)
    assert transformer_config(options, grid).moe_router_dtype == "fp32"
    assert same_names(OptimizerConfig, options)["exp_avg_dtype"] is torch.float32


def test_a_flag_of_a_newer_core_is_refused_with_the_release_that_has_it(monkeypatch):
    """The flags are those of a core without the field, whatever is installed."""
    fields = core_options._fields()
    for name in ("use_mup", "fp4_param_gather", "cuda_graph_modules"):
        fields.pop(name, None)
    monkeypatch.setattr(core_options, "_fields", lambda: fields)
    supported = {flag for row in core_options.rows.__wrapped__() for flag in (*row.on, *row.off)}
    for flag in ("--use-mup", "--fp4-param-gather"):
        assert flag not in supported
        problem, _ = known.explain(flag, sorted(supported))
        assert problem == (f"{flag} needs megatron-core >= 0.17", "pip install 'megatron-core>=0.17'")
    assert "--cuda-graph-modules" in supported  # older releases have the same under another name, --cuda-graph-scope


def test_what_captures_cuda_graphs_has_one_name_in_every_release():
    patches.apply()
    from megatron.ft_trainer.config import transformer_config

    for flag in ("--cuda-graph-scope", "--cuda-graph-modules"):
        options = parse(COMMON + f"--bf16 --transformer-impl local {flag} attn mlp")
        grid, _ = examine(options, 1, has_te=True, assumes_machine=True)
        config = transformer_config(options, grid)
        given = getattr(config, "cuda_graph_modules", None) or config.cuda_graph_scope
        assert [one.name for one in given] == ["attn", "mlp"]


@pytest.mark.skipif(not lines.trees(), reason="no Megatron-LM trees beside the checkout (MEGATRON_LM_TREES)")
@pytest.mark.parametrize("tree", lines.trees(), ids=lambda tree: tree.name)
def test_the_launch_lines_of_nvidias_tests_are_taken(tree):
    """All but those of other programs: reinforcement learning, distillation, elastic models."""
    refused = []
    found = lines.lines_of(tree)
    for name, words in found.items():
        _, problems, _ = read(words)
        if problems and not any("another program" in problem for problem, _ in problems):
            refused.append((name, problems))
    assert len(refused) <= 0.05 * len(found), refused
