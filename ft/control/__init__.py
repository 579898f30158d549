"""The side-car control plane (paper, section VI-C): membership, verdicts, epochs, recovery.

``controller.decide`` is the whole of it as a pure function; ``sidecar`` is the process around it, ``board`` its wire.
"""
