"""The options that are not megatron-core's, one dataclass per topic."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ft.base.errors import Problem
from ft.base.options import Topic, flag


@dataclass
class TrainingOptions(Topic):
    """training"""

    reference_trainer: bool = False
    """Train with this trainer, the reference, also where megatron-core carries NVIDIA's."""

    micro_batch_size: int | None = flag(None, least=1)
    """Samples in one forward on one data-parallel rank."""

    global_batch_size: int | None = flag(None, least=1)
    """Samples in a step over all data-parallel ranks. Default: micro batch x DP."""

    train_iters: int | None = flag(None, least=1)
    """Steps to train for."""

    exit_interval: int | None = flag(None, least=1)
    """Save and stop at the first step that this divides."""

    exit_duration_in_mins: float | None = None
    """Save and stop after this many minutes."""

    exit_signal_handler: bool = flag(True, on="--exit-signal-handler", off="--no-exit-signal-handler")
    """Let --exit-signal end the run at the end of a step, with a checkpoint."""

    exit_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"] = "SIGTERM"
    """The signal that does so; a second one ends the process at once."""

    seed: int = 1234
    """Seed of weights, data order and dropout."""

    check_for_nan_in_loss_and_grad: bool = True
    """Look for NaN and infinity in loss and gradients."""

    enable_experimental: bool = False
    """Allow what megatron-core calls experimental."""

    @property
    def exit_signum(self) -> signal.Signals:
        return signal.Signals[self.exit_signal]


@dataclass
class EvaluationOptions(Topic):
    """validation"""

    eval_iters: int = flag(100, least=0)
    """Batches in one evaluation; 0: none."""

    eval_interval: int | None = flag(None, least=1)
    """Steps between evaluations. Default: only at the end."""


