"""Runs the script of a Megatron-LM checkout without any protection, and writes what it logs with all bits.

    torchrun --nproc-per-node 4 plain_megatron_lm.py OUT.jsonl PATH/pretrain_gpt.py FLAG ...

Beside what a machine without a GPU needs, only the functions that log are wrapped.
"""

import inspect
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ft.adapters.megatron_lm.start import load
from ft.job.agent.warm import run_script


def main() -> int:
    out, script, *flags = sys.argv[1:]
    load(script)
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        record(Path(out))
    return run_script(script, False, flags)


def record(out: Path) -> None:
    """Write a line for each call of the checkout's training_log and evaluate."""
    from megatron.training import training

    log, evaluate = training.training_log, training.evaluate

    def training_log(*args, **kwargs):
        given = inspect.signature(log).bind(*args, **kwargs).arguments
        losses = {name: value.item().hex() for name, value in given["loss_dict"].items() if value.numel() == 1}
        norm = given["grad_norm"]  # None: the step was skipped, because a gradient was too large for fp16
        norm = None if norm is None else float(norm).hex()
        write(out, {"step": given["iteration"], "losses": losses, "grad_norm": norm})
        return log(*args, **kwargs)

    def evaluated(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        write(out, {"evaluation": {name: value.item().hex() for name, value in result[0].items()}})
        return result

    training.training_log, training.evaluate = training_log, evaluated


def write(out: Path, values: dict) -> None:
    with out.open("a") as file:
        file.write(json.dumps(values) + "\n")


if __name__ == "__main__":
    sys.exit(main())
