"""The settings of DMR in a training run, and the strategy that follows from them.

DMR (dual modular redundancy, SpareTrain) verifies an operator by executing it a second time: immediately (naive), with
the recomputation of activation checkpointing (piggyback), or when a plan says so.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.systems.dmr.plan.assign import Plan
from ft.systems.dmr.plan.file import read_plan, refuse_plan_of_other_run
from ft.systems.dmr.runtime.strategy import Naive, Piggyback, Planned, Strategy
from ft.systems.dmr.runtime.unstable import ExcludeUnstable
from ft.systems.dmr.unstable import read_unstable

NAIVE, PIGGYBACK = "naive", "piggyback"


@dataclass(frozen=True)
class Settings:
    """The settings of DMR that the flags of a training run request.

    Args:
        way: NAIVE (all operators immediately) or PIGGYBACK (recomputed operators with their recomputation, the others
            immediately); None to verify as ``plan`` says.
        plan: path of a plan file.
        unstable: path of a file of non-reproducible operators, which are left unverified.
        retries: number of times that an iteration is repeated before a rank is blamed.
        inject: specifications of bit flips to inject (``ft.faults.spec``).
        inject_seed: seed for random choices that the specifications leave open.
    """

    way: str | None = None
    plan: Path | None = None
    unstable: Path | None = None
    retries: int = 2
    inject: tuple[str, ...] = ()
    inject_seed: int = 0

    def strategy(self, stage: int, fingerprint: Mapping[str, Any]) -> tuple[Strategy, Plan | None]:
        """Return the strategy for the operators of ``stage``, and the plan that it follows (None without a plan).

        Raises:
            UserError: the plan or the file of unstable operators cannot be read or followed, or the plan was made for
                another run.
        """
        left_out, plan = self.left_out(), None
        if self.plan is None:
            strategy = Naive() if self.way == NAIVE else Piggyback()
        else:
            plan = read_plan(self.plan)
            refuse_plan_of_other_run(plan, fingerprint)
            strategy = Planned(plan, stage, left_out)
        return (ExcludeUnstable(strategy, left_out) if left_out else strategy), plan

    def left_out(self) -> tuple[str, ...]:
        """Return the names of the operators and functions that are left unverified.

        Raises:
            UserError: the file cannot be read.
        """
        return () if self.unstable is None else read_unstable(self.unstable).operators


def run_seed(text: str) -> int:
    """Return the seed for all digests of a run, a 128-bit hash of ``text``. All ranks have to pass the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
