"""DMR (dual modular redundancy, SpareTrain): execute every operator twice and compare the results to catch silent data
corruption.

``profile`` records the operators and idle times of an iteration, ``plan`` decides when each operator is executed the
second time (as far as possible while the device would otherwise be idle), ``runtime`` does so during training, and
``digest`` computes the hashes by which results are compared.
"""
