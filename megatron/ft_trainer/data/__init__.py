"""The data pipeline, from text to microbatches.

In the order in which a run uses them:

* ``preprocess``: files, folders and JSON lines become an indexed dataset (``P.bin``, ``P.idx``) with a
sidecar (``P.meta.json``) that records how it was made.
* ``indexed``, ``sidecar``, ``blend``: find what is wrong with a dataset before megatron-core opens it.
* ``datasets``, ``index_cache``: megatron-core's datasets, with sample indices that rank 0 builds once.
* ``order``, ``loader``: the order of samples, and microbatches. With several replicas of the model
  (FT-HSDP), each replica reads a stream of its own.

Preprocessing imports no torch, so that the tool starts at once. For the same reason the names below are
imported when they are first used.
"""

import importlib

_MODULES = {"MicrobatchLoader": "loader", "build_datasets": "datasets", "dataset_prefixes": "blend"}

__all__ = list(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
