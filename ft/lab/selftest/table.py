"""The checks of ``ft selftest``: what a check is, is given and returns, and all of them in order of importance.

What does not fit into the given time is left out at the end.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft.base import bounded_json
from ft.base.errors import UserError

if TYPE_CHECKING:
    import torch.distributed as dist

PASS, FAIL, SKIPPED = "pass", "fail", "skipped"

Measured = dict[str, Any]
"""Name with its unit at the end (``release_s``, ``pinned_gb_s``) -> measured value; settings found are strings."""


class Failed(Exception):
    """A check has shown that something does not work. ``fix``: what the owner of the cluster can do about it."""

    def __init__(self, problem: str, fix: str, measured: Measured | None = None):
        super().__init__(problem)
        self.problem, self.fix, self.measured = problem, fix, measured or {}


class Skipped(Exception):
    """A check can show nothing on this machine. Its text is the reason."""


@dataclass(frozen=True)
class Check:
    """One check of the self-test.

    Attributes:
        function: "module:function" below ``ft.lab.selftest.checks``; it takes a :class:`Context`, returns (text,
            measured values), and raises :class:`Failed` or :class:`Skipped`.
        shows: what it shows, in words that follow "shows:".
        needs_s: seconds that it usually takes; it is not begun when less is left of the time of the self-test.
        limit_s: deadline in seconds; it then counts as failed and its processes are killed.
        plants: the fault that ``--plant`` makes for this check.
    """

    name: str
    function: str
    shows: str
    needs_s: float
    limit_s: float
    plants: str


@dataclass(frozen=True)
class Context:
    """What a check is given.

    Attributes:
        folder: folder of the check on this node, for logs and files.
        run_dir: the folder of the self-test, which all nodes share.
        gpus: largest number of GPUs to use; None: all that this node has.
        limit_s: seconds until this check is killed.
        planted: whether to make the check's fault, which it then has to find.
        host: address at which the other nodes reach this one.
        store: address of the store in which the nodes of this check meet; "" with one node.
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

    def store_of_all_nodes(self) -> "dist.Store | None":
        """Return a connection to the store of all nodes, with keys of this check only; None if there is one node."""
        if not self.store:
            return None
        import torch.distributed as dist  # the check of versions has to run where torch is missing, too

        from ft.net.store import StoreConnection

        return dist.PrefixStore(self.check, StoreConnection(self.store, self.token, self.limit_s))


@dataclass
class Result:
    """The outcome (PASS, FAIL or SKIPPED) of a check on one node, or on all nodes together (``node`` is "" then), and
    what to do about a failure."""

    outcome: str
    text: str
    fix: str = ""
    measured: Measured = field(default_factory=dict)
    seconds: float = 0.0
    node: str = ""


def together(results: Sequence[Result]) -> Result:
    """Return one result for the results of all nodes, of which the first is that of node 0. It fails if it fails on a
    node, and is skipped if it is skipped on all nodes."""
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


