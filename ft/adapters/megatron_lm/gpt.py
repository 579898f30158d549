"""GPT for NVIDIA's trainer in the installed megatron-core: datasets, forward step and loss.

The trainer is :mod:`megatron.training`. It parses the command line, builds the model, and trains; this module gives it
what a training script has to give. Import it after :func:`ft.adapters.megatron_lm.start.load`.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ft.base import bounded_json, files
from megatron import patches
from megatron.core import parallel_state
from megatron.core import utils as core_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.training import get_args, get_timers, inprocess_restart, pretrain, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

_SPIKE = 10
"""Multiple of the largest loss so far above which --check-for-spiky-loss reports a loss."""

_OF_PACKING = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
_OF_SAMPLES = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask", "local_cp_size", "hybrid_cp_group")
"""What a batch may have: ends of the packed sequences, and values for each token."""

_DATASET_ARGUMENTS = {
    "seed": "random_seed",
    "seq_length": "sequence_length",
    "data_cache_path": "path_to_cache",
    "create_attention_mask_in_dataloader": "create_attention_mask",
    "dataloader_fast_cache_load": "fast_cache_load",
    "dataloader_defer_npy_index_mmap": "defer_npy_index_mmap",
    "dataloader_inter_document_masking": "inter_document_masking",
    **{
        name: name
        for name in (
            *("split", "multiple_validation_sets", "full_validation", "num_dataset_builder_threads", "mmap_bin_files"),
            *("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "object_storage_cache_path"),
            *("mid_level_dataset_surplus", "allow_ambiguous_pad_tokens", "context_parallel_size"),
            *("data_parallel_size", "hybrid_context_parallel"),
        )
    },
}
"""Argument of the trainer -> field of core's configuration of a dataset."""

_straggler = core_utils.StragglerDetector()


def main() -> None:
    """Train a GPT as the flags in ``sys.argv`` say; each means what it means for Megatron-LM's ``pretrain_gpt.py``."""
    train, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    if patches.platform().name == "cpu":
        sys.argv[1:1] = WITHOUT_GPU
    args = parse_and_validate_args(args_defaults=defaults(sys.argv[1:]))
    train(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=embedding_ranks,
    )


