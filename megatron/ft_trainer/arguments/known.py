"""Megatron-LM's flags that this trainer does not define: flags without effect, of other programs, obsolete,
unsupported.

A flag without effect is accepted, and the run prints one notice about it. All others are refused with the reason.
"""

import fnmatch
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ft.base.errors import Problem
from ft.base.flags import nearest

NO_EFFECT: dict[str, tuple[str, ...]] = {
    "this trainer always does that": (
        *("--use-mcore-models", "--use-dist-ckpt", "--auto-detect-ckpt-format", "--log-throughput"),
        *("--log-timers-to-tensorboard", "--no-use-tokenizer-model-from-checkpoint-args"),
        *("--disable-use-tokenizer-model-from-checkpoint-args", "--no-async-tensor-model-parallel-allreduce"),
        *("--no-use-layer-wise-param-layout", "--disable-use-layer-wise-param-layout"),
    ),
    "Megatron-LM has no such thing any more": (
        *("--lazy-mpu-init", "--no-scatter-gather-tensors-in-pipeline", "--legacy-tokenizer", "--dist-ckpt-format"),
        *("--onnx-safe", "--openai-gelu"),
    ),
    "this trainer has no such service": (
        *("--no-one-logger", "--one-logger-*", "--app-tag-run-*", "--disable-msc", "--enable-msc"),
        *("--run-workload-inspector-server", "--straggler-*", "--log-straggler", "--disable-straggler-on-startup"),
        *("--adlr-autoresume*", "--no-record-throughput", "--log-energy", "--log-progress"),
        *("--flight-recorder-*", "--no-flight-recorder-*", "--disable-flight-recorder-*", "--gpu-sniff-test-interval"),
    ),
    "checkpoints are written by a process forked for each": (
        *("--use-persistent-ckpt-worker", "--async-strategy", "--async-ckpt-*", "--dist-ckpt-workers"),
    ),
    "a checkpoint is always verified before it is loaded": (
        *("--verify-integrity", "--*-ckpt-load-validate-sharding-integrity", "--*-strict-fsdp-dtensor-load"),
    ),
    "a non-finite loss ends the run, and --ft-dmr finds wrong results": (
        *("--rerun-mode", "--error-injection-rate", "--error-injection-type", "--check-for-spiky-loss"),
    ),
    "the flags of text generation have no effect on training": (
        *("--inference-*", "--no-inference-*", "--max-tokens-to-oom", "--use-legacy-static-engine", "--prompts"),
        *("--enable-chunked-prefill", "--disable-chunked-prefill", "--decode-only-cuda-graphs", "--temperature"),
        *("--top_k", "--top_p", "--top-n-logprobs", "--return-log-probs", "--num-tokens-to-generate", "--stop-words"),
        *("--prompt-file", "--prompt-file-num-truncate", "--num-tokens-from-file", "--output-path", "--termination-id"),
        *("--output-every-n-results", "--incoming-requests-per-*", "--use-flashinfer-fused-rope", "--use-coordinator"),
        *("--mamba-inference-*", "--moe-pad-experts-for-cuda-graph-inference", "--num-speculative-tokens"),
        *(
            "--async-mode",
            "--suspend-resume-interval",
            "--suspend-timeout",
            "--throughput-check-only",
            "--flash-decode",
        ),
        *("--cache-mla-latents", "--use-same-sampling-seed-across-dp-ranks", "--symmetric-ar-type"),
        *("--throughput-check-only", "--mlp-chunks-for-prefill", "--model-provider"),
    ),
    "which GPT is trained follows from the other flags": ("--is-hybrid-model",),
}
"""Why a flag has no effect -> the flags. A star stands for any letters. A flag's values are read and ignored."""

OTHER_PROGRAMS: dict[str, tuple[str, ...]] = {
    "reinforcement learning": (
        *("--rl-*", "--no-rl-*", "--grpo-*", "--langrl-*", "--no-langrl-*", "--perform-rl-step", "--refit-method"),
    ),
    "vision models": (
        *("--img-*", "--vision-*", "--dino-*", "--mask-*", "--swin-*", "--iter-per-epoch", "--num-classes"),
        *("--classes-fraction", "--data-per-class-fraction", "--head-lr-mult", "--no-data-sharding", "--patch-dim"),
    ),
    "retrieval and BERT": (
        *(
            "--biencoder-*",
            "--retriever-*",
            "--bert-*",
            "--ict-*",
            "--indexer-*",
            "--block-data-path",
            "--short-seq-prob",
        ),
        *("--embedding-path", "--evidence-data-path", "--titles-data-path", "--query-in-block-prob"),
        *("--use-one-sent-docs", "--output-bert-embeddings", "--sample-rate"),
    ),
    "distillation and quantisation with ModelOpt": ("--export-*", "--logits-*"),
    "elastic models (flextron)": (
        *("--flextron", "--budget-*", "--*-int-list", "--router-*", "--slice", "--soft-mask", "--binary-mask"),
        *("--enable-router", "--tau-*", "--hard-sample-th", "--loss-alpha", "--lr-mult-router"),
        *("--linear-scaler-*", "--original-model-sample-prob"),
    ),
    "conversion of checkpoints": ("--ckpt-convert-*",),
}
"""A program of Megatron-LM's that is not this trainer -> its flags."""

