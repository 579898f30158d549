"""Process groups that can be interrupted and rebuilt in place, epoch by epoch.

``Groups.start`` makes torch.distributed's default process group of the backend ``ft``. From then on every process group
is a ``Group``: an object that stays the same over the life of the process (model, gradient buffers and optimizer hold
it), with connections below it that are cut when an epoch is closed and built anew for the next one.
"""

from ft.job.control.rebuilds import RebuildPlan, plan_rebuild
from ft.state.groups.builder import Meeting
from ft.state.groups.group import Group
from ft.state.groups.registry import Groups

__all__ = ["Group", "Groups", "Meeting", "RebuildPlan", "plan_rebuild"]
