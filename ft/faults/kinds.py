"""What there is to say about a kind of fault; the kinds themselves are in :mod:`ft.faults.table`."""

from collections.abc import Callable
from dataclasses import dataclass

from ft.faults import verdict
from ft.faults.verdict import Verdict

HARMLESS, IN_PLACE, REPLACED, RESTARTED = "harmless", "recovered in place", "replaced", "warm restart"
STOPPED, UNNOTICED = "stopped with a message", "not noticed"
MEANING = {
    HARMLESS: "Training goes on, and its losses are those of a run without the fault.",
    IN_PLACE: "The epoch ends; every worker keeps its seat, broken groups are rebuilt, and all go back to the last "
    "committed step, which is in memory: at most one step is redone.",
    REPLACED: "The worker is killed if it still lives. A standby takes its logical rank, its state comes from a peer "
    "copy, and all go back to the last committed step: at most one step is redone.",
    RESTARTED: "All workers are started anew from the warm pool and go on from the newest sound checkpoint of --save "
    "(without one: from the start).",
    STOPPED: "The run ends on all nodes, and says why.",
    UNNOTICED: "Nothing in a plain hot-swap run can see it; the losses differ from then on.",
}
"""What comes of a fault where nothing else fails, and what that means; from the least to the worst."""

OF_ACTION = {verdict.RETRY: IN_PLACE, verdict.REPLACE: REPLACED, verdict.RESTART: RESTARTED, verdict.STOP: STOPPED}
"""What comes of a verdict's action."""

WORKER, AGENT, NETWORK_OF_NODE, FILES, CONTROL, START = "worker", "agent", "network", "files", "control", "start"
"""Where a fault is injected. start: by starting a worker in another way than the others, not by ``--inject``."""

ROOT, GPU, DMR = "root", "gpu", "dmr"
"""What injecting a fault may need."""


@dataclass(frozen=True)
class Sign:
    """What is seen of a fault.

    ``judge`` asks ``ft.faults.verdict`` about it; ``category`` and ``signal`` are what that has to say, so that a
    change of the policy shows as a difference from this table.
    """

    category: str
    signal: str
    judge: Callable[[], Verdict]


@dataclass(frozen=True)
class Row:
    """One kind of fault, or one way of it that ends differently from its others.

    Attributes:
        kind: its name in ``--inject``. does: what is done.
        outcome: of ``MEANING``, where nothing else fails. seen: what the operator sees.
        sign: None where the control plane has nothing to judge.
        answer: what the system does beyond what the outcome always means.
        how: keys of ``--inject`` that tell this way, "key=value[:key=value]".
        where: WORKER, AGENT, ... needs: ROOT, GPU or nothing ("").
    """

    kind: str
    does: str
    outcome: str
    seen: str
    sign: Sign | None = None
    answer: str = ""
    how: str = ""
    where: str = WORKER
    needs: str = ""

    @property
    def name(self) -> str:
        """Unique: the kind with its keys."""
        return f"{self.kind}:{self.how}" if self.how else self.kind

    def spec(self, when: str) -> str:
        """The fault for ``--inject``; ``when``: "step=4:rank=1", say."""
        return f"{self.kind}@{when}" + (f":{self.how}" if self.how else "")
