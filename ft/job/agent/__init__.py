"""``ft run``: one supervisor process per node, its warm pool and its workers.

The agent decides nothing about the run: it reports what its workers do and carries out the control plane's orders.
"""
