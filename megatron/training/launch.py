"""One rank of a job: joins the others, trains, and ends so that the first cause of a failure is shown once."""

import os
import signal
import sys

import torch.distributed as dist

from ft.errors import UserError
from megatron import patches
from megatron.training.arguments import Options, check
from megatron.training.config import transformer_config
from megatron.training.failure import FailureNotice, report
from megatron.training.initialize import destroy, init_process_group, launch_from, use_deterministic_kernels
from megatron.training.pretrain import pretrain


def launch(options: Options) -> int:
    """Runs ``pretrain`` inside the process groups that the launcher's environment describes; returns the exit code."""
    place = None
    try:
        place = launch_from(os.environ)
        layout = check(options, place.world_size, has_te=patches.platform().offers("transformer_engine"))
        transformer_config(options, layout)
    except UserError as error:  # a function of flags and world size: every rank comes to the same, one speaks
        if place is None or place.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        if options.kernels.deterministic_mode:
            use_deterministic_kernels()
        init_process_group(options.parallel, place)
    except UserError as error:
        return report(error, place.rank)
    notice = FailureNotice(place.rank)
    try:
        pretrain(options, layout)
    except KeyboardInterrupt:  # Ctrl-C reaches every rank by itself
        os._exit(128 + signal.SIGINT)
    except Exception as error:
        code = report(error, place.rank) if notice.claim() else 1
        sys.stderr.flush()
        os._exit(code)  # the other ranks may be inside a collective with this one: nothing can be taken down in order
    notice.close()
    dist.barrier()  # whoever hosts the store must not leave while another rank still watches it
    destroy()
    return 0
