"""What a check is, what it is given, and what it returns."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ft.base import bounded_json

PASS, FAIL, SKIPPED = "pass", "fail", "skipped"

Measured = dict[str, Any]
"""Name with its unit at the end (``release_s``, ``pinned_gb_s``) -> measured value; settings found are strings."""


class Failed(Exception):
    """A check has shown that something does not work.

    Args:
        problem: what does not work.
        fix: what the owner of the cluster can do about it.
        measured: what was measured before.
    """

    def __init__(self, problem: str, fix: str, measured: Measured | None = None):
        super().__init__(problem)
        self.problem, self.fix, self.measured = problem, fix, measured or {}


class Skipped(Exception):
    """A check can show nothing on this machine. Its text is the reason."""


@dataclass(frozen=True)
class Check:
    """One check of the self-test.

    Attributes:
        name: name on the command line and in the output.
        shows: what it shows, in words that follow "shows:".
        function: "module:function" below ``ft.lab.selftest.checks``; it takes a :class:`Context`, returns (text,
            measured values), and raises :class:`Failed` or :class:`Skipped`.
        needs_s: seconds that it usually takes; it is not begun when less is left of the time of the self-test.
        limit_s: deadline in seconds; it then counts as failed and its processes are killed.
        plants: the fault that ``--plant`` makes for this check.
    """

    name: str
    shows: str
    function: str
    needs_s: float
    limit_s: float
    plants: str


@dataclass(frozen=True)
class Context:
    """What a check is given.

    Attributes:
        check: name of the check.
        folder: folder of the check on this node, for logs and files.
        run_dir: the folder of the self-test, which all nodes share.
        gpus: largest number of GPUs to use; None: all that this node has.
        limit_s: seconds until this check is killed.
        planted: whether to make the check's fault, which it then has to find.
        node: number of this node, from 0.
        nnodes: number of nodes.
        host: address at which the other nodes reach this one.
        store: address of the store in which the nodes of this check meet; "" with one node.
        token: shared secret of the self-test's processes.
    """

    check: str
    folder: str
    run_dir: str
    gpus: int | None
    limit_s: float
    planted: bool = False
    node: int = 0
    nnodes: int = 1
    host: str = "127.0.0.1"
    store: str = ""
    token: str = "selftest"

    def encoded(self) -> str:
        """Return the context as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "Context":
        """Return the context that was encoded as ``text``."""
        return cls(**bounded_json.loads(text, non_finite=True))

    @property
    def scratch(self) -> Path:
        """Return the check's folder as a path."""
        return Path(self.folder)


@dataclass
class Result:
    """The outcome of a check on one node, or on all nodes together.

    Attributes:
        outcome: PASS, FAIL or SKIPPED.
        text: what was found, or the reason.
        fix: what to do about a failure, otherwise "".
        measured: the measured values.
        seconds: duration.
        node: name of the node; "" for all nodes together.
    """

    outcome: str
    text: str
    fix: str = ""
    measured: Measured = field(default_factory=dict)
    seconds: float = 0.0
    node: str = ""


def together(results: list[Result]) -> Result:
    """Return one result for the results of all nodes, of which the first is that of node 0.

    It fails if it fails on a node, and is skipped if it is skipped on all nodes.
    """
    if len(results) == 1:
        return results[0]
    failed = [one for one in results if one.outcome == FAIL]
    shown = [one for one in results if one.outcome == PASS]
    chosen = (failed or shown or results)[0]
    text, fixes = chosen.text, list(dict.fromkeys(one.fix for one in failed if one.fix))
    if failed:
        text = "; ".join(f"{one.node}: {one.text}" for one in failed)
    elif len(shown) > 1:
        text = f"{text} ({chosen.node}; passed on {len(shown)} nodes)"
    return Result(chosen.outcome, text, "; ".join(fixes), chosen.measured, max(one.seconds for one in results))
