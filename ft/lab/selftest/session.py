"""A whole self-test: the checks one after another, on all nodes at once, within the given time."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ft.lab.selftest.execute import Executor
from ft.lab.selftest.nodes import Nodes, Place
from ft.lab.selftest.table import CHECKS
from ft.lab.selftest.text import Outcome, Row
from ft.lab.selftest.values import SKIPPED, Check, Context, Result
from ft.show.text import shortened, steer

_RESERVE_S = 5.0
"""Seconds that are kept for ending processes and for the other nodes' answers."""


@dataclass(frozen=True)
class Plan:
    """What a self-test is to do.

    Attributes:
        checks: the checks, in order.
        planted: names of the checks whose fault is made.
        seconds: longest duration.
        run_dir: the folder that the checks may write to, which all nodes share.
        gpus: largest number of GPUs to use on each node; None: all.
        place: this node's place among the nodes.
    """

    checks: Sequence[Check]
    planted: frozenset[str]
    seconds: float
    run_dir: Path
    gpus: int | None
    place: Place


class SelfTest:
    """A self-test on this node.

    Args:
        plan: what to do.
        executor: runs the checks.
    """

    def __init__(self, plan: Plan, executor: Executor):
        self._plan, self._executor = plan, executor
        self._began = time.monotonic()
        self._folder = _folder(plan)
        self._nodes = Nodes(plan.place, plan.run_dir, executor.turn)

    def lead(self) -> Outcome:
        """Run the checks as node 0, and return the outcome of all nodes.

        Raises:
            ft.base.errors.UserError: another node did not join.
            ft.lab.selftest.execute.Interrupted: SIGINT or SIGTERM has arrived.
        """
        rows = []
        for number, check in enumerate(self._plan.checks):
            _progress(f"{number + 1} of {len(self._plan.checks)}: {check.name}")
            left = self._plan.seconds - (time.monotonic() - self._began) - _RESERVE_S
            results = [Result(SKIPPED, _left_out(left, check))]
            if left >= check.needs_s:
                limit, is_cut = min(check.limit_s, left), left < check.limit_s
                deadline = time.monotonic() + limit
                self._nodes.announce(number, check.name, limit, is_cut)
                results = [self._run(check, limit, is_cut), *self._nodes.collect(number, deadline)]
            else:
                self._nodes.announce(number, SKIPPED, 0.0, True)
            rows.append(Row(check, results))
        self._nodes.announce(len(self._plan.checks), "", 0.0, False)
        self._nodes.close()
        _progress("")
        return Outcome(rows, self._nodes.names, str(self._folder), time.monotonic() - self._began)

    def follow(self) -> None:
        """Run the checks that node 0 announces, until it ends the self-test or is gone."""
        checks = {check.name: check for check in CHECKS}
        number = 0
        while (announced := self._nodes.next(number)) is not None:
            name, limit, is_cut = announced
            if name in checks:
                result = self._run(checks[name], limit, is_cut)
                with contextlib.suppress(ConnectionError):  # node 0 is gone: ``next`` says so
                    self._nodes.report(number, result)
            number += 1

    def _run(self, check: Check, limit_s: float, is_cut: bool) -> Result:
        nodes, place = self._nodes, self._plan.place
        context = Context(
            check=check.name,
            folder=str(self._folder / f"node-{place.node}" / check.name),
            run_dir=str(self._plan.run_dir),
            gpus=self._plan.gpus,
            limit_s=limit_s,
            planted=check.name in self._plan.planted,
            node=place.node,
            nnodes=place.nnodes,
            host=nodes.host,
            store=nodes.address,
            token=nodes.token,
        )
        result = self._executor.run(check, context, is_cut)
        result.node = nodes.names[place.node] if place.node < len(nodes.names) else nodes.names[0]
        return result


def _folder(plan: Plan) -> Path:
    """Return the folder for logs: the run folder, or a temporary one if that cannot be written (a check says so)."""
    folder = plan.run_dir.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="ft-selftest-"))


def _left_out(left: float, check: Check) -> str:
    return f"left out for time: it needs about {check.needs_s:.0f} s, and {max(left, 0):.0f} s are left of --minutes"


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        steer(sys.stderr, "\r\x1b[K")
        print(shortened(text, 70) if text else "", end="", file=sys.stderr, flush=True)
