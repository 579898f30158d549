"""The board on etcd: reports, orders and the state of the board are keys there, which outlive any one of its servers.

The servers are others' as well: entries are signed (``ft.job.control.channel.etcd_keys``), and their owner, the control
plane of its orders, an agent of its reports, puts back what was deleted or overwritten before it was due.
"""

from ft.job.control.channel.etcd_agent import EtcdAgentChannel
from ft.job.control.channel.etcd_control import EtcdControlChannel

__all__ = ["EtcdAgentChannel", "EtcdControlChannel"]
