"""The flags of the protections, which the reference trainer, NVIDIA's trainer and checkouts of Megatron-LM take."""

from dataclasses import dataclass
from typing import Literal

from ft.base.options import Topic, flag


@dataclass
class FaultToleranceOptions(Topic):
    """fault tolerance"""

    ft_hot_swap: bool = False
    """Snapshot every step in memory and let a standby take a dead worker's place. Start with ft run."""

    ft_snapshot_peers: int = 1
    """Workers that hold a copy of each optimizer shard, on other nodes and in other failure domains than its own and
    each other's (ft run --topology): how many nodes may die in one step. 0, with --ft-checkfree: no copies."""

    ft_snapshot_strict: bool = False
    """End the run at its start, instead of warning, when copies cannot be placed in failure domains of their own."""

    ft_evict_stragglers: float | None = None
    """Let a standby replace a rank whose own work takes persistently this many times as long as that of the ranks with
    the same work, such as 1.2. Without it, a slow rank is named and keeps its place."""

    ft_transport: Literal["tcp", "mpi"] = "tcp"
    """What snapshots and recoveries go over; for mpi start ft run, which reads this too, with mpirun --with-ft ulfm."""

    ft_dmr: Literal["naive", "piggyback"] | None = None
    """Execute every operator twice and compare: naive: at once; piggyback: what is recomputed anyway with its
    recomputation, the rest at once. A mismatch redoes the step."""

    ft_dmr_plan: str | None = None
    """The same by a plan of ft dmr plan, which moves second executions into windows in which a rank would wait."""

    ft_dmr_unstable: str | None = None
    """A file of ft dmr selftest --out: operators that are not reproducible here, and are left unchecked."""

    ft_dmr_retries: int = 2
    """How often a step that was computed wrongly is taken once more before a rank is blamed and its node evicted."""

    ft_dmr_inject: list[str] = flag([], repeats=True)
    """Bit flips on purpose, as of ft run --inject: bit-flip@step=3:rank=1:operator=mm:phase=backward (ft faults)."""

    ft_dmr_profile: str | None = None
    """Train a few steps, write a profile for ft dmr plan into this file, and end; nothing else is written. What ft dmr
    profile adds to a run's command."""

    ft_checkfree: bool = False
    """Rebuild a pipeline stage that is lost with all its peer copies from the stages beside it (a middle stage), rather
    than begin again from the last checkpoint."""

    ft_checkfree_strategy: Literal["weighted", "uniform", "copy"] = "weighted"
    """What a lost stage is made from: its neighbours averaged, weighted by their gradient norms or not, or a copy of
    the previous one."""

    ft_checkfree_norms: Literal["raw", "clipped"] = "raw"
    """The gradient norms that neighbours are weighted by: as they are, or at most --clip-grad each."""

    ft_checkfree_lr_factor: float = 1.1
    """A rebuilt stage's learning rate is that of the others times this; further failures do not compound."""

    ft_checkfree_lr_decay_iters: int = 0
    """Steps over which that factor falls back to 1; 0: it stays."""

    ft_checkfree_plus: bool = False
    """As --ft-checkfree, and train half of the microbatches with the first two and the last two stages swapped, so that
    the first or the last stage can be rebuilt from its neighbour, too."""

    ft_checkfree_most_in_flight: int | None = None
    """With --ft-checkfree-plus: microbatches whose activations a stage may hold at once; without it the schedule with
    the smallest bubbles is taken (ft plan schedule shows what each holds)."""

    @property
    def intercepts_operators(self) -> bool:
        """Return whether DMR intercepts every operator, in order to execute it twice or to profile it."""
        return self.ft_dmr is not None or self.ft_dmr_plan is not None or self.ft_dmr_profile is not None

    @property
    def rebuilds_stages(self) -> bool:
        """Return whether a pipeline stage that is lost on all ranks is rebuilt from its neighbours."""
        return self.ft_checkfree or self.ft_checkfree_plus