INSTEAD: dict[str, tuple[str, ...]] = {
    "start the run with ft run, and give --ft-hot-swap behind the script": ("--inprocess-*", "--enable-ft-package"),
    "start the run with ft run, which has time limits of its own": ("--calc-ft-timeouts", "--ft-num-warmup-iters"),
    "--ft-hot-swap keeps copies of the state in other nodes' memory": (
        *("--replication*", "--non-persistent-local-*"),
    ),
    "ft run --inject injects faults (ft faults)": ("--fault-injector-*",),
    "drop it: megatron-core's models are the only ones": ("--use-legacy-models",),
    "give the flags themselves": ("--yaml-cfg",),
}
"""What this project has in place of a flag -> the flags, which are refused."""

OF_FT_RUN = ("--ft-hsdp-*", "--ft-spare-*", "--ft-transport")
"""Options of ``ft run``, which launches the script."""

RENAMED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations",
}
"""Flags that Megatron-LM itself rejects, with their replacements."""


@cache
def megatron_lm_flags() -> dict[str, str]:
    """Return each flag of Megatron-LM's own parser (0.16.1 to 0.19.0) -> the first megatron-core that has its field.

    The release is "" if that is 0.16, or if the flag has no field.
    """
    lines = (Path(__file__).parent / "megatron_lm_flags.txt").read_text().splitlines()
    return {flag: release for flag, _, release in (line.partition(" ") for line in lines)}


def newer_release(flags: Sequence[str]) -> str:
    """Return the first release of megatron-core, above 0.16, with the field of one of ``flags``; "": there is none."""
    return next((release for flag in flags if (release := megatron_lm_flags().get(flag))), "")


def without_effect(flag: str) -> str | None:
    """Return why ``flag`` has no effect in this trainer; None if it is not such a flag."""
    return _looked_up(flag, NO_EFFECT)


def idle(options: Any) -> list[str]:
    """Return a sentence about each given flag that has no effect in combination with the others."""
    c, o = options.checkpoint, options.core
    graphs = getattr(o, "cuda_graph_impl", None)
    found = {
        f"--save-interval {c.save_interval}: without --save no checkpoints are written": (
            c.save_interval is not None and c.save is None
        ),
        f"--attention-backend {o.attention_backend}: --transformer-impl local has one attention only": (
            o.attention_backend not in (None, "auto", "local") and o.transformer_impl == "local"
        ),
        f"--cuda-graph-impl {graphs}: this trainer captures graphs with --cuda-graph-impl local only": (
            graphs in ("transformer_engine", "full_iteration")
        ),
        "--cuda-graph-scope full_iteration: this trainer captures graphs of layers only": (
            "full_iteration" in (o.cuda_graph_scope or [])
        ),
        "--external-cuda-graph: this trainer captures graphs with --cuda-graph-impl local only": (
            getattr(o, "external_cuda_graph", False)
        ),
        "--optimizer-cuda-graph: this trainer captures graphs of layers only": (
            getattr(o, "optimizer_cuda_graph", False)
        ),
        "--wandb-entity, --wandb-exp-name or --wandb-save-dir: without --wandb-project": (
            not options.logging.wandb_project
            and any((options.logging.wandb_entity, options.logging.wandb_exp_name, options.logging.wandb_save_dir))
        ),
    }
    return [f"without effect here: {text}" for text, applies in found.items() if applies]


def explain(unknown: str, supported: Sequence[str]) -> tuple[Problem, str | None]:
    """Explain what is wrong with ``unknown``, and what to write instead.

    Args:
        unknown: a command-line word that starts with ``--``, without ``=value``.
        supported: every flag of the parser.

    Returns:
        ((problem, fix), the flag that was probably meant, None if there is no candidate).
    """
    if any(fnmatch.fnmatchcase(unknown, option) for option in OF_FT_RUN):
        return (f"{unknown} is an option of ft run", f"give it before the script: ft run {unknown} ... SCRIPT"), None
    if unknown in RENAMED:
        return (f"{unknown} is no longer a Megatron-LM flag", f"use {RENAMED[unknown]}"), RENAMED[unknown]
    if program := _looked_up(unknown, OTHER_PROGRAMS):
        return (f"{unknown} is a flag of another program, {program}", "remove it: this program trains a GPT"), None
    if instead := _looked_up(unknown, INSTEAD):
        return (f"{unknown} is a Megatron-LM flag that is not supported here", instead), None
    if release := newer_release([unknown]):
        return (f"{unknown} needs megatron-core >= {release}", f"pip install 'megatron-core>={release}'"), None
    if unknown in megatron_lm_flags():
        return (f"{unknown} is a Megatron-LM flag that is not supported here", "remove it from the command"), None
    meant = nearest(unknown, supported)
    return (f"unknown flag {unknown}", f"did you mean {meant}?" if meant else "see --help"), meant


def _looked_up(flag: str, table: dict[str, tuple[str, ...]]) -> str | None:
    for text, flags in table.items():
        if any(fnmatch.fnmatchcase(flag, known) for known in flags):
            return text
    return None
