"""Discrete-event simulation of the control plane, under random faults.

The control plane's decision code and journal (``ft.job.control``) are those of production, and so is the protocol of
the workers (``ft.worker``, ``ft.systems.hot_swap.recovery``). Time, hosts, networks, agents, processes, process groups,
snapshots and the training computation are models. Terms used in this package:

- A logical rank is a position in the parallel layout, and outlives processes. A worker is the process that holds one.
  A standby is a started worker without a logical rank. An agent is the supervisor process of a node.
- An epoch is a version of the map from logical ranks to workers. A seat is an entry of this map. The control plane
  orders to open an epoch, to close it after a failure, to repair the workers, and to resume training.
- A hot-swap replaces lost workers by standbys in a new epoch. A warm restart kills all workers and starts them from the
  last checkpoint. The first epoch, and each one after a warm restart, is called fresh.
- A committed step is one whose optimizer update every logical rank has finished.
- A report is a message of an agent or a worker to the control plane; an order is a message in the other direction.
- A history is one simulated run. The history of a state is a hash over the steps that led to it.
"""
