"""A whole run on one rank, from options to the last checkpoint."""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from ft.base.errors import UserError
from megatron.training import model
from megatron.training.arguments import Layout, Options
from megatron.training.arguments.batch import global_batch_size, train_steps
from megatron.training.arguments.check_replicas import check_replicas
from megatron.training.checkpointing import Checkpointer, TrainState, naming, verify
from megatron.training.data import dataset_prefixes
from megatron.training.data.streams import Share, follower
from megatron.training.data.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size
from megatron.training.double_execution import fingerprint
from megatron.training.evaluate import evaluate, validate
from megatron.training.exits import Exits
from megatron.training.initialize import init_model_parallel, seed_everything
from megatron.training.job import Job
from megatron.training.loaders import make_loaders
from megatron.training.logging.runlog import RunLog
from megatron.training.logging.summary import count_parameters, startup_summary
from megatron.training.logging.timing import attach_timers
from megatron.training.loop import save, train
from megatron.training.position import JobPosition
from megatron.training.step import rehearse

if TYPE_CHECKING:
    from ft.job.quorum import QuorumClient
    from ft.protection.training_state import TrainingState
    from ft.systems.checkfree.plus.replicated_ends import ReplicatedEnds
    from ft.systems.checkfree.rebuilder import CheckFreeRebuilder
    from ft.systems.checkfree.settings import Settings as CheckFree
    from ft.systems.dmr.profile.session import Profiling
    from ft.systems.dmr.runtime.protection import Protection
    from ft.systems.hot_swap.recovery_manager import RecoveryManager
    from ft.systems.hsdp.place import Place
    from ft.systems.hsdp.replica_manager import ReplicaManager
    from ft.worker.session import Session


def pretrain(
    options: Options, layout: Layout, session: "Session | None" = None, place: "Place | None" = None
) -> TrainState:
    """Trains as ``options`` say, inside an initialised process group of ``layout.world_size`` ranks.

    Args:
        session: this worker's place in a run of ``ft run`` that survives faults.
        place: the replica it belongs to (FT-HSDP); without one a session is one of hot-swap (--ft-hot-swap).

    Returns:
        where the run stands at its end: step and consumed samples.
    """
    started = time.monotonic()
    init_model_parallel(options.parallel, layout, ends_are_double=options.fault_tolerance.ft_checkfree_plus)
    joins = session is not None and session.joins if place is None else place.comes_back
    client = place.announce() if place is not None and session.rank == 0 else None
    job = assemble(options, layout, started, joins=joins, place=place)
    if place is not None:
        job.guard = replica(job, session, place, client)
    elif session is not None:
        job.guard = hot_swap(job, session)
    if options.fault_tolerance.follows_operators:
        job.dmr = double_execution(job, session)
    with job.log, job.exits:
        job.guard.run_with_recovery(lambda: run(job))
    for loaders in (job.train_loaders, job.valid_loaders, job.test_loaders):
        for loader in filter(None, loaders or []):
            loader.close()
    job.checkpointer.close()
    return job.state


def assemble(
    options: Options, layout: Layout, started: float, *, joins: bool = False, place: "Place | None" = None
) -> Job:
    """Builds all that a run needs and loads the checkpoint it goes on from, if there is one.

    Args:
        started: ``time.monotonic()`` from which --exit-duration-in-mins counts.
        joins: the run is under way and this rank will be given its state: nothing is loaded or announced.
        place: the replica that reads its part of the training data, None where there are none.
    """
    seed_everything(options.training)
    tokenizer = build_tokenizer(options.tokenizer, dataset_prefixes(options.data))
    vocab_size = padded_vocab_size(options.tokenizer, tokenizer.vocab_size, layout.tp)
    remember_choices(options, tokenizer, vocab_size)
    trainee = model.build(options, layout, vocab_size, initialize=not joins or place is not None)
    timers = attach_timers(options.logging, trainee)
    if not joins:
        say(startup_summary(options, layout, count_parameters(trainee.chunks), tokenizer))

    state = TrainState()
    checkpointer = Checkpointer(
        options.checkpoint,
        layout=vars(layout),
        run_info=run_info(options, tokenizer),
        data_parallel_random_init=options.training.data_parallel_random_init,
        log=lambda text: say(text, over_bar=options.logging.progress_bar),
    )
    if not joins:
        load(checkpointer, options, trainee, state)
    share = None if place is None else own_share(options, layout, place, state)
    train_loaders, valid_loaders, test_loaders = make_loaders(options, layout, tokenizer, trainee.chunks, state, share)
    log = RunLog(
        options.logging,
        is_writer=dist.get_rank() == layout.world_size - 1,
        first_step=train_steps(options.training) or 0 if joins else state.step,
        last_step=train_steps(options.training),
    )
    if options.training.manual_gc:
        gc.disable()
        gc.collect()
    exits = Exits(options.training, started)
    loaders = (train_loaders, valid_loaders, test_loaders)
    return Job(options, layout, vocab_size, trainee, state, *loaders, checkpointer, log, exits, timers)