WITHOUT_GPU = (
    *("--transformer-impl", "local", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
    *("--no-persist-layer-norm", "--no-rope-fusion", "--distributed-backend", "gloo"),
)
"""Flags that come before those of the command line on a machine without a GPU, where the trainer needs them."""


_MANY = 2**31 - 1
"""More steps than any run has."""


def defaults(flags: Sequence[str]) -> dict[str, Any]:
    """Return this script's default values of arguments, for those that the command line does not set.

    They are the tokenizer with which the dataset was made, else GPT2BPETokenizer; as many positions as tokens in a
    sample; and checkpoints (``--save``) and evaluations at the end only.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--train-iters", type=int, default=_MANY)
    parser.add_argument("--data-path", nargs="*", default=[])
    given, _ = parser.parse_known_args(list(flags))
    found: dict[str, Any] = {"tokenizer_type": "GPT2BPETokenizer", "max_position_embeddings": given.seq_length}
    found["save_interval"] = found["eval_interval"] = given.train_iters
    made = next((file for path in given.data_path if (file := Path(f"{path}.meta.json")).is_file()), None)
    if made is None:
        return found
    read = bounded_json.loads(files.read_text(made))  # of tools/preprocess_data.py
    if read["tokenizer_type"] == "ByteLevelTokenizer":  # NVIDIA's trainer has none: bytes are ids, and 256 ends a text
        return found | {"tokenizer_type": "NullTokenizer", "vocab_size": 257}
    return found | {name: read[name] for name in ("tokenizer_type", "tokenizer_model")}


def embedding_ranks(stages: list[int]) -> list[int]:
    """Return which ranks of a pipeline group, given in the order of stages, have a copy of the word embeddings."""
    if len(stages) == 1:
        return list(stages)
    args = get_args()
    last = [] if args.untie_embeddings_and_output_weights else [stages[-1]]
    return sorted({stages[0], *last, *get_mtp_ranks(stages, core_transformer_config_from_args(args))})


# ------------------------------------------------------------------------------------------------------------ data


def datasets(samples: Sequence[int | None], vp_stage: int | None = None) -> tuple:
    """Return the datasets for training, validation and test; None on ranks that read no samples.

    Args:
        samples: how many samples of each are needed.
        vp_stage: number of the model chunk on this rank, None if there is one only.
    """
    args = get_args()
    if args.sft:
        kind = SFTDataset
    elif args.mock_data:
        kind = MockGPTDataset
    else:
        kind = GPTFIMDataset if args.fim_data else GPTDataset
    reads = functools.partial(_reads_samples, vp_stage)
    return tuple(BlendedMegatronDatasetBuilder(kind, samples, reads, _dataset_config(args)).build())


datasets.is_distributed = True  # the trainer calls it on all ranks


def _reads_samples(vp_stage: int | None) -> bool:
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return get_args().sft or _needs_tokens(vp_stage)


def _needs_tokens(vp_stage: int | None) -> bool:
    """Return whether this model chunk embeds tokens or computes a loss."""
    return is_first_or_last_pipeline_stage(vp_stage) or _predicts_several(vp_stage)


def _predicts_several(vp_stage: int | None) -> bool:
    """Return whether this model chunk has layers of multi-token prediction (--mtp-num-layers)."""
    args = get_args()
    if not args.mtp_num_layers:
        return False
    config = core_transformer_config_from_args(args)
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def _dataset_config(args: Any) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    counts = args.per_dataset_sequences_path
    values = {
        **{field: getattr(args, name) for name, field in _DATASET_ARGUMENTS.items()},
        "tokenizer": build_tokenizer(args),
        "blend": blend,
        "blend_per_split": blend_per_split,
        "sequences_per_dataset": None if counts is None else bounded_json.loads(files.read_text(Path(counts))),
        "sequence_parallel_size": args.tensor_model_parallel_size if args.sequence_parallel else 0,
    }
    if not args.fim_data:
        return GPTDatasetConfig(**values)
    for name in ("rate", "spm_rate", "split_sample", "fragment_rate", "no_prefix"):
        values[f"fim_{name}"] = getattr(args, f"fim_{name}")
    tokens = {name: getattr(args, f"fim_{name}_token") for name in ("prefix", "middle", "suffix", "pad", "eod")}
    return GPTFIMDatasetConfig(**values, fim_extra_tokens=tokens)


def _next_batch(samples: Iterator[dict[str, Any]] | None, vp_stage: int | None) -> dict[str, Any]:
    """Return this rank's part of the next microbatch: the values in ``_OF_SAMPLES`` and ``_OF_PACKING`` that it needs.

    The first tensor-parallel rank reads it. [micro batch, sequence] each.
    """
    args = get_args()
    packs = args.sft or args.dataloader_inter_document_masking
    needs_tokens = _needs_tokens(vp_stage)
    if not needs_tokens and not packs:
        return {}
    rank, batch = parallel_state.get_tensor_model_parallel_rank(), {}
    if rank == 0:
        read = next(samples)
        batch = {**read, **dict.fromkeys((*_OF_SAMPLES, *_OF_PACKING))}
        on_device = {name: read[name].cuda(non_blocking=True) for name in batch if torch.is_tensor(read.get(name))}
        batch.update(on_device)
    batch = core_utils.get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packs,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_predicts_several(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    batch = core_utils.flatten_batch_for_packed_sequences(batch)
    if not needs_tokens:
        return {name: batch[name] for name in _OF_PACKING}
    return core_utils.get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=parallel_state.get_context_parallel_group(),
        hybrid_cp_group_func=parallel_state.get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
    )


# ------------------------------------------------------------------------------------------------------------ step


def forward_step(
    samples: Iterator[dict[str, Any]] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., tuple]]:
    """Run the forward pass of a microbatch.

    Args:
        samples: the samples; None on ranks that read none.
        return_schedule_plan: return core's plan of the pass instead of running it
            (--overlap-moe-expert-parallel-comm).

    Returns:
        (the output: losses of the tokens, an activation for the next stage, or the plan; the function that computes
        the loss from it).
    """
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    with _straggler(bdata=True):
        batch = _next_batch(samples, core_utils.get_attr_wrapped_model(model, "vp_stage"))
    packing = _packing(batch)
    timer.stop()
    inputs = [batch.get(name) for name in ("tokens", "position_ids", "attention_mask")]
    targets = {name: batch.get(name) for name in ("labels", "loss_mask")}
    with _straggler:
        if return_schedule_plan:
            output = model.build_schedule_plan(*inputs, **targets)
        else:
            output = model(*inputs, **targets, packed_seq_params=packing)
    return output, functools.partial(loss_of, targets["loss_mask"], model=model)


def _packing(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Return where the sequences of a packed batch end; None if its samples are not packed."""
    if batch.get("cu_seqlens") is None:
        return None
    ends = batch["cu_seqlens"].squeeze(0)
    training.update_seqlen_stats_from_cu_seqlens(ends)  # the trainer counts floating-point operations of real tokens
    padded = batch.get("cu_seqlens_padded")
    padded = None if padded is None else padded.squeeze(0)
    used = ends if padded is None else padded
    longest, local = int(batch["max_seqlen"].item()), batch.get("local_cp_size")
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=used,
        cu_seqlens_kv=used,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if local is None else int(local.item()),
        cp_group=batch.get("hybrid_cp_group"),
        tokens_per_sample=get_args().seq_length,
    )


