"""Loads a trained model for inference: in one process, with the options that are stored in its checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ft.base.errors import UserError
from megatron import patches
from megatron.ft_trainer import model
from megatron.ft_trainer.arguments import Options, check
from megatron.ft_trainer.arguments.checkpoint import CheckpointOptions
from megatron.ft_trainer.checkpointing import Checkpointer, TrainState, naming, verify
from megatron.ft_trainer.checkpoints import say
from megatron.ft_trainer.data.tokenizer import Tokenizer, build_tokenizer
from megatron.ft_trainer.initialize import init_model_parallel, init_process_group, seed_everything
from megatron.ft_trainer.launcher import Launch
from megatron.ft_trainer.pretrain import run_info


@dataclass
class Trained:
    """A model ready for inference, with the tokenizer, options and step that it was trained with."""

    chunk: torch.nn.Module
    tokenizer: Tokenizer
    options: Options
    step: int


def load_for_inference(folder: Path) -> Trained:
    """Load the newest valid checkpoint in ``folder`` as one whole model, in a world of one rank.

    Raises:
        UserError: there is no checkpoint, or none that passes verification.
    """
    options = stored_options(folder)
    options.core = options.core.on_one_rank()
    options.checkpoint = CheckpointOptions(load=str(folder), finetune=True)
    options.training.global_batch_size = options.training.rampup_batch_size = None
    layout = check(options, 1, has_te=patches.platform().offers("transformer_engine"))
    init_process_group(options.core, Launch(0, 1, 0))
    init_model_parallel(options.core, layout)
    seed_everything(options)
    tokenizer = build_tokenizer(options.tokenizer)
    vocab_size = options.tokenizer.padded_vocab_size
    _, chunks = model.build_model(options, layout, vocab_size)
    checkpointer = Checkpointer(options.checkpoint, layout=vars(layout), run_info=run_info(options, tokenizer), log=say)
    report = checkpointer.load(TrainState(), chunks, None, None, options.training.seed)
    checkpointer.close()
    chunks[0].eval()
    return Trained(chunks[0], tokenizer, options, report.step)


def stored_options(folder: Path) -> Options:
    """Return the options of the run that wrote the newest complete checkpoint in ``folder``.

    Raises:
        UserError: the folder contains no complete checkpoint.
    """
    newest = naming.newest_complete(verify.scan(folder)) if folder.is_dir() else None
    if newest is None:
        raise UserError(f"{folder} holds no complete checkpoint", "give a --save folder of pretrain_gpt.py")
    return Options.from_dict(verify.read_manifest(folder / newest.name).run["options"])
