"""The library that a worker (training process) of ``ft run`` uses to take part in the run and its recoveries.

A worker has a session with the node agent, the supervisor process of its node. Over it the worker receives the orders
of the control plane, one process for the whole run that decides about recoveries, and sends reports and heartbeats.
"""
