"""Small datasets of random documents."""

import numpy

from megatron.ft_trainer.data.indexed import encode_index

SEQ = 16


def write_dataset(prefix, documents, dtype="uint16", seed=0):
    """Write an indexed dataset of random byte documents, without sidecar; return its prefix."""
    rng = numpy.random.RandomState(seed)
    lengths = rng.randint(5, 60, documents)
    numpy.concatenate([[*rng.randint(0, 256, n - 1), 256] for n in lengths]).astype(dtype).tofile(f"{prefix}.bin")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(encode_index(numpy.dtype(dtype), lengths))
    return str(prefix)
