"""Train a model for a few steps in one process, under a probe that repeats every operator (self-test of DMR)."""

import contextlib
import io
import os
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from ft.base.errors import UserError
from ft.lab.reproducibility.probe import Case, Probe
from ft.protection.flags import FaultToleranceOptions
from megatron import patches
from megatron.ft_trainer import determinism
from megatron.ft_trainer.arguments import Options, check, parse
from megatron.ft_trainer.arguments.topics import (
    CheckpointOptions,
    DataOptions,
    EvaluationOptions,
    LoggingOptions,
    TokenizerOptions,
)
from megatron.ft_trainer.data.tokenizer import build_tokenizer
from megatron.ft_trainer.initialize import destroy, init_model_parallel
from megatron.ft_trainer.loop import train_step
from megatron.ft_trainer.model import transformer_config
from megatron.ft_trainer.pretrain import assemble

STEPS = 2
"""Steps to train: in the second one, gradients and optimizer states are not zero."""


def watch(case: Case, probe: Probe, layers: int = 0) -> None:
    """Train ``case`` under ``probe``, with at most ``layers`` layers (0: all).

    Raises:
        UserError: the flags do not work on one rank, or the model does not fit this device.
    """
    options = alone(parse(case.flags), layers)
    layout = check(options, 1, has_te=patches.platform().offers("transformer_engine"))
    transformer_config(options, layout)
    if options.core.deterministic_mode:
        determinism.enforce()
    probe.case = case.name
    with _one_rank(options), contextlib.redirect_stdout(io.StringIO()):
        init_model_parallel(options.core, layout)
        try:
            job = assemble(options, layout, time.monotonic())
            with probe:
                for _ in range(STEPS):
                    train_step(job)
        except torch.OutOfMemoryError as error:
            raise UserError(f"the model does not fit this device: {error}", "--layers 2, or a smaller model") from error


def alone(options: Options, layers: int = 0) -> Options:
    """Return options for the same model on one rank, trained on mock data and without checkpoints.

    Layers that a tensor-parallel run splits over ranks are whole here, so their operators have larger inputs.
    """
    given, training = options.core, options.training
    core = given.on_one_rank()
    core.use_distributed_optimizer = given.use_distributed_optimizer
    core.distributed_backend = given.distributed_backend
    if options.core.num_layers and layers:
        options.core.num_layers = min(options.core.num_layers, layers)
    return replace(
        options,
        core=core,
        training=replace(
            training,
            global_batch_size=2 * (training.micro_batch_size or 1),
            train_iters=STEPS,
        ),
        tokenizer=_null_tokenizer(options),
        data=DataOptions(
            mock_data=True,
            seq_length=options.data.seq_length,
            reset_position_ids=options.data.reset_position_ids,
            reset_attention_mask=options.data.reset_attention_mask,
            eod_mask_loss=options.data.eod_mask_loss,
        ),
        evaluation=EvaluationOptions(eval_iters=0),
        checkpoint=CheckpointOptions(),
        logging=LoggingOptions(log_interval=STEPS + 1),
        fault_tolerance=FaultToleranceOptions(ft_dmr="piggyback"),  # execute the same operators as a run with DMR
    )


def _null_tokenizer(options: Options) -> TokenizerOptions:
    """Return options for a tokenizer with a vocabulary of the same size that needs no files."""
    size = build_tokenizer(options.tokenizer, options.data.prefix).vocab_size
    return replace(options.tokenizer, tokenizer_type="NullTokenizer", tokenizer_model=None, vocab_size=size)


@contextlib.contextmanager
def _one_rank(options: Options) -> Iterator[None]:
    """Create a world with only this process, without a network."""
    here = patches.platform()
    here.select_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = here.choose_backend(options.core.distributed_backend)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        destroy()
