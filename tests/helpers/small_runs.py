"""Runs of the trainer inside forked ranks, shared by the end-to-end tests."""

import json
import sysconfig
from pathlib import Path

BASE = (
    "--reference-trainer --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-2 --train-iters 4 --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--padded-vocab-size 512 --split 90,10,0 --eval-iters 0 --log-interval 1000 --num-workers 0 "
)
"""A model small enough to step in milliseconds; its padded vocabulary is 512 at any TP."""


def make_corpus(folder: Path, name: str = "corpus", documents: int = 60) -> str:
    """Write an indexed dataset of sources of the standard library; return its prefix."""
    from tools.preprocess_data import preprocess

    prefix = str(folder / name)
    sources = sorted(str(p) for p in Path(sysconfig.get_path("stdlib")).glob("*.py"))[:documents]
    preprocess(["--input", *sources, "--output-prefix", prefix])
    return prefix


def run(flags: str) -> dict:
    """Train in an initialized process group, outside of ``ft run``; return the train state at the end."""
    import torch.distributed as dist

    from ft.protection.stack import Protections
    from megatron.ft_trainer.arguments import check, parse
    from megatron.ft_trainer.pretrain import pretrain

    options = parse(flags)
    layout = check(options, dist.get_world_size(), has_te=False)
    asked = Protections.of(options.fault_tolerance, {})
    protections = Protections([each for each in asked if not each.joins_run])
    protections.connected(None)
    state = pretrain(options, layout, protections)
    return {"step": state.step, "consumed": state.consumed_train_samples}


def launch(flags: str) -> int:
    """Run a whole rank, including process group and error handling; return the exit code."""
    from megatron.ft_trainer.arguments import parse
    from megatron.ft_trainer.launch import launch

    return launch(parse(flags))


def metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def losses(path: Path) -> list[float]:
    return [step["loss"] for step in metrics(path)]


def slow_launch(flags: str) -> int:
    """Run ``launch`` with a step that lasts until a signal has arrived, and then one minute longer."""
    import time

    from megatron.ft_trainer import loop

    def long_step(job):
        print("in a long step", flush=True)
        while job.exits._signum is None:
            time.sleep(0.01)
        print("still in it", flush=True)
        time.sleep(60)

    loop.train_step = long_step
    return launch(flags)


def launch_with_flip(flags: str, rank: int, step: int, bit: int) -> int:
    """Run ``launch``; at the end of ``step`` flip one bit of a master weight in ``rank``'s own optimizer shard."""
    import torch
    import torch.distributed as dist

    from megatron.ft_trainer import loop

    plain_step = loop.train_step

    def faulty_step(job):
        done = plain_step(job)
        if dist.get_rank() == rank and job.state.step == step:
            optimizer = job.trainee.optimizer.chained_optimizers[0]
            optimizer.shard_fp32_from_float16_groups[0][0].data.view(torch.int32)[0] ^= 1 << bit
        return done

    loop.train_step = faulty_step
    return launch(flags)