def load(checkpointer: Checkpointer, options: Options, trainee: model.Trainee, state: TrainState) -> bool:
    """Loads the checkpoint to go on from into ``trainee`` and ``state``; whether there is one."""
    loaded = checkpointer.load(state, trainee.chunks, trainee.optimizer, trainee.scheduler, options.training.seed)
    if loaded is not None:
        say(f"loaded {loaded.path} in {loaded.seconds:.1f} s; going on after step {state.step}")
    return loaded is not None


def hot_swap(job: Job, session: "Session") -> "RecoveryManager":
    """A guard that snapshots every step of ``job`` and carries it through the deaths of workers."""
    from ft.systems.hot_swap.protect import protect

    trainee, asked = job.trainee, job.options.fault_tolerance
    return protect(
        session,
        trainee.chunks,
        trainee.optimizer,
        trainee.scheduler,
        JobPosition(job),
        peers=asked.ft_snapshot_peers,
        strict=asked.ft_snapshot_strict,
        newest_checkpoint=partial(newest_checkpoint, job.options.checkpoint.save),
        rebuilder=stage_rebuilder(job),
    )


def stage_rebuilder(job: Job) -> "Callable[[Session, TrainingState], CheckFreeRebuilder] | None":
    """Makes what rebuilds a lost pipeline stage; None: none is rebuilt."""
    settings = checkfree(job.options, job.layout, job.state, job.trainee.doubles)
    if settings is None:
        return None
    from ft.systems.checkfree.rebuilder import CheckFreeRebuilder

    return lambda session, subject: CheckFreeRebuilder(session, subject, settings)


def checkfree(
    options: Options, layout: Layout, state: TrainState, doubles: "ReplicatedEnds | None" = None
) -> "CheckFree | None":
    """How a lost pipeline stage is rebuilt; None: it is not."""
    asked = options.fault_tolerance
    if not asked.rebuilds_stages:
        return None
    from ft.systems.checkfree.rate import Boost
    from ft.systems.checkfree.settings import Settings

    return Settings(
        asked.ft_checkfree_strategy,
        Boost(asked.ft_checkfree_lr_factor, asked.ft_checkfree_lr_decay_iters),
        options.optimizer.clip_grad if asked.ft_checkfree_norms == "clipped" else None,
        partial(seed_everything, options.training),
        options.training.seed,
        partial(rebuilt_stages, state, layout.pp),
        doubles,
    )


def rebuilt_stages(state: TrainState, stages: int) -> dict[str, int]:
    """Pipeline stage -> step at which CheckFree last rebuilt it; a checkpoint of other stages says nothing of these."""
    kept = state.extra.get("checkfree")
    if kept is None or kept["stages"] != stages:
        kept = state.extra["checkfree"] = {"stages": stages, "rebuilt_at": {}}
    return kept["rebuilt_at"]


def double_execution(job: Job, session: "Session | None") -> "Protection | Profiling":
    """DMR for ``job``, or the profiler for a plan.

    Raises:
        UserError: the plan that was asked for is none for this run, or the run is too short to be profiled.
    """
    from ft.systems.dmr.runtime.install import install
    from ft.systems.dmr.runtime.settings import Settings

    trainee, asked = job.trainee, job.options.fault_tolerance
    if asked.ft_dmr_profile is not None:
        return profile(job)
    plan, unstable = (None if name is None else Path(name) for name in (asked.ft_dmr_plan, asked.ft_dmr_unstable))
    flips = tuple(asked.ft_dmr_inject)
    return install(
        Settings(asked.ft_dmr, plan, unstable, asked.ft_dmr_retries, flips, job.options.training.seed),
        trainee.chunks,
        trainee.optimizer,
        trainee.scheduler,
        JobPosition(job),
        fingerprint=fingerprint(job.options, job.layout),
        session=session,
    )


