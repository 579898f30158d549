"""The control channel on etcd: reports, orders and the channel's state are keys, which survive the loss of an etcd
server.

Other users may write to the same etcd servers. So entries are signed (``ft.job.control.channel.etcd_keys``), and the
owner of an entry (the control plane for orders, an agent for its reports) restores it if another user deletes or
overwrites it too early.
"""

from ft.job.control.channel.etcd_agent import EtcdAgentChannel
from ft.job.control.channel.etcd_control import EtcdControlChannel

__all__ = ["EtcdAgentChannel", "EtcdControlChannel"]
