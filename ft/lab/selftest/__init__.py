"""The checks of ``ft selftest``: what a cluster's owner runs before a training run relies on fault tolerance there.

Each check is a function in ``ft.lab.selftest.checks`` that runs in a process of its own, with a deadline, on every node
at the same time. ``ft.lab.selftest.table`` lists them in order of importance.
"""
