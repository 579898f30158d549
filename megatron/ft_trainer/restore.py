"""Loads a trained model for inference in one process, with the options stored in its checkpoint, and samples text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ft.base.errors import UserError
from megatron import patches
from megatron.ft_trainer import model
from megatron.ft_trainer.arguments import Options, check
from megatron.ft_trainer.arguments.topics import CheckpointOptions
from megatron.ft_trainer.checkpointing import inventory
from megatron.ft_trainer.checkpointing.checkpointer import Checkpointer
from megatron.ft_trainer.checkpointing.content import TrainState
from megatron.ft_trainer.data.tokenizer import Tokenizer, build_tokenizer
from megatron.ft_trainer.initialize import init_model_parallel, init_process_group, seed_everything
from megatron.ft_trainer.job import say
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
    newest = inventory.newest_complete(inventory.scan(folder)) if folder.is_dir() else None
    if newest is None:
        raise UserError(f"{folder} holds no complete checkpoint", "give a --save folder of pretrain_gpt.py")
    return Options.from_dict(inventory.read_manifest(folder / newest.name).run["options"])


@torch.no_grad()
def generate(
    chunk: torch.nn.Module,
    prompt: list[int],
    *,
    vocab_size: int,
    window: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Iterator[int]:
    """Yield token ids that continue ``prompt``, without end.

    Args:
        chunk: a whole GPT (one stage, no tensor parallelism).
        prompt: at least one token id.
        vocab_size: ids from here on are padding of the embedding and are never sampled.
        window: longest context in tokens.
        temperature: softmax temperature; 0 takes the most likely token.
        top_k: sample among this many of the most likely tokens; 0: among all.
        seed: seed of the sampling.
    """
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    while True:
        context = torch.tensor([ids[-window:]], dtype=torch.long).cuda()
        positions = torch.arange(context.shape[1], device=context.device).unsqueeze(0)
        logits = chunk(context, positions, None)[0, -1, :vocab_size].float().cpu()
        ids.append(sample(logits, temperature, top_k, generator))
        yield ids[-1]


def sample(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Return one sampled token id.

    Args:
        logits: logits of one position, [vocabulary].
        temperature: softmax temperature; 0 takes the most likely token.
        top_k: sample among this many of the most likely tokens; 0: among all.
        generator: random number generator.
    """
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.numel())).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
