"""Runs one rank of a job: joins the other ranks, trains, and exits such that the first error of a failure is printed
once.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ft.base.errors import FtError, UserError, code_of_end
from ft.job.agent.environment import CUDA_QUEUES, defaults
from ft.job.replicas.flags import save_interval
from ft.protection.stack import Protections
from megatron import patches
from megatron.core.config import set_experimental_flag
from megatron.ft_trainer import determinism
from megatron.ft_trainer.arguments import Layout, Options, check
from megatron.ft_trainer.arguments.topics import AUTO
from megatron.ft_trainer.initialize import destroy, init_process_group
from megatron.ft_trainer.launcher import Launch, launch_from
from megatron.ft_trainer.model import transformer_config
from megatron.ft_trainer.pretrain import pretrain


def launch(options: Options) -> int:
    """Run ``pretrain`` inside the process groups that the launcher's environment describes; return the exit code."""
    place = None
    try:
        place = launch_from(os.environ)
        has_te = patches.platform().offers("transformer_engine")
        has_gpu, replicas = patches.platform().name == "cuda", int(os.environ.get("FT_HSDP_REPLICAS", "0"))
        if options.checkpoint.save_interval == AUTO:
            options.checkpoint.save_interval = save_interval(os.environ)
        layout = check(options, place.world_size, has_te=has_te, has_gpu=has_gpu, replicas=replicas)
        if options.training.enable_experimental:
            set_experimental_flag(True)
        protections = Protections.of(options.fault_tolerance, os.environ)
        transformer_config(options, layout)
    except UserError as error:  # depends on flags and world size only: every rank gets the same error, one prints it
        return report(error, 0) if place is None or place.rank == 0 else error.exit_code
    try:
        if options.core.deterministic_mode:
            determinism.enforce()
    except UserError as error:  # depends on the node's environment: one rank of each node prints it
        return report(error, place.rank) if place.local_rank == 0 else error.exit_code
    if options.logging.metrics_file is None and "FT_RUN_DIR" in os.environ:
        options.logging.metrics_file = str(Path(os.environ["FT_RUN_DIR"]) / "metrics.jsonl")
    if options.fault_tolerance.ft_dmr_profile is not None:
        # a profiling run leaves no trace in the checkpoints and metrics of the real run
        options.checkpoint.save = options.logging.metrics_file = None
    for feature in sorted(protections.features):
        patches.apply(feature)
    start = launch_worker if protections.joins_run else launch_plain
    return start(options, layout, place, protections)


def launch_worker(options: Options, layout: Layout, place: Launch, protections: Protections) -> int:
    """Run one worker of ``ft run``. The control plane handles its faults, and also ends the other workers."""
    from ft.worker.session import attach

    settings = options.given()
    options.training.exit_signal = "SIGTERM"  # by which ft run passes on whatever signal it gets
    try:
        session = attach(settings=settings, select=patches.platform().select_device)
        session.take_device(patches.platform().select_device)
        session.init_process_group(patches.platform().choose_backend(options.core.distributed_backend))
    except UserError as error:
        return report(error, place.rank)
    try:
        protections.connected(session)
        pretrain(options, layout, protections)
    except UserError as error:
        return report(error, session.rank)
    session.close()
    destroy()
    return 0


def launch_plain(options: Options, layout: Layout, place: Launch, protections: Protections) -> int:
    """Run one rank of a torchrun, srun or mpirun job. If one rank fails, all ranks end."""
    if queues := defaults(os.environ, sys.argv[1:]).get(CUDA_QUEUES):
        os.environ[CUDA_QUEUES] = queues  # CUDA reads it when the device is chosen
    try:
        init_process_group(options.core, place)
    except UserError as error:
        return report(error, place.rank)
    notice = FailureNotice()
    try:
        protections.connected(None)
        pretrain(options, layout, protections)
    except KeyboardInterrupt:  # the terminal sends Ctrl-C to every rank
        os._exit(128 + signal.SIGINT)
    except Exception as error:
        code = report(error, place.rank) if notice.claim() else 1
        sys.stderr.flush()
        os._exit(code)  # the other ranks may be inside a collective with this rank: an orderly shutdown would hang
    notice.close()
    ended = protections.outcome()
    dist.barrier()  # the rank that hosts the store must not leave while another rank still watches it
    destroy()
    return code_of_end(str(ended.get("early", "")), str(ended.get("unsaved", "")))


POLL_S = 0.3
EXIT_CODE = 1


class FailureNotice:
    """A key in the job's TCPStore that the first failing rank sets, and at which all other ranks end.

    A thread of each rank polls it, over a connection of its own, because torch's is busy whenever the trainer creates a
    process group. If the connection fails, the node that hosts the store is lost, and this rank ends too.
    """

    def __init__(self):
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        own = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
        self._store = dist.PrefixStore(f"failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", own)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure-notice", daemon=True)
        self._thread.start()

    def claim(self) -> bool:
        """Set the key. Return True on the first rank that does so: its error is the cause of the others' errors."""
        self._stop.set()
        with contextlib.suppress(RuntimeError):  # the store cannot be reached
            return self._store.add("claims", 1) == 1
        return False

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            failed = True
            with contextlib.suppress(RuntimeError):
                failed = self._store.check(["claims"])
            if failed and not self._stop.is_set():
                os._exit(EXIT_CODE)


def report(error: BaseException, rank: int) -> int:
    """Print ``error``, with a traceback only if it is of an unexpected type (no FtError or UserError).

    Returns:
        the exit code for it.
    """
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    head = f"rank {rank} failed: {type(error).__name__}: {error}"
    if isinstance(error, FtError):
        print(head, file=sys.stderr, flush=True)
    else:
        print("".join(traceback.format_exception(error)) + head, file=sys.stderr, flush=True)
    return EXIT_CODE
