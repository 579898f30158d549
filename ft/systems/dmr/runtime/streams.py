"""Order second executions of operators after the first ones, where training computes on several CUDA streams.

DMR (dual modular redundancy, SpareTrain) executes operators a second time, some of them later and on another stream:
core computes shared experts on a stream of their own, and waits for it only after the exchange of tokens, in which DMR
executes deferred operators.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch


def current(tensors: Sequence[torch.Tensor]) -> "torch.cuda.Stream | None":
    """Return the CUDA stream on which an operator with these results or arguments is executed now; None on a CPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device)


@contextlib.contextmanager
def joined(streams: "Iterable[torch.cuda.Stream | None]") -> Iterator[None]:
    """Return a context in which the current stream has waited for ``streams``; at its end they wait for the current
    one, because torch's allocator gives memory that is freed back to the stream it was allocated on at once.
    """
    others = []
    for stream in streams:
        if stream is not None and (here := torch.cuda.current_stream(stream.device)) != stream:
            here.wait_stream(stream)
            others.append((stream, here))
    try:
        yield
    finally:
        for stream, here in others:
            stream.wait_stream(here)
