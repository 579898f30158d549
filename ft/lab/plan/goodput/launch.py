"""Command lines that start the recommended run: a GPT of the scenario's size, which ``ft check`` accepts."""

import math
from typing import Any

from ft.lab.plan.goodput.model import STATE_BYTES
from ft.lab.plan.goodput.scenario import Scenario
from ft.protection.table import HOT_SWAP, REPLICAS, STACKS, STAGES, SWAPPED


def lines(asked: Scenario, row: Any) -> dict[str, str]:
    """Return the lines "check", "run" (for each node) and "sbatch"."""
    names, nodes, per_node = row.protection.names, asked.nodes + row.spares, asked.gpus_per_node
    script = " ".join(["pretrain_gpt.py", *trainer_flags(asked, row)])
    flags = f"--nproc-per-node {per_node}" + (f" --standby-nodes {row.spares}" if row.spares else "")
    if REPLICAS in names:
        flags += f" --ft-hsdp-replicas {row.protection.units}"
    if STACKS in names:
        flags += f" --ft-spare-redundancy {row.protection.redundancy}"
    slurm = f"--nodes={nodes} --ntasks-per-node=1 --gpus-per-node={per_node} --exclusive --no-kill --signal=TERM@300"
    srun = "srun --no-kill --kill-on-bad-exit=0 --wait=0"
    return {
        "check": f"ft check --gpus {asked.gpus} {script}",
        "run": f"ft run --nnodes {nodes} {flags} --rdzv-endpoint HOST:29500 {script}",
        "sbatch": f"sbatch {slurm} --wrap '{srun} ft run {flags} {script}'",
    }


def trainer_flags(asked: Scenario, row: Any) -> list[str]:
    """Return the flags of the trainer: a GPT with about the scenario's parameters, its layout, and the protections."""
    names, world = row.protection.names, asked.gpus // row.protection.units
    tp = math.gcd(8, asked.gpus_per_node)
    wanted = (
        asked.stages if STAGES in names else 2 ** max(0, math.ceil(math.log2(asked.params * STATE_BYTES / 40e9 / tp)))
    )
    pp = max(n for n in range(1, wanted + 1) if world // tp % n == 0)
    layers, hidden = shape(asked.params, tp, pp)
    batch = world // (tp * pp) * row.protection.units * 2 * pp
    flags = [
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --use-distributed-optimizer --bf16",
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {hidden // 128} --seq-length 4096",
        f"--micro-batch-size 1 --global-batch-size {batch} --train-iters {round(asked.days * 86400 / asked.step_time)}",
        f"--lr 1e-4 --data-path DATA --save CHECKPOINTS --load CHECKPOINTS --save-interval {row.interval}",
    ]
    if tp > 1:
        flags.insert(1, "--sequence-parallel")
    if HOT_SWAP in names or (REPLICAS in names and row.spares):
        flags.append("--ft-hot-swap")
    if HOT_SWAP in names and row.protection.copies != 1:
        flags.append(f"--ft-snapshot-peers {row.protection.copies}")
    if STAGES in names:
        flags.append("--ft-checkfree-plus" if SWAPPED in names else "--ft-checkfree")
    return flags


def shape(params: float, tp: int, pp: int) -> tuple[int, int]:
    """Return (layers, hidden size) of a GPT with about ``params`` parameters, which is 100 times wider than deep."""
    unit = 128 * tp
    layers = max(1, round((params / 12 / 100**2) ** (1 / 3) / pp)) * pp
    return layers, max(1, round(math.sqrt(params / 12 / layers) / unit)) * unit
