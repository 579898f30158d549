"""The node agent: the supervisor process that ``ft run`` starts on each node, like torchrun's agent.

The agent starts the node's workers (training processes) and watches them. It forks them from the warm pool, a process
that has already imported torch and megatron. It takes no decision about the run: it reports events to the control
plane, one process for the whole run that decides about recoveries, and carries out the control plane's orders.
"""
