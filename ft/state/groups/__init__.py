"""Process groups that can be aborted, and rebuilt in place for each epoch (DEADPOOL, section VI-D).

When a worker fails, its epoch is closed, and the recovery opens the next epoch with a replacement.

``Groups.start`` makes torch.distributed's default process group, of the backend ``ft``. From then on every process
group is a ``Group``. A ``Group`` object exists as long as the process, because model, gradient buffers and optimizer
hold references to it. Only its connections are closed when an epoch is closed, and remade for the next epoch.
"""

from ft.job.control.repairs import RebuildPlan, plan_rebuild
from ft.state.groups.builder import Rendezvous
from ft.state.groups.group import Group
from ft.state.groups.registry import Groups

__all__ = ["Group", "Groups", "RebuildPlan", "Rendezvous", "plan_rebuild"]