# fmt: off
CHECKS = (
    Check("versions", "nodes:versions", needs_s=5, limit_s=60,
          shows="the versions and settings that training will use; that they fit each other, and are equal on all "
                "nodes",
          plants="TORCH_NCCL_BLOCKING_WAIT is set"),
    Check("storage", "nodes:storage", needs_s=3, limit_s=60,
          shows="the run folder can be written and synchronised, and a leader's lease is renewed and seen in time",
          plants="the run folder is below a file"),
    Check("ports", "nodes:ports", needs_s=2, limit_s=60,
          shows="every node reaches every other one at the ports that processes choose; the rate of bulk data",
          plants="node 0 listens at another port than it says"),
    Check("clocks", "nodes:clocks", needs_s=2, limit_s=60,
          shows="the clocks of the nodes agree, so that reports order events of several nodes correctly",
          plants="the clock of node 0 is 10 s fast"),
    Check("fork", "fork:fork", needs_s=8, limit_s=60,
          shows="a process forked from one that has imported torch and counted the GPUs can use the device",
          plants="the forked process never returns from its first call of the device"),
    Check("one-rank", "groups:one_rank", needs_s=8, limit_s=90,
          shows="a process group of one rank is made, aborted twice, and made again",
          plants="a result is wrong"),
    Check("groups", "groups:several_ranks", needs_s=10, limit_s=120,
          shows="process groups of several ranks are made, aborted in the middle of an all-reduce, and made again, "
                "twice",
          plants="the last rank does not come back after the first abort"),
    Check("both-send", "groups:both_send", needs_s=8, limit_s=90,
          shows="two ranks that send large messages to each other at once receive them, as a pipeline needs it",
          plants="a rank sends and receives nothing"),
    Check("killed-rank", "groups:killed_rank", needs_s=8, limit_s=90,
          shows="when a rank is killed in an all-reduce, the others are released",
          plants="nobody closes the epoch of the killed rank"),
    Check("killed-making", "groups:killed_while_made", needs_s=8, limit_s=90,
          shows="when a rank is killed while all make their groups, the others are released",
          plants="nobody closes the epoch of the killed rank"),
    Check("hung-groups", "groups:hung_groups", needs_s=12, limit_s=120,
          shows="two groups that hang are aborted together, without waiting for each other",
          plants="an abort never returns"),
    Check("snapshot", "device:snapshot", needs_s=8, limit_s=120,
          shows="a snapshot of the training state reaches host memory intact, and how fast",
          plants="a byte of the snapshot flips"),
    Check("training", "training:without_fault", needs_s=20, limit_s=240,
          shows="ft run trains a small GPT with hot-swap to the end; its losses are the reference of the next checks",
          plants="a worker reports invalid input"),
    Check("kill", "training:kill", needs_s=25, limit_s=240,
          shows="a worker that gets SIGKILL is replaced by a standby, and the losses stay the same, bit for bit",
          plants="the worker that has taken over is killed"),
    Check("stall", "training:stall", needs_s=45, limit_s=300,
          shows="a worker whose training thread hangs while its heartbeats go on is replaced; losses as above",
          plants="the worker that has taken over is killed"),
    Check("stop", "training:stop", needs_s=25, limit_s=240,
          shows="a worker that gets SIGSTOP is replaced; losses as above",
          plants="the worker that has taken over is killed"),
    Check("launches", "driver:launches", needs_s=15, limit_s=90,
          shows="other threads run while Transformer Engine launches kernels behind a device that is busy",
          plants="a call keeps the interpreter lock for 2 s"),
    Check("freed", "driver:freed", needs_s=10, limit_s=120,
          shows="the memory of a killed process comes free in time for the worker that takes its place",
          plants="the process is not killed"),
    Check("ring", "groups:ring", needs_s=10, limit_s=120,
          shows="the all-reduce between replicas gives the same bits on all members, and those of the sum on the CPU",
          plants="a bit of a member's result flips"),
    Check("digests", "device:digests", needs_s=6, limit_s=120,
          shows="DMR's digests on the device equal those of the CPU, and change with every bit",
          plants="a bit of the tensor on the device flips"),
    Check("reproducible", "device:reproducible", needs_s=30, limit_s=420,
          shows="the operators of training give the same bits when they are executed again, as DMR needs it",
          plants="an operator's result varies"),
)
# fmt: on
"""All checks."""

_NAMES = [check.name for check in CHECKS]


def chosen(names: list[str], flag: str) -> list[Check]:
    """Return the checks with the names in the values of ``flag``, each of which may be several with commas between
    them, in the order of ``CHECKS``.

    Raises:
        UserError: there is no check of that name.
    """
    wanted = [word.strip() for text in names for word in text.split(",")]
    unknown = [name for name in wanted if name not in _NAMES]
    if unknown:
        raise UserError(
            f"{flag}: there is no check {', '.join(map(repr, unknown))}", f"give one of {', '.join(_NAMES)}"
        )
    return [check for check in CHECKS if check.name in wanted]
