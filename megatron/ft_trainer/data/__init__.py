"""The data pipeline, from text to microbatches.

In the order in which a run uses them:

* ``preprocess``: files, folders and JSON lines become an indexed dataset (``P.bin``, ``P.idx``) with a
sidecar (``P.meta.json``) that records how it was made.
* ``indexed``: writes a dataset, and finds what is wrong with one before a run uses it.
* ``datasets``: megatron-core's datasets, with sample indices that rank 0 builds once.
* ``loader``: microbatches, from any position. With several replicas of the model (FT-HSDP), each replica reads a
stream of its own.

Preprocessing imports no torch, so that the tool starts at once.
"""
