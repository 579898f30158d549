"""A whole run on one rank, from options to the last checkpoint."""

import gc
import sys
import time

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import model
from megatron.training.arguments import Layout, Options
from megatron.training.arguments.batch import train_steps
from megatron.training.checkpointing import Checkpointer, TrainState
from megatron.training.data import MicrobatchLoader, build_datasets, dataset_prefixes
from megatron.training.evaluate import evaluate, validate
from megatron.training.exits import Exits
from megatron.training.initialize import init_model_parallel, seed_everything
from megatron.training.job import Job
from megatron.training.loop import train
from megatron.training.model import Trainee
from megatron.training.runlog import RunLog
from megatron.training.summary import count_parameters, startup_summary
from megatron.training.timing import attach_timers
from megatron.training.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size


def pretrain(options: Options, layout: Layout) -> TrainState:
    """Trains as ``options`` say, inside an initialised process group of ``layout.world_size`` ranks.

    Returns:
        where the run stands at its end: step and consumed samples.
    """
    started = time.monotonic()
    init_model_parallel(options.parallel, layout)
    job, test_loaders = assemble(options, layout, started)
    with job.log, job.exits:
        run(job, test_loaders)
    for loader in (*job.train_loaders, *(job.valid_loaders or []), *(test_loaders or [])):
        if loader is not None:
            loader.close()
    job.checkpointer.close()
    return job.state


def assemble(options: Options, layout: Layout, started: float) -> tuple[Job, list | None]:
    """Builds all that a run needs and loads the checkpoint it goes on from, if there is one.

    Args:
        started: ``time.monotonic()`` from which --exit-duration-in-mins counts.

    Returns:
        (the job, loaders of the test part).
    """
    seed_everything(options.training)
    tokenizer = build_tokenizer(options.tokenizer, dataset_prefixes(options.data))
    vocab_size = padded_vocab_size(options.tokenizer, tokenizer.vocab_size, layout.tp)
    remember_choices(options, tokenizer, vocab_size)
    trainee = model.build(options, layout, vocab_size)
    timers = attach_timers(options.logging, trainee)
    say(startup_summary(options, layout, count_parameters(trainee.chunks), tokenizer))

    state = TrainState()
    checkpointer = Checkpointer(
        options.checkpoint,
        layout=vars(layout),
        run_info=run_info(options, tokenizer),
        data_parallel_random_init=options.training.data_parallel_random_init,
        log=lambda text: say(text, over_bar=options.logging.progress_bar),
    )
    checkpointer.load(state, trainee.chunks, trainee.optimizer, trainee.scheduler, options.training.seed)
    train_loaders, valid_loaders, test_loaders = make_loaders(options, layout, tokenizer, trainee, state)
    log = RunLog(
        options.logging,
        is_writer=dist.get_rank() == layout.world_size - 1,
        first_step=state.step,
        last_step=train_steps(options.training),
    )
    if options.training.manual_gc:
        gc.disable()
        gc.collect()
    exits = Exits(options.training, started)
    job = Job(
        options, layout, vocab_size, trainee, state, train_loaders, valid_loaders, checkpointer, log, exits, timers
    )
    return job, test_loaders


def run(job: Job, test_loaders: list | None) -> None:
    """Trains and evaluates; with --skip-train it only evaluates."""
    reason = None
    if job.options.evaluation.skip_train:
        if job.valid_loaders:
            validate(job)
    else:
        reason = train(job)
    if reason:
        job.log.line(f"ending after step {job.state.step}: {reason}")
    elif test_loaders:
        job.log.evaluation(job.state.step, "test", evaluate(job, test_loaders))


def make_loaders(
    options: Options, layout: Layout, tokenizer: Tokenizer, trainee: Trainee, state: TrainState
) -> tuple[list, list | None, list | None]:
    """Loaders of the train, validation and test parts for each model chunk; None for a part that does not exist."""
    chunks = [sees_tokens(chunk) for chunk in trainee.chunks]
    parts = build_datasets(
        options.data,
        tokenizer,
        options.training.seed,
        samples=wanted_samples(options),
        is_built_on_rank=lambda: any(chunks),
    )
    exist = torch.tensor([part is not None for part in parts], dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(exist, op=dist.ReduceOp.MAX)
    consumed = (state.consumed_train_samples, state.consumed_valid_samples, 0)
    return tuple(
        [
            make_loader(options, layout, part, position, cyclic=index == 0 and options.data.dataloader_type == "cyclic")
            if sees
            else None
            for sees in chunks
        ]
        if exists
        else None
        for index, (part, position, exists) in enumerate(zip(parts, consumed, exist.tolist(), strict=True))
    )


def make_loader(options: Options, layout: Layout, dataset, consumed: int, *, cyclic: bool) -> MicrobatchLoader:
    return MicrobatchLoader(
        dataset,
        micro_batch_size=options.training.micro_batch_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=layout.dp,
        consumed_samples=consumed,
        num_workers=options.data.num_workers,
        cyclic=cyclic,
        seed=options.training.seed,
    )


def sees_tokens(chunk: torch.nn.Module) -> bool:
    """The chunk embeds tokens or compares its output with them."""
    return get_attr_wrapped_model(chunk, "pre_process") or get_attr_wrapped_model(chunk, "post_process")


def wanted_samples(options: Options) -> tuple[int, int, int]:
    """How many samples the run takes of the train, validation and test parts."""
    t, e = options.training, options.evaluation
    steps = train_steps(t) if t.train_iters or t.train_samples else 0
    evaluations = 0 if not e.eval_iters else 1 + (steps // e.eval_interval if e.eval_interval else 0)
    one = e.eval_iters * t.global_batch_size
    train_samples = 0 if e.skip_train else t.train_samples or steps * t.global_batch_size
    return train_samples, evaluations * one, one


def run_info(options: Options, tokenizer: Tokenizer) -> dict:
    """What a checkpoint says about the run that wrote it."""
    stored = options.as_dict()
    shape = {**stored["model"], **stored["moe"], "vocab_size": tokenizer.vocab_size}
    for name in ("attention_dropout", "hidden_dropout", "init_method_std", "max_position_embeddings"):
        shape.pop(name)
    if options.model.position_embedding_type == "learned_absolute":
        shape["max_position_embeddings"] = options.model.max_position_embeddings
    return {"model": shape, "options": stored, "fingerprints": {"tokenizer": tokenizer.fingerprint}}


def remember_choices(options: Options, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Writes what was left to be found out into ``options``, so that a checkpoint's options suffice to load it."""
    options.tokenizer.tokenizer_type = tokenizer.kind
    options.tokenizer.vocab_size = tokenizer.vocab_size
    options.tokenizer.padded_vocab_size = vocab_size


def say(text: str, *, over_bar: bool = False) -> None:
    """Prints on rank 0; ``over_bar``: on the line that the last rank's progress bar occupies."""
    if dist.get_rank() == 0:
        clear = "\r\033[K" if over_bar and sys.stdout.isatty() else ""
        print(clear + text, flush=True)
