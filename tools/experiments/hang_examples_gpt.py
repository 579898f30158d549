"""The trainer of hang_examples.py: pretrain_gpt.py with metrics of its own after each step, and one bug in them.

The environment variable HANG_EXAMPLE names the bug. All metrics are collectives and messages of torch.distributed, as
users write them.
"""

import os
import sys

import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.core import parallel_state
from megatron.ft_trainer import loop

BUG, STEP = os.environ["HANG_EXAMPLE"], 8
"""Name of the bug, and the step in which it shows."""


def count_outliers(step: int, rank: int) -> None:
    """Sum up how many of the gradients are outliers, over the data-parallel ranks."""
    found = torch.zeros(2)
    if BUG == "missing-call" and rank == 5 and step == STEP:
        return  # a shortcut, because this rank has no outliers
    dist.all_reduce(found, group=parallel_state.get_data_parallel_group())


def share_ranges(step: int, rank: int) -> None:
    """Exchange ranges of activations within the data-parallel group, then within the whole pipeline stage."""
    data, stage = parallel_state.get_data_parallel_group(), parallel_state.get_tensor_and_data_parallel_group()
    ranges = torch.zeros(4)
    everybody = [torch.empty(4) for _ in range(dist.get_world_size(data))]
    if BUG == "cycle" and rank == 3 and step == STEP:
        dist.all_reduce(ranges, group=stage)
        dist.all_reduce(ranges, group=data)
        dist.all_gather(everybody, ranges, group=data)
        return
    dist.all_reduce(ranges, group=data)
    dist.all_reduce(ranges, group=stage)
    if BUG == "mismatch" and rank == 7 and step == STEP:
        dist.broadcast(ranges, dist.get_global_rank(data, 0), group=data)
        return
    dist.all_gather(everybody, ranges, group=data)


def send_sample(step: int, rank: int) -> None:
    """Send a sample from the first pipeline stage to the last one, to be compared."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    stages = dist.get_process_group_ranks(pipeline)
    sample = torch.zeros(8)
    if rank == stages[0]:
        dist.send(sample, stages[-1], group=pipeline)
    elif rank == stages[-1]:
        if BUG == "unmatched-message" and rank == 6 and step == STEP:
            dist.send(sample, stages[0], group=pipeline)  # meant to be received
            return
        dist.recv(sample, stages[0], group=pipeline)


def main() -> int:
    step_of_core = loop.train_step

    def train_step(job):
        report = step_of_core(job)
        for metric in (count_outliers, share_ranges, send_sample):
            metric(job.state.step, dist.get_rank())
        return report

    loop.train_step = train_step
    return pretrain_gpt.main(sys.argv[1:])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