def loss_of(
    mask: torch.Tensor, output: torch.Tensor, model: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (sum of the losses of a microbatch's tokens, number of these tokens, what the trainer logs).

    Args:
        mask: 1 for each token that counts, 0 for others; [micro batch, sequence].
        output: loss of each token, of the same shape.
        model: the model chunk, for the distillation of a teacher's logits (--logits-load-dir).
    """
    args = get_args()
    if args.logits_load_dir is not None:
        loss, tokens, report = _distillation()(mask, output, model=model)
    else:
        counted = mask.view(-1).float()
        loss = torch.sum(output.view(-1).float() * counted)
        tokens = counted.sum().detach().to(torch.int)
        report = {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}
    _check(loss)
    return loss, tokens, report


@functools.cache
def _distillation() -> Callable[..., tuple]:
    from megatron.training.distillation import LossFuncCallable

    args = get_args()
    given = {name: getattr(args, f"logits_load_{name}") for name in ("decode_threads", "prefetch_factor")}
    given |= {name: getattr(args, f"logits_load_{name}") for name in ("msc_prefetch_depth", "kd_loss_alpha")}
    return LossFuncCallable(logprobs_dir=args.logits_load_dir, ignore_errors=args.logits_load_ignore_errors, **given)


def _check(loss: torch.Tensor) -> None:
    """Let core's rerun state machine judge the loss, before the data-parallel ranks add up theirs."""
    args, machine = get_args(), get_rerun_state_machine()
    rejected = []
    if args.check_for_nan_in_loss_and_grad:
        rejected += [(torch.isnan, "the loss is NaN", True), (torch.isinf, "the loss is infinite", True)]
    if args.check_for_spiky_loss:
        is_spike = functools.partial(machine.is_unexpectedly_large, threshold=_SPIKE, context="loss")
        rejected.append((is_spike, "the loss is far above those before", False))
    for rejects, message, is_fatal in rejected:
        # A repetition of the forward pass gives the same bits, so that any difference is an error.
        machine.validate_result(loss, rejection_func=rejects, message=message, tolerance=0.0, fatal=is_fatal)
