"""The cross-check of :mod:`checkfree_convergence`: runs with killed workers against the same faults between steps."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from checkfree_convergence import CROSS, EVERY, SHAPE, STAGES

STEPS, KILL_AT = 80, 61
FAULTS = {"stage 0": (0, 1, "--ft-checkfree-plus"), "stage 1": (1, 2, "--ft-checkfree")}
"""The lost stage, the stage that holds its copy and dies with it (and is restored from its own copy), the flag used."""


def compare(ranks: Callable, corpus: str, folder: Path) -> Iterator[dict]:
    """Yield a row for each of ``FAULTS``: the losses of the replay as ``train``, of the real run as ``real``."""
    from checkfree_convergence_job import train
    from ft_runs import ft_run

    for name, (stage, holder, flag) in FAULTS.items():
        began = time.monotonic()
        flags = f"{SHAPE} {flag} --seed 1234 --train-iters {STEPS} --data-path {corpus}"
        kills = ",".join(f"kill@step={KILL_AT}:rank={rank}" for rank in (stage, holder))
        real = ft_run(
            folder / name.replace(" ", ""),
            flags.replace("--eval-iters 2", "--eval-iters 0"),
            options=f"--inject {kills}",
            standby=2,
        )
        if real.code:
            raise RuntimeError(real.explain())
        lost = [(event.step, event.detail["stage"]) for event in real.named("stage_rebuilt")]
        seen = ranks(train, STAGES, flags, lost, every=EVERY)[-1]
        yield {
            "part": CROSS,
            "way": name,
            "rate": 0.0,
            "seed": 0,
            "steps": STEPS,
            **seen,
            "real": real.losses,
            "took_s": round(time.monotonic() - began, 1),
        }
