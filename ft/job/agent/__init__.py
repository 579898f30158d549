"""``ft run``: the node agent, which is the one supervisor process per node, with its warm pool and its workers.

The agent takes no decision about the run. It reports what its workers do and carries out the control plane's orders.
"""