def profile(job: Job) -> "Profiling":
    """The profiler for ``job``, which it ends.

    Raises:
        UserError: too few steps are left, or the batch still grows: a profile of smaller ones is none of the run's.
    """
    from ft.systems.dmr.profile.install import install
    from ft.systems.dmr.profile.session import ITERATIONS

    trainee, training, asked = job.trainee, job.options.training, job.options.fault_tolerance
    left = train_steps(training) - job.state.step
    if left < ITERATIONS:
        raise UserError(f"a profile takes {ITERATIONS} steps, and the run has {left} left", "give more --train-iters")
    if (samples := global_batch_size(training, job.state.consumed_train_samples)) != training.global_batch_size:
        raise UserError(
            f"a profile is made of whole batches of {training.global_batch_size}, and the ramp stands at {samples}",
            "profile without --rampup-batch-size: the plan is for the batch that it ends with",
        )
    return install(
        Path(asked.ft_dmr_profile),
        trainee.chunks,
        trainee.optimizer,
        job.microbatches(samples),
        fingerprint=fingerprint(job.options, job.layout),
        unstable=None if asked.ft_dmr_unstable is None else Path(asked.ft_dmr_unstable),
        end=job.exits.end,
    )


def own_share(options: Options, layout: Layout, place: "Place", state: TrainState) -> Share:
    """The training data of this replica, from where ``state`` stands.

    Raises:
        UserError: the global batch cannot be divided among the replicas, or a flag does not go with them.
    """
    from ft.systems.hsdp.resume import where_replicas_stood

    training = options.training
    if problems := list(check_replicas(options, layout, place.replicas)):
        raise UserError.of(problems)
    block = training.micro_batch_size * layout.dp
    deal, positions = where_replicas_stood(place, state.extra, state.step, state.consumed_train_samples, block)
    if place.redundancy is not None:
        deal, positions = deal.leveled(positions, state.step)
    return Share(place.replica, deal, positions)


def replica(job: Job, session: "Session", place: "Place", client: "QuorumClient | None") -> "ReplicaManager":
    """A guard that takes ``job`` through the quorums of all replicas. ``client``: on the replica's rank 0."""
    from ft.systems.hsdp.components import build
    from ft.systems.hsdp.last_save import LastSave
    from ft.systems.hsdp.position import KEY, ReplicaPosition
    from ft.systems.hsdp.replica_manager import ReplicaManager
    from ft.systems.hsdp.work import OwnStream
    from ft.systems.spare import stacked

    trainee, options, state = job.trainee, job.options, job.state
    share, batch = own_share(options, job.layout, place, state), options.training.global_batch_size // place.replicas
    loaders, stacks = job.train_loaders or [], place.redundancy is not None
    follow = stacked.StackLoaders(loaders, batch) if stacks else follower(loaders, place.replica)
    position = ReplicaPosition(
        JobPosition(job), lambda: state.extra, place.replica, follow, share.deal, dict(share.positions)
    )
    per_token = trainee.chunks[0].config.calculate_per_token_loss
    reseed = partial(seed_everything, options.training)
    work = stacked.work(place, position, lambda: state.extra, follow, per_token, reseed) if stacks else OwnStream(place)
    parts = build(
        session,
        place,
        trainee.chunks,
        trainee.optimizer,
        trainee.scheduler,
        position,
        work=work,
        batch=batch,
        client=client,
        save_interval=options.checkpoint.save_interval if options.checkpoint.save else None,
    )

    def load_last() -> bool:
        """Where no replica has a state any more: from the newest persistent checkpoint, if there is one."""
        state.extra.pop(KEY, None)  # where the lost state stood
        is_loaded = load(job.checkpointer, options, trainee, state)
        begins = own_share(options, job.layout, replace(place, comes_back=False), state)
        position.restart(begins.deal, dict(begins.positions))
        work.restart()
        job.log.rewind(state.step)
        return is_loaded

    last_save = LastSave(partial(is_saved, options.checkpoint.save), partial(save, job, blocking=True))
    return ReplicaManager(
        parts, load_last, lambda: rehearse(job, batch), last_save if options.checkpoint.save is not None else None
    )


def newest_checkpoint(folder: str | None) -> Path | None:
    """The folder of the newest complete checkpoint in ``folder``; None where there is none."""
    if folder is None or not Path(folder).is_dir():
        return None
    newest = naming.newest_complete(verify.scan(Path(folder)))
    return None if newest is None else Path(folder) / newest.name


def is_saved(folder: str, step: int) -> bool:
    """Whether there is a complete checkpoint of ``step`` in ``folder``, as far as can be seen."""
    try:
        return any(each.complete and each.step == step for each in verify.scan(Path(folder)))
    except OSError:
        return False


def run(job: Job) -> None:
    """Trains and evaluates; with --skip-train it only evaluates."""
    if job.options.evaluation.skip_train:
        if job.valid_loaders:
            validate(job)
    else:
        train(job)
    if job.ending:
        job.log.line(f"ending after step {job.state.step}: {job.ending}")
    elif job.test_loaders:
        job.log.evaluation(job.state.step, "test", evaluate(job, job.test_loaders))
    job.checkpointer.maybe_finalize(blocking=True)


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
