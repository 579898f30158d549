"""Process groups that can be aborted, and rebuilt in place for each epoch (DEADPOOL, section VI-D).

``Groups.start`` makes torch.distributed's default process group, of the backend ``ft``. From then on every process
group is a ``Group``. The ``Group`` object stays the same over the life of the process, because model, gradient buffers
and optimizer hold references to it. Only its connections are cut when an epoch is closed, and made anew for the next
epoch.
"""

from ft.job.control.rebuilds import RebuildPlan, plan_rebuild
from ft.state.groups.builder import Meeting
from ft.state.groups.group import Group
from ft.state.groups.registry import Groups

__all__ = ["Group", "Groups", "Meeting", "RebuildPlan", "plan_rebuild"]