@dataclass
class ScheduleOptions(Topic):
    """learning rate and weight decay"""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay (WSD: with NVIDIA's trainer only)."""

    lr_decay_iters: int | None = None
    """Steps of decay. Default: --train-iters."""

    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""

    override_opt_param_scheduler: bool = flag(
        False, on=["--override-opt-param-scheduler", "--override-opt_param-scheduler"]
    )
    """On resuming take the schedule from the flags, not from the checkpoint."""

    use_checkpoint_opt_param_scheduler: bool = flag(
        False, on=["--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"]
    )
    """On resuming take the schedule from the checkpoint, whatever the flags say."""

    def contradictions(self) -> Iterator[Problem]:
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            yield (
                "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other",
                "give one of them",
            )


OF_CORE = {
    "GPT2BPETokenizer": "megatron",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
    "HuggingFaceTokenizer": "huggingface",
}
"""Value of --tokenizer-type -> name of the library in megatron-core's tokenizers that reads its files."""

TOKENIZERS = ("ByteLevelTokenizer", "NullTokenizer", *OF_CORE)


@dataclass
class DataOptions(Topic):
    """data and dataloader"""

    data_path: list[str] | None = None
    """Prefix of the indexed dataset: its path without .bin or .idx."""

    split: str | None = None
    """Comma-separated shares of documents for train, valid and test, e.g. 969,30,1."""

    data_cache_path: str | None = None
    """Folder for the sample indices; default: a cache folder beside the data."""

    mock_data: bool = False
    """Train on synthetic samples; needs no data path."""

    seq_length: int | None = flag(None, least=1)
    """Tokens in a sample."""

    num_workers: int = 2
    """Without effect: this trainer reads samples inside the training loop."""

    reset_position_ids: bool = False
    """Start position ids afresh after every end-of-document token."""

    reset_attention_mask: bool = False
    """Let no token attend across an end-of-document token."""

    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""

    def contradictions(self) -> Iterator[Problem]:
        if self.mock_data and self.data_path:
            yield "--mock-data was given together with --data-path", "drop one of them"

    @property
    def prefix(self) -> str | None:
        """Return the prefix of the dataset; None with --mock-data."""
        return self.data_path[0] if self.data_path else None


@dataclass
class TokenizerOptions(Topic):
    """tokenizer"""

    tokenizer_type: Literal[TOKENIZERS] | None = None
    """ByteLevelTokenizer (256 bytes + special tokens), NullTokenizer
    (token ids are numbers), or one of megatron-core's library. Default: what the dataset was made with; with
    --vocab-file and --merge-file GPT2BPETokenizer, else ByteLevelTokenizer."""

    tokenizer_model: str | None = None
    """File of the tokenizer, or folder of a HuggingFaceTokenizer."""

    vocab_file: str | None = None
    """Vocabulary of a GPT2BPETokenizer."""

    merge_file: str | None = None
    """Merges of a GPT2BPETokenizer."""

    vocab_size: int | None = None
    """Size of the vocabulary before padding; needed by NullTokenizer, checked against the others."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""

    padded_vocab_size: int | None = None
    """Padded vocabulary size to use instead of computing it."""

    def contradictions(self) -> Iterator[Problem]:
        if self.tokenizer_type is None and self.vocab_file and self.merge_file:
            self.tokenizer_type = "GPT2BPETokenizer"
        kind = self.tokenizer_type
        if kind == "NullTokenizer" and not self.vocab_size:
            yield "NullTokenizer needs the number of token ids", "add --vocab-size N"
        elif kind == "GPT2BPETokenizer" and not (self.vocab_file and self.merge_file):
            yield "GPT2BPETokenizer needs its files", "add --vocab-file FILE --merge-file FILE"
        elif kind in OF_CORE and kind != "GPT2BPETokenizer" and not self.tokenizer_model:
            yield f"{kind} needs its file", "add --tokenizer-model FILE"


AUTO: Literal["auto"] = "auto"
"""Value of ``save_interval`` until the plan of the run is known."""


def _steps_or_auto(word: str) -> int | Literal["auto"]:
    return AUTO if word == AUTO else int(word)


@dataclass
class CheckpointOptions(Topic):
    """checkpointing"""

    save: str | None = None
    """Folder in which checkpoints are written."""

    save_interval: int | Literal["auto"] | None = flag(
        None, on=["--save-interval", "--persistent-save-interval"], parse=_steps_or_auto, least=1
    )
    """Steps between checkpoints; auto: as the plan of a SPARe run says (ft run --ft-spare-plan)."""

    keep_last: int | None = flag(None, least=1)
    """Complete checkpoints to keep; older ones are removed after a newer one is complete. Default: keep all."""

    load: str | None = None
    """Folder to resume from: the newest complete checkpoint that verifies, or --ckpt-step."""

    ckpt_step: int | None = None
    """Load the checkpoint of this step and no other."""

    exit_on_missing_checkpoint: bool = False
    """Stop if --load holds no checkpoint, rather than starting from random weights."""

    finetune: bool = False
    """Load the weights only and start at step 0."""

    dist_ckpt_optim_fully_reshardable: bool = flag(
        True, on="--dist-ckpt-optim-fully-reshardable", off="--no-dist-ckpt-optim-fully-reshardable"
    )
    """Store the distributed optimizer so that it loads into any TP x PP x DP (off: only DP may change, but saving is
    faster, and ft diagnose compare can name the rank of a wrong shard)."""

    def contradictions(self) -> Iterator[Problem]:
        if self.ckpt_step is not None and self.load is None:
            yield "--ckpt-step was given without --load", "add --load FOLDER"


@dataclass
class LoggingOptions(Topic):
    """logging"""

    log_interval: int = flag(100, least=1)
    """Steps between lines on the terminal."""

    metrics_file: str | None = None
    """Append one JSON object per step: step, loss, grad_norm, lr, consumed_samples, step_time_s, tokens_per_s, ..."""

    logging_level: int | None = flag(None, on="--logging-level")
    """Level of Python's logging for megatron-core (10 debug ... 40 error). Default: errors only."""
