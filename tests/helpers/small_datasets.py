"""Small datasets of random documents."""

import numpy

SEQ = 16


def write_dataset(prefix, documents, dtype="uint16", seed=0):
    """Write an indexed dataset of random byte documents, without sidecar; return its prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = numpy.random.RandomState(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.dtype(dtype).type)
    for n in rng.randint(5, 60, documents):
        builder.add_document(numpy.append(rng.randint(0, 256, n - 1), 256), [n])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
