"""The control plane of a run: the process that decides which workers are members, what failed, and how the job
recovers.

It implements the control plane of DEADPOOL, section VI-C. :func:`ft.job.control.controller.decide` makes all decisions
and is a pure state machine without I/O, clocks or randomness. :mod:`ft.job.control.sidecar` is the process around this
state machine, :mod:`ft.job.control.channel` transports its messages, and :mod:`ft.job.control.journal` records its
input, from which the state can be recomputed. The terms are those of :mod:`ft.job.control.state`.
"""
