"""A whole training run on one rank, from its options to the last checkpoint."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ft.base import events
from ft.base.events import EventLog
from ft.protection.stack import Protections
from ft.record.run import EVENTS
from ft.worker.session import Session
from megatron.ft_trainer import model
from megatron.ft_trainer.arguments import Layout, Options
from megatron.ft_trainer.arguments.core_options import OF_THE_MODEL
from megatron.ft_trainer.checkpointing.checkpointer import Checkpointer
from megatron.ft_trainer.checkpointing.content import TrainState
from megatron.ft_trainer.data.loader import make_loaders
from megatron.ft_trainer.data.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size
from megatron.ft_trainer.exits import Exits
from megatron.ft_trainer.initialize import compile_fused_functions, init_model_parallel, seed_everything
from megatron.ft_trainer.job import Job, load, say
from megatron.ft_trainer.logging.runlog import RunLog, count_parameters, startup_summary
from megatron.ft_trainer.loop import evaluate, train
from megatron.ft_trainer.model import transformer_config
from megatron.ft_trainer.trainer import JobTrainer


def pretrain(options: Options, layout: Layout, protections: Protections | None = None) -> TrainState:
    """Run the training that ``options`` describe, inside an initialized process group of ``layout.world_size`` ranks.

    Args:
        options: options of the run, checked.
        layout: sizes of the parallel groups.
        protections: systems that protect the run; None: no protection.

    Returns:
        the train state at the end of the run: step and consumed samples.
    """
    started = time.monotonic()
    protections = protections or Protections()
    init_model_parallel(options.core, layout)
    job = assemble(options, layout, started, protections)
    trainer = JobTrainer(job)
    job.protection = protections.stack(trainer)
    protections.ends_as(lambda: outcome(job, trainer))
    with job.log, job.exits:
        job.protection.run_with_recovery(lambda: run(job))
    job.checkpointer.close()
    return job.state


def assemble(options: Options, layout: Layout, started: float, protections: Protections | None = None) -> Job:
    """Build everything that a run needs, and load the checkpoint that it resumes from, if there is one.

    Args:
        options: options of the run, checked.
        layout: sizes of the parallel groups.
        started: ``time.monotonic()`` from which --exit-duration-in-mins counts.
        protections: systems that protect the run; None: no protection. If they provide this rank's state, no checkpoint
            is loaded and no startup summary is printed.
    """
    protections = protections or Protections()
    is_given_state = protections.is_given_state
    seed_everything(options)
    # Its random draws come before those of the weights. A state that is given has the random generators' states, too.
    if protections.draws_weights:
        config, gated = transformer_config(options, layout), options.core.swiglu
        compile_fused_functions(config, options.data.seq_length, options.training.micro_batch_size, gated=gated)
    tokenizer = build_tokenizer(options.tokenizer, options.data.prefix)
    vocab_size = padded_vocab_size(options.tokenizer, tokenizer.vocab_size, layout.tp)
    remember_choices(options, tokenizer, vocab_size)
    trainee = model.build(
        options,
        layout,
        vocab_size,
        initialize=protections.draws_weights,
        verified=protections.intercepts_operators,
    )
    if not is_given_state:
        say(
            "\n".join([startup_summary(options, layout, count_parameters(trainee.chunks), tokenizer), *options.notices])
        )

    state = TrainState()
    checkpointer = Checkpointer(
        options.checkpoint,
        layout=vars(layout),
        run_info=run_info(options, tokenizer),
        log=say,
        observe=observer(protections.session, os.environ),
    )
    if not is_given_state:
        load(checkpointer, options, trainee, state, is_restart=int(os.environ.get("FT_RESTART", "0")) > 0)
    block = options.training.micro_batch_size * layout.dp
    share = protections.share(state.extra, state.step, state.consumed_train_samples, block)
    train_loaders, valid_loaders, test_loaders = make_loaders(options, layout, tokenizer, trainee.chunks, state, share)
    log = RunLog(
        options.logging,
        is_writer=dist.get_rank() == layout.world_size - 1,
        first_step=options.training.train_iters if is_given_state else state.step,
        last_step=options.training.train_iters,
    )
    exits = Exits(options.training, started)
    loaders = (train_loaders, valid_loaders, test_loaders)
    verified = protections.intercepts_operators
    return Job(options, layout, trainee, state, *loaders, checkpointer, log, exits, verified=verified)


def run(job: Job) -> None:
    """Train and evaluate."""
    train(job)
    if job.ending:
        job.log.line(f"ending after step {job.state.step}: {job.ending}")
    elif job.test_loaders:
        job.log.evaluation(job.state.step, "test", evaluate(job, job.test_loaders))


def outcome(job: Job, trainer: JobTrainer) -> dict[str, str | int]:
    """Return how training has ended: the fields of :class:`ft.job.messages.WorkerDone`, as far as they apply."""
    step, steps = job.state.step, trainer.steps
    early = {"early": job.exits.signal, "steps": steps} if job.exits.signal and step < steps else {}
    unsaved = job.checkpointer.unsaved(step)
    return {**early, **({"unsaved": unsaved} if unsaved and not trainer.is_saved(step) else {})}


def observer(session: Session | None, environment: Mapping[str, str]) -> Callable[..., None]:
    """Return the function that writes an event into the record of the run, if ``ft run`` has started this process.

    A worker passes it on; a rank that has no place in the run writes it itself.
    """
    if session is not None:
        return session.observe

    def write(name: str, **values: Any) -> None:
        if "FT_RUN_DIR" in environment:
            with contextlib.suppress(OSError), EventLog(Path(environment["FT_RUN_DIR"]) / EVENTS) as log:
                log.write(events.now(name, **values))

    return write


def run_info(options: Options, tokenizer: Tokenizer) -> dict:
    """Return the values that a checkpoint stores about the run that wrote it."""
    stored = options.as_dict()
    shape = {name: stored["core"][name] for name in OF_THE_MODEL if name in stored["core"]}
    shape["vocab_size"] = tokenizer.vocab_size
    if options.core.position_embedding_type == "learned_absolute":
        shape["max_position_embeddings"] = options.core.max_position_embeddings
    return {"model": shape, "options": stored, "fingerprints": {"tokenizer": tokenizer.fingerprint}}


def remember_choices(options: Options, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Write values that were determined at startup into ``options``, so that a checkpoint's options suffice to load
    it."""
    options.tokenizer.tokenizer_type = tokenizer.kind
    options.tokenizer.vocab_size = tokenizer.vocab_size
    options.tokenizer.padded_vocab_size = vocab_size
