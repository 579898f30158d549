"""The side-car control plane (paper, section VI-C): membership, verdicts, epochs, recovery.

``controller.decide`` is all of its judgement, free of I/O, clocks and chance; ``sidecar`` is the process around it and
``board`` its wire. What was decided can be derived again from the journal (``journal.rebuild``).
"""
