"""Loads a trained model for inference in one process, with the options stored in its checkpoint."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint import FileSystemReader

from ft.base.errors import UserError
from ft.base.options import build
from megatron import patches
from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model
from megatron.ft_trainer import model
from megatron.ft_trainer.arguments import Options, check
from megatron.ft_trainer.arguments.core_options import OF_THE_MODEL
from megatron.ft_trainer.arguments.topics import TokenizerOptions
from megatron.ft_trainer.checkpointing import inventory
from megatron.ft_trainer.checkpointing.checkpointer import types_checked
from megatron.ft_trainer.data.tokenizer import Tokenizer, build_tokenizer, read_sidecar
from megatron.ft_trainer.initialize import init_model_parallel, init_process_group, seed_everything
from megatron.ft_trainer.launcher import Launch


class Trained(NamedTuple):
    """A model ready for inference, with the tokenizer and the options that it was trained with."""

    chunk: torch.nn.Module
    tokenizer: Tokenizer
    options: Options


def load_for_inference(folder: Path) -> Trained:
    """Load the newest checkpoint in ``folder``, of either trainer, as one whole model, in a world of one rank.

    Raises:
        UserError: there is no checkpoint, or none of the reference trainer's that passes verification, or to read it
            could execute code.
    """
    checkpoint = newest(folder)
    with types_checked(checkpoint):
        FileSystemReader(checkpoint).read_metadata()  # core's reader hides what is wrong with it
        options = options_in(checkpoint)
    layout = check(options, 1, has_te=patches.platform().offers("transformer_engine"))
    init_process_group(options.core, Launch(0, 1, 0))
    init_model_parallel(options.core, layout)
    seed_everything(options)
    tokenizer = build_tokenizer(options.tokenizer, options.data.prefix)
    _, (chunk,) = model.build_model(options, layout, options.tokenizer.padded_vocab_size)
    part = unwrap_model(chunk)
    with types_checked(checkpoint):
        part.load_state_dict(dist_checkpointing.load({"model": part.sharded_state_dict()}, str(checkpoint))["model"])
    chunk.eval()
    return Trained(chunk, tokenizer, options)


def newest(folder: Path) -> Path:
    """Return the checkpoint that NVIDIA's trainer names the newest, or the reference trainer's newest sound one.

    Raises:
        UserError: there is none.
    """
    wrong: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        named = folder / inventory.checkpoint_name(int(inventory.tracked_step(folder) or ""))
        if named.is_dir() and not (named / inventory.MANIFEST).exists():
            return named
    for entry in inventory.newest_first(inventory.scan(folder)) if folder.is_dir() else ():
        checkpoint = folder / entry.name
        found = inventory.problems(checkpoint, inventory.read_manifest(checkpoint).files)
        if not found:
            return checkpoint
        wrong += found
    problem = "".join([f"{folder} holds no complete checkpoint", *(f"\n    {line}" for line in wrong)])
    raise UserError(problem, "give a --save folder of pretrain_gpt.py")


def options_in(checkpoint: Path) -> Options:
    """Return the model's options and the tokenizer's that either trainer has stored in a checkpoint.

    Raises:
        UserError: the checkpoint has none.
    """
    given = dist_checkpointing.load_common_state_dict(str(checkpoint)).get("args")
    if given is None:
        raise UserError(f"{checkpoint} does not say what model it has", "give a --save folder of pretrain_gpt.py")
    values, options = vars(given), Options()
    core = {name: values[name] for name in (*OF_THE_MODEL, "transformer_impl", "bf16", "fp16") if name in values}
    if not core["group_query_attention"]:
        core["num_query_groups"] = None  # NVIDIA's trainer has filled it in
    options.core = build(type(options.core), core)
    options.training.micro_batch_size = options.training.train_iters = 1  # nothing is trained
    options.core.lr = 0.0
    options.data.seq_length, options.data.data_path = values["seq_length"], values["data_path"]
    options.data.mock_data = not values["data_path"]
    options.core.max_position_embeddings = values["max_position_embeddings"]
    names = ("tokenizer_model", "vocab_file", "merge_file", "vocab_size", "padded_vocab_size")
    options.tokenizer = build(TokenizerOptions, {name: values[name] for name in names})
    if options.data.prefix is None or read_sidecar(options.data.prefix) is None:
        options.tokenizer.tokenizer_type = values["tokenizer_type"]
    else:
        options.tokenizer.vocab_size = None
    return options
